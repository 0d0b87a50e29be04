"""The memory of this machine and of this process's control groups, for limits and defaults.

Imports no other module of the package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

__all__ = ["host_memory"]

MEMINFO = "/proc/meminfo"
GROUPS = "/proc/self/cgroup"
GROUP_ROOT = "/sys/fs/cgroup"


def host_memory() -> int | None:
    """Bytes that the system can still give to this process: what Linux counts as available, or less where a limit of
    a control group (of a container, for example) leaves less; on other systems all of the memory.

    Pages of files count as free, as the system drops them when memory is needed.
    """
    try:
        with open(MEMINFO, encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return min([int(line.split()[1]) << 10, *_left_in_groups()])
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _left_in_groups() -> Iterator[int]:
    """The bytes that the limit of each control group of this process leaves, in both versions of control groups."""
    try:
        lines = _read(GROUPS).splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, files = GROUP_ROOT, "memory.max", "memory.current", ("active_file", "inactive_file")
        elif "memory" in controllers.split(","):
            root, limit, used = f"{GROUP_ROOT}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = ("total_active_file", "total_inactive_file")
        else:
            continue
        # A container sees the path of its group in the machine, but only its own group's folder: the root.
        folder = root + path
        while len(folder) >= len(root):
            with suppress(OSError, ValueError):     # ValueError: "max", no limit
                most = int(_read(f"{folder}/{limit}"))
                stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
                held = int(_read(f"{folder}/{used}")) - sum(int(stat.get(name, 0)) for name in files)
                yield max(0, most - max(0, held))
            folder = os.path.dirname(folder)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
