"""Threads that work for backends and pipelines, and locks that a compute takes."""
