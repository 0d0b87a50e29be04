"""Worker threads of backends and pipelines, locks, and `cached_property` without a lock."""
