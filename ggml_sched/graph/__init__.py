"""Graphs as files, tensors as NumPy arrays, and the block formats of quantised types."""
