"""Blocks of 32 against a scalar reimplementation, known bytes, and gguf where installed; bf16."""

import struct

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.graph import quants

RNG = np.random.default_rng(7)
KINDS = [gs.Type.Q4_0, gs.Type.Q4_1, gs.Type.Q5_0, gs.Type.Q5_1, gs.Type.Q8_0]
F = np.float32


def half(x) -> bytes:
    with np.errstate(over="ignore"):
        return struct.pack("<H", np.float16(x).view(np.uint16))


def scalar_quantize(row, kind) -> bytes:
    """One block of 32, element by element, in f32 as the reference does it."""
    row = [F(v) for v in row]
    if kind == gs.Type.Q8_0:
        d = max(abs(v) for v in row) / F(127)
        inverse = F(1) / d if d else F(0)
        q = []
        for v in row:
            scaled = float(v * inverse)
            q.append(int(np.sign(scaled) * np.floor(abs(scaled) + 0.5)))
        return half(d) + struct.pack("<32b", *q)
    top = 15 if kind in (gs.Type.Q4_0, gs.Type.Q4_1) else 31
    if kind in (gs.Type.Q4_0, gs.Type.Q5_0):
        extreme = F(0)
        for v in row:
            if abs(v) > abs(extreme):
                extreme = v
        d = extreme / F(-(top + 1) // 2)
        inverse = F(1) / d if d else F(0)
        q = [min(top, int(v * inverse + F((top + 1) / 2 + 0.5))) for v in row]
        head = half(d)
    else:
        low, high = min(row), max(row)
        d = (high - low) / F(top)
        inverse = F(1) / d if d else F(0)
        q = [min(top, int((v - low) * inverse + F(0.5))) for v in row]
        head = half(d) + half(low)
    if top == 31:
        head += struct.pack("<I", sum((v >> 4) << j for j, v in enumerate(q)))
    return head + bytes((q[j] & 15) | (q[j + 16] & 15) << 4 for j in range(16))


def scalar_dequantize(block: bytes, kind) -> list[float]:
    def f16(at):
        return F(np.frombuffer(block, np.float16, 1, at)[0])

    d = f16(0)
    if kind == gs.Type.Q8_0:
        return [F(v) * d for v in struct.unpack("<32b", block[2:])]
    q = [b & 15 for b in block[-16:]] + [b >> 4 for b in block[-16:]]
    if kind in (gs.Type.Q5_0, gs.Type.Q5_1):
        (bits,) = struct.unpack("<I", block[-20:-16])
        q = [v | (bits >> j & 1) << 4 for j, v in enumerate(q)]
    if kind in (gs.Type.Q4_0, gs.Type.Q5_0):
        return [F(v - (8 if kind == gs.Type.Q4_0 else 16)) * d for v in q]
    return [F(v) * d + f16(2) for v in q]


def rows() -> np.ndarray:
    """Blocks of many sizes: zeros, one value, ties, tiny and large numbers."""
    x = RNG.standard_normal((60, 64)).astype(F) * np.exp(RNG.uniform(-8, 8, (60, 1))).astype(F)
    x[0] = 0
    x[1] = 3.25
    x[2] = -1
    x[3, :32] = np.linspace(-8, 7, 32)
    x[4] = np.where(np.arange(64) % 2, 2, -2)  # two extremes: the first decides the sign
    x[5] = -0.0
    x[6] = RNG.integers(-127, 128, 64) / 2
    return x


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_blocks_equal_the_scalar_reference(kind):
    x = rows()
    blocks = quants.quantize(x, kind)
    assert blocks.shape == (60, 2, kind.type_size) and blocks.dtype == np.uint8
    for i in range(60):
        for j in range(2):
            want = scalar_quantize(x[i, 32 * j : 32 * j + 32], kind)
            assert blocks[i, j].tobytes() == want, (i, j)
    back = quants.dequantize(blocks, kind)
    for i in range(60):
        want = sum((scalar_dequantize(b.tobytes(), kind) for b in blocks[i]), [])
        assert np.array_equal(back[i], np.array(want, F))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_bytes_dequantize_as_the_scalar_reference(kind):
    blocks = RNG.integers(0, 256, (200, kind.type_size), np.uint8)
    blocks[:, 1] &= 0x7B  # finite scales
    if kind in (gs.Type.Q4_1, gs.Type.Q5_1):
        blocks[:, 3] &= 0x7B
    want = [v for b in blocks for v in scalar_dequantize(b.tobytes(), kind)]
    assert np.array_equal(quants.dequantize(blocks, kind), np.array(want, F))


def test_known_blocks():
    assert quants.quantize(np.full(32, 127, F), gs.Type.Q8_0).tobytes() == half(1) + b"\x7f" * 32
    assert quants.quantize(np.full(32, -8, F), gs.Type.Q4_0).tobytes() == half(1) + b"\0" * 16
    assert quants.quantize(np.full(32, -16, F), gs.Type.Q5_0).tobytes() == half(1) + b"\0" * 20
    assert quants.quantize(np.r_[np.zeros(16), np.full(16, 15)].astype(F), gs.Type.Q4_1).tobytes() == (
        half(1) + half(0) + b"\xf0" * 16
    )
    assert quants.quantize(np.r_[np.zeros(16), np.full(16, 31)].astype(F), gs.Type.Q5_1).tobytes() == (
        half(1) + half(0) + b"\0\0\xff\xff" + b"\xf0" * 16
    )
    assert quants.quantize(np.zeros(32, F), gs.Type.Q4_0).tobytes() == half(-0.0) + b"\x88" * 16


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equal_to_gguf(kind):
    gguf = pytest.importorskip("gguf")
    other = gguf.GGMLQuantizationType(int(kind))
    x = np.delete(rows(), 5, 0)  # gguf's scale of a block of -0 has another sign than ggml's
    theirs = gguf.quants.quantize(x, other)
    ours = quants.quantize(x, kind)
    assert np.array_equal(ours.reshape(theirs.shape), theirs)
    assert np.array_equal(quants.dequantize(ours, kind), gguf.quants.dequantize(theirs, other))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_round_trip_error_is_at_most_half_a_step(kind):
    x = RNG.uniform(-1, 1, (50, 32)).astype(F)
    step = {
        gs.Type.Q4_0: 1 / 8,
        gs.Type.Q4_1: 2 / 15,
        gs.Type.Q5_0: 1 / 16,
        gs.Type.Q5_1: 2 / 31,
        gs.Type.Q8_0: 1 / 127,
    }
    error = np.abs(quants.dequantize(quants.quantize(x, kind), kind) - x)
    # The signed kinds have one level less on the other side: a full step there.
    assert error.max() <= step[kind] * (1.01 if kind in (gs.Type.Q4_0, gs.Type.Q5_0) else 0.6)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_that_are_not_finite_neither_warn_nor_raise(kind):
    for bad in (np.nan, np.inf, -np.inf, 3e38, 1e-45):
        x = np.ones(32, F)
        x[5] = bad
        assert quants.dequantize(quants.quantize(x, kind), kind).shape == (32,)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shapes(kind):
    assert quants.quantize(np.zeros((2, 0, 64)), kind).shape == (2, 0, 2, kind.type_size)
    assert quants.quantize(np.zeros((2, 0)), kind).shape == (2, 0, kind.type_size)
    assert quants.dequantize(np.zeros((3, 0, kind.type_size), np.uint8), kind).shape == (3, 0)
    x = RNG.standard_normal((6, 5, 64)).astype(F)
    turned = quants.quantize(x.swapaxes(0, 1), kind)
    assert np.array_equal(turned, quants.quantize(np.ascontiguousarray(x.swapaxes(0, 1)), kind))
    blocks = quants.quantize(x, kind)[::2]
    assert np.array_equal(quants.dequantize(blocks, kind), quants.dequantize(blocks.copy(), kind))
    with pytest.raises(ValueError, match="whole"):
        quants.quantize(np.zeros((2, 33)), kind)
    with pytest.raises(ValueError, match="blocks are uint8"):
        quants.dequantize(np.zeros((2, kind.type_size + 1), np.uint8), kind)


def test_other_types_are_refused():
    for kind in (gs.Type.IQ2_XXS, gs.Type.Q8_1, gs.Type.Q8_K, gs.Type.TQ1_0, gs.Type.F32):
        with pytest.raises(gs.UnsupportedOp, match=str(kind)):
            quants.quantize(np.zeros(256), kind)
        with pytest.raises(gs.UnsupportedOp):
            quants.dequantize(np.zeros((1, kind.type_size), np.uint8), kind)


def test_bf16_rounds_to_nearest_even_and_keeps_nan():
    bits = np.array(
        [
            0x3F800000, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800001, 0x7FFFFFFF, 0x80000000,
            0x00000001,
        ],
        np.uint32,
    )
    got = quants.f32_to_bf16(bits.view(F))
    assert [hex(v) for v in got] == [
        "0x3f80", "0x3f80", "0x3f81", "0x3f82", "0x7f80", "0x7f80", "0xffc0", "0x7fff", "0x8000", "0x0",
    ]
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = quants.bf16_to_f32(every)
    assert np.array_equal(wide.view(np.uint32), every.astype(np.uint32) << 16)
    kept = quants.f32_to_bf16(wide)
    nan = np.isnan(wide)
    assert np.array_equal(kept[~nan], every[~nan]) and np.isnan(quants.bf16_to_f32(kept[nan])).all()
    assert quants.f32_to_bf16(np.zeros((0, 3), F)).shape == (0, 3)
    assert quants.f32_to_bf16(np.float32(1)).shape == ()
