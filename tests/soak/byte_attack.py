"""Bytes with a few mistakes: flipped bits, extreme numbers, pieces lost, doubled, swapped or put in."""

import random
import struct

EXTREMES = [0, 1, 0x7F, 0xFF, *((1 << n) - off for n in (15, 31, 32, 62, 63) for off in (0, 1)), (1 << 64) - 1]
TEXT = (b"-", b"9", b"[", b"]", b"{", b"}", b"null", b"true", b"1e9", b"1e999", b"NaN", b'"', b"{}", b"9" * 20,
        b"\\u0000", b"\xff")


def mutated_bytes(rng: random.Random, data: bytes, end: int | None = None) -> bytes:
    """`data` with one to six changes, most of them before `end`."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if not out:
            break
        limit = max(1, min(len(out), end if end is not None and rng.random() < 0.95 else len(out)))
        at = rng.randrange(limit)
        match rng.randrange(9):
            case 0 | 1:
                out[at] ^= 1 << rng.randrange(8)
            case 2 | 3:
                form, top = rng.choice((("<Q", 64), ("<Q", 64), ("<I", 32), (">Q", 64)))
                number = struct.pack(form, rng.choice(EXTREMES) % (1 << top))
                out[at : at + len(number)] = number
            case 4:
                del out[at : at + rng.choice((1, 2, 4, 8, 64))]
            case 5:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 6:
                other, size = rng.randrange(limit), rng.choice((1, 4, 8, 24))
                out[at : at + size], out[other : other + size] = out[other : other + size], out[at : at + size]
            case 7:
                out[at:at] = rng.choice((rng.randbytes(rng.randint(1, 16)), rng.choice(TEXT)))
            case 8:
                del out[rng.randrange(len(out) + 1) :]
    return bytes(out)
