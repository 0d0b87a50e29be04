"""The compiled core: graphs, packing, allocation, the first generation, and plans; `ggml_sched._core` re-exports it."""
