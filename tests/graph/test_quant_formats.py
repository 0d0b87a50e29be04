"""K-quants and codebook types: any bytes against a scalar reader and gguf, and how well quantising does."""

import struct

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.graph import quants

T = gs.Type
F = np.float32
NEW = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS, T.MXFP4]
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def f16(block: bytes, at: int) -> np.float32:
    return F(np.frombuffer(block, np.float16, 1, at)[0])


def pair(packed: bytes, j: int) -> tuple[int, int]:
    """Scale and minimum j of q4_K and q5_K."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def element(b: bytes, kind: gs.Type, i: int) -> np.float32:
    """Element i of a block, as ggml's headers describe it."""
    lane, group = i % 32, i // 32
    if kind in (T.IQ4_NL, T.MXFP4):
        packed = b[-16:]
        q = packed[i % 16] >> 4 * (i // 16) & 15
        if kind == T.IQ4_NL:
            return f16(b, 0) * F(UNEVEN[q])
        return F(2.0 ** (b[0] - 128)) * F(FP4[q])
    if kind == T.IQ4_XS:
        (high,) = struct.unpack("<H", b[2:4])
        scale = b[4 + group // 2] >> 4 * (group % 2) & 15 | (high >> 2 * group & 3) << 4
        q = b[8 + 16 * group + i % 16] >> 4 * (lane // 16) & 15
        return f16(b, 0) * F(scale - 32) * F(UNEVEN[q])
    if kind == T.Q2_K:
        q = b[16 + 32 * (i // 128) + lane] >> 2 * (group % 4) & 3
        packed = b[i // 16]
        return f16(b, 80) * F(packed & 15) * F(q) - f16(b, 82) * F(packed >> 4)
    if kind == T.Q3_K:
        q = b[32 + 32 * (i // 128) + lane] >> 2 * (group % 4) & 3
        q -= 0 if b[lane] >> group & 1 else 4
        j = i // 16
        packed = b[96:108]
        scale = (packed[j % 8] >> 4 * (j // 8) & 15) | (packed[8 + j % 4] >> 2 * (j // 4) & 3) << 4
        return f16(b, 108) * F(scale - 32) * F(q)
    if kind == T.Q6_K:
        half, quarter = i // 128, i % 128 // 32
        low = b[64 * half + 32 * (quarter % 2) + lane] >> 4 * (quarter // 2) & 15
        high = b[128 + 32 * half + lane] >> 2 * quarter & 3
        scale = struct.unpack("b", b[192 + i // 16 : 193 + i // 16])[0]
        return f16(b, 208) * F(scale) * F((low | high << 4) - 32)
    scale, minimum = pair(b[4:16], group)
    q = b[-128:][32 * (group // 2) + lane] >> 4 * (group % 2) & 15
    if kind == T.Q5_K:
        q |= (b[16 + lane] >> group & 1) << 4
    return f16(b, 0) * F(scale) * F(q) - f16(b, 2) * F(minimum)


def any_bytes(kind: gs.Type, n: int) -> np.ndarray:
    """Random blocks, and among them constant ones, so that scales are 0, NaN, infinite and subnormal."""
    blocks = np.random.default_rng(int(kind)).integers(0, 256, (n, kind.type_size), np.uint8)
    for i, value in enumerate((0, 255, 0x7C, 0xFC, 1, 0x80)):
        blocks[i] = value
    return blocks


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    a, b = np.ascontiguousarray(a, F).reshape(-1), np.ascontiguousarray(b, F).reshape(-1)
    return bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())


@pytest.mark.parametrize("kind", NEW, ids=str)
def test_any_bytes_read_as_the_scalar_reader_does(kind):
    blocks = any_bytes(kind, 40)
    with np.errstate(all="ignore"):
        want = [element(b.tobytes(), kind, i) for b in blocks for i in range(kind.block_size)]
    assert same_bits(quants.dequantize(blocks, kind), np.array(want, F))


@pytest.mark.parametrize("kind", sorted(quants.QUANTIZED), ids=str)
def test_any_bytes_read_as_gguf_does(kind):
    gguf = pytest.importorskip("gguf")
    blocks = any_bytes(kind, 1000)
    with np.errstate(all="ignore"):
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(int(kind)))
    assert same_bits(quants.dequantize(blocks, kind), theirs)


def sample() -> np.ndarray:
    """Rows as weights have them: normal, with outliers, with a mean, and uniform."""
    rng = np.random.default_rng(11)
    return np.concatenate([rng.standard_normal((8, 1024)), 0.1 * rng.standard_t(3, (8, 1024)),
                           0.1 * rng.standard_normal((8, 1024)) + 0.05, rng.uniform(-1, 1, (8, 1024))]).astype(F)


# The root of the mean square of errors of ggml's quantize_row (0.25) on each quarter of `sample`.
GGML = {
    T.Q2_K: (0.294, 0.0612, 0.0289, 0.136),
    T.Q3_K: (0.153, 0.0327, 0.0161, 0.0723),
    T.Q4_K: (0.072, 0.0159, 0.00708, 0.0317),
    T.Q5_K: (0.0366, 0.00801, 0.00356, 0.0161),
    T.Q6_K: (0.0181, 0.00424, 0.00194, 0.00765),
    T.IQ4_NL: (0.0764, 0.0171, 0.00837, 0.037),
    T.IQ4_XS: (0.0769, 0.0173, 0.00843, 0.0373),
    T.MXFP4: (0.115, 0.0234, 0.0131, 0.0838),
}


@pytest.mark.parametrize("kind", NEW, ids=str)
def test_errors_are_close_to_those_of_ggml(kind):
    x = sample()
    error = quants.dequantize(quants.quantize(x, kind), kind) - x
    for ours, theirs in zip(np.sqrt((error.reshape(4, -1) ** 2).mean(axis=1)), GGML[kind], strict=True):
        assert ours <= 1.1 * theirs


@pytest.mark.parametrize("kind", NEW, ids=str)
def test_what_blocks_hold_exactly_survives(kind):
    """Zeros, and one value in each block."""
    n = kind.block_size
    x = np.zeros((3, n), F)
    x[1, 5] = -1
    x[2, 7] = 2
    assert np.allclose(quants.dequantize(quants.quantize(x, kind), kind), x, rtol=0.02, atol=0.02)
    assert not quants.dequantize(quants.quantize(x[:1], kind), kind).any()


@pytest.mark.parametrize("kind", NEW, ids=str)
def test_values_that_are_not_finite_stay_in_their_block(kind):
    n = kind.block_size
    for bad in (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45):
        x = np.ones(3 * n, F)
        x[n + 5] = bad
        back = quants.dequantize(quants.quantize(x, kind), kind)
        assert np.abs(np.r_[back[:n], back[2 * n :]] - 1).max() < 0.2


@pytest.mark.parametrize("kind", NEW, ids=str)
def test_quantising_does_not_depend_on_neighbours_or_strides(kind):
    x = sample()
    whole = quants.quantize(x, kind)
    for rows in (slice(3, 4), slice(0, 32, 5)):
        assert np.array_equal(quants.quantize(x[rows], kind), whole[rows])
    turned = np.ascontiguousarray(x.reshape(4, 8, 1024).swapaxes(0, 1))
    assert np.array_equal(quants.quantize(turned.swapaxes(0, 1), kind).reshape(whole.shape), whole)
    many = np.tile(x, (8, 1))  # more than one chunk
    assert np.array_equal(quants.quantize(many, kind), np.tile(whole, (8, 1, 1)))


@pytest.mark.parametrize("kind", NEW, ids=str)
def test_shapes_of_blocks(kind):
    n = kind.block_size
    assert quants.quantize(np.zeros((2, 0, 2 * n)), kind).shape == (2, 0, 2, kind.type_size)
    assert quants.quantize(np.zeros((2, 0)), kind).shape == (2, 0, kind.type_size)
    assert quants.dequantize(np.zeros((3, 0, kind.type_size), np.uint8), kind).shape == (3, 0)
    with pytest.raises(ValueError, match="whole"):
        quants.quantize(np.zeros((2, n + 1)), kind)
    with pytest.raises(ValueError, match="blocks are uint8"):
        quants.dequantize(np.zeros((2, kind.type_size + 1), np.uint8), kind)
