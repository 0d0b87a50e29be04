"""Reads ELF files: the functions of a shared library, local ones included, and the kernels of a cubin."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["Kernel", "functions", "kernels", "size_of_image"]

SYMBOLS, NO_BITS = 2, 8             # types of sections
FUNCTION = 2                        # type of a symbol
PARAMETER, PARAMETER_2, MOST_THREADS = 0x17, 0x45, 0x05     # EIATTR_*: attributes of .nv.info sections
WITH_SIZE = 4                       # EIFMT_SVAL: the attribute's bytes follow


class Section(NamedTuple):
    """The fields of a section header that are used here, in its order."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


class Kernel(NamedTuple):
    """A kernel of a cubin: bytes of each parameter, the launch bound in threads, bytes of static shared memory."""

    sizes: tuple[int, ...]
    most_threads: int
    shared: int


def _sections(data: bytes) -> list[Section]:
    start, = struct.unpack_from("<Q", data, 0x28)
    entry, count, _ = struct.unpack_from("<HHH", data, 0x3A)
    return [Section(*struct.unpack_from("<IIQQQQIIQQ", data, start + i * entry)) for i in range(count)]


def _text(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def functions(data: bytes) -> dict[str, tuple[int, int]]:
    """{name: (address, bytes)} of the defined functions."""
    sections, found = _sections(data), {}
    for table in sections:
        if table.type != SYMBOLS:
            continue
        strings = sections[table.link].offset
        for at in range(table.offset, table.offset + table.size, 24):
            name, info, _, _, address, size = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == FUNCTION and address:
                found[_text(data, strings + name)] = address, size
    return found


def size_of_image(header: bytes, read) -> int:
    """The bytes of an ELF image of which `header` is the beginning; `read(n)` gives its first n bytes."""
    start, = struct.unpack_from("<Q", header, 0x28)
    entry, count, _ = struct.unpack_from("<HHH", header, 0x3A)
    end = start + entry * count
    return max([end, *(s.offset + (0 if s.type == NO_BITS else s.size) for s in _sections(read(end)))])


def kernels(cubin: bytes) -> dict[str, Kernel]:
    """{name: kernel} of a cubin; ValueError for other bytes."""
    if cubin[:4] != b"\x7fELF":
        raise ValueError("no cubin")
    sections = _sections(cubin)
    strings = sections[struct.unpack_from("<H", cubin, 0x3E)[0]].offset
    named = {_text(cubin, strings + s.name): s for s in sections}
    found = {}
    for name in named:
        kernel = name.removeprefix(".text.")
        about = named.get(f".nv.info.{kernel}")
        if kernel != name and about is not None:
            shared = named.get(f".nv.shared.{kernel}")
            found[kernel] = _described(cubin[about.offset : about.offset + about.size], shared.size if shared else 0)
    return found


def _described(info: bytes, shared: int) -> Kernel:
    sizes, most, at = {}, 1024, 0
    while at + 4 <= len(info):
        form, attribute, size = info[at], info[at + 1], struct.unpack_from("<H", info, at + 2)[0]
        at += 4
        if form != WITH_SIZE:
            continue
        body = info[at : at + size]
        at += size
        if attribute in (PARAMETER, PARAMETER_2):
            _, ordinal, _, packed = struct.unpack_from("<IHHI", body)
            sizes[ordinal] = packed >> 18 or struct.unpack_from("<H", body, 10)[0]
        elif attribute == MOST_THREADS:
            most, = struct.unpack_from("<I", body)
    return Kernel(tuple(sizes[i] for i in sorted(sizes)), most, shared)
