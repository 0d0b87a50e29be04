"""Worker threads of backends and pipelines, and locks for computes."""
