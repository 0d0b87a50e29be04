"""Messages between a driver and its workers: a JSON header and blocks of bytes.

A message has no pickled object, no name of a type and no address.  A message is checked as a whole before any of it is
used, so that a wrong one changes nothing.

    bytes 0 .. 3     MAGIC
    bytes 4 .. 7     size of the header, little endian
    header           a JSON object; "sizes" are the sizes of the blocks
    blocks           one after the other, to the end
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from ggml_sched.errors import BackendError

__all__ = ["MAX_BLOCK_BYTES", "MAX_HEADER", "MAX_MESSAGE", "MessageError", "fields_of", "natural", "packed", "text",
           "unpacked"]

MAGIC = b"gsm1"
START = struct.Struct("<4sI")
MAX_HEADER = 1 << 26
"""The most bytes of a header: enough for a split of some hundred thousand tensors."""
MAX_BLOCKS = 1 << 16
MAX_BLOCK_BYTES = 1 << 27
"""The most bytes of all blocks of a message together; drivers send some MiB."""
MAX_MESSAGE = START.size + MAX_HEADER + MAX_BLOCK_BYTES
ENCODED = json.JSONEncoder(separators=(",", ":")).encode
MAX_NUMBER = 1 << 62
"""Every size, offset and number in a message is below this."""


class MessageError(BackendError):
    """A message that is truncated, mutated, or asks for what its receiver does not have."""


def packed(header: dict[str, Any], blocks: Sequence[bytes | bytearray | memoryview] = ()) -> bytes:
    """The bytes of a message; the header must not have a field "sizes"."""
    said = ENCODED({**header, "sizes": [len(block) for block in blocks]}).encode()
    return b"".join((START.pack(MAGIC, len(said)), said, *blocks))


def unpacked(message: bytes | bytearray | memoryview) -> tuple[dict[str, Any], list[memoryview]]:
    """The header and the blocks, which are views of the message.  MessageError if it is not what `packed` returns."""
    whole = memoryview(message)
    if len(whole) > MAX_MESSAGE:
        raise MessageError(f"a message of {len(whole)} bytes, at most {MAX_MESSAGE}")
    if len(whole) < START.size:
        raise MessageError(f"a message of {len(whole)} bytes has no header")
    magic, size = START.unpack_from(whole)
    if magic != MAGIC:
        raise MessageError(f"a message starts with {MAGIC!r}, not with {magic!r}")
    if size > MAX_HEADER or size > len(whole) - START.size:
        raise MessageError(f"a header of {size} bytes in a message of {len(whole)} bytes")
    try:
        header = json.loads(bytes(whole[START.size : START.size + size]))
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the header of a message is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise MessageError("the header of a message is not an object")
    sizes = header.pop("sizes", None)
    if not isinstance(sizes, list) or len(sizes) > MAX_BLOCKS:
        raise MessageError(f"a message has no sizes of blocks, or more than {MAX_BLOCKS}")
    blocks, at = [], START.size + size
    for n in sizes:
        end = at + natural(n, "the size of a block")
        if end > len(whole):
            raise MessageError(f"a block of {n} bytes ends at {end}, outside a message of {len(whole)} bytes")
        blocks.append(whole[at:end])
        at = end
    if at != len(whole):
        raise MessageError(f"a message of {len(whole)} bytes whose blocks end at {at}")
    return header, blocks


def natural(value: Any, what: str, limit: int = MAX_NUMBER) -> int:
    """`value`, which must be an integer in 0 .. limit - 1; MessageError otherwise."""
    if type(value) is not int or not 0 <= value < limit:
        raise MessageError(f"{what} is {_shown(value)}, not an integer in 0 .. {limit - 1}")
    return value


def text(value: Any, what: str, longest: int = 1 << 10) -> str:
    """`value`, which must be a string; MessageError otherwise."""
    if not isinstance(value, str) or len(value) > longest:
        raise MessageError(f"{what} is {_shown(value)}, not a text of at most {longest} characters")
    return value


def fields_of(value: Any, what: str, n: int | None = None) -> list[Any]:
    """`value`, which must be a list, of `n` members if that is given; MessageError otherwise."""
    if not isinstance(value, list) or n is not None and len(value) != n:
        raise MessageError(f"{what} is {_shown(value)}, not a list{'' if n is None else f' of {n}'}")
    return value


def _shown(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
