"""The compiled core: graphs, packing, allocation, ggml's first generation, plans; `ggml_sched._core` re-exports it."""
