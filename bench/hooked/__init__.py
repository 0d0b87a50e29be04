"""llama.cpp with and without our planner behind it: models without weights, libraries to measure with, a process."""
