"""Types, tensors, ops and graphs; independent of planning."""
