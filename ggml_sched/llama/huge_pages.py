"""Moves bytes of mapped files to huge pages, at the same addresses.

Weights are read from beginning to end for every token, and a processor translates addresses page by page: in pages of
4 KiB, which a file's mapping has unless Linux keeps the file in larger ones, that takes up to a third of the time.
Here bytes are copied to private huge pages, which then replace the mapping's pages (mremap).  The addresses stay, so
nothing that refers to them has to change, and what reads them meanwhile, in this thread or another, finds the same
bytes.  Linux only; elsewhere nothing moves.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from ggml_sched._host import host_memory

if TYPE_CHECKING:
    from ggml_sched.backend import Buffer

__all__ = ["HugePages", "Ranges", "huge_page_size"]

Ranges = list[tuple[int, int]]
"""Addresses [first, stop)."""

SETTINGS = "/sys/kernel/mm/transparent_hugepage"
PAGES = "/proc/self/smaps"
LARGEST_PAGE = 32 << 20
"""Huge pages that are larger (512 MiB, on ARM with pages of 64 KiB) are not used."""
STEPS = 32
"""Into how many parts the bytes are divided.  Moving a byte takes about four times as long as a token's kernels take to
read it, so that each of as many tokens takes an eighth longer."""
PIECE = 32 << 20
"""The most bytes of which the process has two copies."""
SHARE = 4
"""Bytes move while they are at most one part in as many of the free memory."""
LOOKS = 8
"""The free memory is read once in so many steps: to read it takes a tenth of a small model's token."""
PROT_READ, PROT_WRITE = 1, 2
MAP_PRIVATE, MAP_ANONYMOUS = 0x02, 0x20
MREMAP_MAYMOVE, MREMAP_FIXED = 1, 2
MADV_HUGEPAGE = 14
FAILED = ctypes.c_void_p(-1).value


@cache
def huge_page_size() -> int:
    """Bytes of a huge page that Linux gives to memory which is marked for it; 0 where it gives none."""
    if sys.platform != "linux":
        return 0
    try:
        with open(f"{SETTINGS}/enabled", encoding="ascii") as file:
            enabled = file.read()
        with open(f"{SETTINGS}/hpage_pmd_size", encoding="ascii") as file:
            size = int(file.read())
    except (OSError, ValueError):
        return 0
    return 0 if "[never]" in enabled or size > LARGEST_PAGE else size


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    address, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, arguments in (("mmap", address, (address, size, flags, flags, flags, ctypes.c_long)),
                                    ("mremap", address, (address, size, size, flags, address)),
                                    ("munmap", flags, (address, size)), ("madvise", flags, (address, size, flags)),
                                    ("mprotect", flags, (address, size, flags)),
                                    ("mincore", flags, (address, size, address))):
        function = getattr(libc, name)
        function.restype, function.argtypes = result, arguments
    return libc


class HugePages:
    """Moves the whole huge pages within ranges of mapped files, a part at each `step()`.

    `ranges`: for each buffer, addresses in it of mapped files that nothing writes; they must stay mapped until the last
    step.  The buffers count what has `moved`.  Ranges that Linux has in huge pages already stay.  Moving ends early
    where the bytes that are left are more than 1 / SHARE of the free memory, or where Linux has no huge pages to give;
    it raises nothing.
    """

    def __init__(self, ranges: dict[Buffer, Ranges]) -> None:
        self._left = [(buffer, first, stop) for buffer, of in ranges.items()
                      for first, stop in _whole(_small(of))]
        self._part = -(-self.remaining // STEPS)
        self._steps = 0

    @property
    def remaining(self) -> int:
        """Bytes that are to move."""
        return sum(stop - first for _, first, stop in self._left)

    def step(self) -> bool:
        """Move the next part; whether there is more to move."""
        if self._steps % LOOKS == 0:
            free = host_memory()
            if free is None or self.remaining * SHARE > free:
                self._left.clear()
        self._steps += 1
        todo = self._part
        while todo > 0 and self._left:
            buffer, first, stop = self._left.pop()
            middle = min(stop, first + PIECE, first + _round_up(todo))
            if middle < stop:
                self._left.append((buffer, middle, stop))
            if not _move(first, middle - first):
                self._left.clear()
                break
            buffer.moved += middle - first
            todo -= middle - first
        return bool(self._left)


def _round_up(n: int) -> int:
    return -(-n // huge_page_size()) * huge_page_size()


def _whole(ranges: Ranges) -> Ranges:
    """The whole huge pages in ranges."""
    size = huge_page_size()
    found = ((_round_up(first), stop // size * size) for first, stop in ranges)
    return [(first, stop) for first, stop in found if first < stop]


def _small(ranges: Ranges) -> Ranges:
    """The ranges that are not in huge pages for the most part, as far as they are in memory."""
    if not huge_page_size() or not ranges:
        return []
    mappings = [*_mappings()]
    found = []
    for first, stop in ranges:
        counts = [(held, huge) for start, end, held, huge in mappings if start < stop and first < end]
        if 2 * sum(huge for _, huge in counts) < sum(held for held, _ in counts):
            found.append((first, stop))
    return found


def _mappings() -> Iterator[tuple[int, int, int, int]]:
    """The mappings of this process: first address, end, bytes in memory, and bytes of these in huge pages."""
    with suppress(OSError, ValueError), open(PAGES, encoding="utf-8", errors="replace") as file:
        start = end = held = huge = 0
        for line in file:
            name, _, value = line.partition(" ")
            if not name.endswith(":"):
                start, end = (int(address, 16) for address in name.split("-"))
            elif name == "Rss:":
                held, huge = int(value.split()[0]) << 10, 0
            elif name in ("AnonHugePages:", "FilePmdMapped:", "ShmemPmdMapped:"):
                huge += int(value.split()[0]) << 10
            elif name == "VmFlags:":
                yield start, end, held, huge


def _move(address: int, size: int) -> bool:
    """Replace whole huge pages of a mapping by a private copy, which is read-only; whether Linux had huge pages."""
    libc, page = _libc(), huge_page_size()
    taken = libc.mmap(None, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    if taken == FAILED:
        return False
    copy = _round_up(taken)
    libc.munmap(copy + size, taken + page - copy)
    if copy > taken:
        libc.munmap(taken, copy - taken)
    try:
        libc.madvise(copy, size, MADV_HUGEPAGE)
        is_filled = _has_huge_pages(copy, size)
        if is_filled:
            ctypes.memmove(copy, address, size)
    except BaseException:       # an interrupt
        libc.munmap(copy, size)
        raise
    if (is_filled and libc.mprotect(copy, size, PROT_READ) == 0
            and libc.mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, address) == address):
        return True
    libc.munmap(copy, size)
    return False


def _has_huge_pages(address: int, size: int) -> bool:
    """Write a byte of each huge page of fresh memory; whether at least half of the memory is there afterwards."""
    for first in range(address, address + size, huge_page_size()):
        ctypes.memset(first, 0, 1)
    there = ctypes.create_string_buffer(size // mmap.PAGESIZE)      # a byte for each small page, 1 if it is there
    return _libc().mincore(address, size, there) == 0 and 2 * there.raw.count(1) >= len(there)
