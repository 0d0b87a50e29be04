"""The instruction sets for which this machine's architecture has kernels, each of which has those before it."""

import platform

ISAS = ("portable", "neon", "dotprod") if platform.machine() in ("aarch64", "arm64") else ("portable", "avx2", "avx512")
