"""Graph allocation: lifetimes, in-place reuse, and the offsets of arenas; all of it in C."""
