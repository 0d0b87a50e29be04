"""Running plans: buffers, addresses, bound steps, and queued computes."""
