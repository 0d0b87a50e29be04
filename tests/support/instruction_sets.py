"""The instruction sets for which this machine's architecture has kernels, from the slowest to the fastest."""

import platform

ISAS = (("portable", "neon", "dotprod") if platform.machine() in ("aarch64", "arm64")
        else ("portable", "avx2", "avxvnni", "avx512"))
