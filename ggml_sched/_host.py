"""The memory of this machine, for limits and defaults; imports no other module of the package."""

from __future__ import annotations

import os

__all__ = ["host_memory"]

MEMINFO = "/proc/meminfo"


def host_memory() -> int | None:
    """Bytes that the system can still give, as Linux counts them; elsewhere all of its memory."""
    try:
        with open(MEMINFO, encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
