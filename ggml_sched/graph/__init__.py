"""Reads and writes graphs as files, converts tensors from and to NumPy arrays, and knows ggml's quantised types."""
