"""Values that a type cannot represent raise an error, and the tensor keeps its data."""

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.graph.hostdata import endless

INTEGERS = {"i8": 7, "i16": 15, "i32": 31, "i64": 63}


@pytest.mark.parametrize("type", INTEGERS)
def test_integers_outside_a_type_are_refused_by_value_and_range(ctx, type):
    bits = INTEGERS[type]
    low, high = -(2**bits), 2**bits - 1
    t = ctx.tensor(type, 2, "t")
    buffer = gs.CpuBackend(1).alloc_tensors(ctx)
    t.set([low, high])
    for wrong in (low - 1, high + 1, 2**63, -2**63 - 1, 2**64 - 1, 2**200):
        if low <= wrong <= high:
            continue
        for values in ([1, wrong], [wrong, 1], [-1, wrong], np.array([1, wrong], object)):
            with pytest.raises(ValueError, match=rf"'t'.* {wrong} .*{low} \.\. {high}"):
                t.set(values)
        assert t.numpy().tolist() == [low, high], "a refusal changes nothing"
    buffer.close()


@pytest.mark.parametrize("type", INTEGERS)
def test_unsigned_integers_and_bools_that_fit_are_taken(ctx, type):
    t = ctx.tensor(type, 2, "t")
    buffer = gs.CpuBackend(1).alloc_tensors(ctx)
    for values in (np.array([0, 100], np.uint8), np.array([0, 100], np.uint64), [True, False], [0, 100],
                   np.array([0, 100], object)):
        t.set(values)
        assert t.numpy().tolist() == [int(v) for v in values]
    buffer.close()


def test_a_view_of_an_input_and_a_strided_tensor_are_checked_too(ctx):
    x = ctx.tensor("i32", (2, 2), "x", input=True)
    column = ctx.set_name(ctx.view_2d(x, 1, 2, 8), "column")
    out = ctx.cont(ctx.transpose(x))
    with gs.Scheduler([gs.CpuBackend(1)]) as scheduler:
        scheduler.alloc(gs.Graph(out, ctx.cont(column)))
        x.set([[1, 2], [3, 4]])
        for t in (x, column):
            with pytest.raises(ValueError, match=rf"'{t.name}'.*1099511627776"):
                t.set(np.full(t.numpy().shape, 2**40))
        assert x.numpy().tolist() == [[1, 2], [3, 4]]


NOT_NUMBERS = {
    "text": np.array(["1", "2"] * 16),
    "objects": np.array([1, None] * 16, object),
    "fractions in objects": np.array([0.5, 1] * 16, object),
    "complex numbers": np.array([1 + 2j, 0] * 16),
    "dates": np.array(["2024-01-01"] * 32, "datetime64[D]"),
    "records": np.zeros(32, [("a", "i4")]),
}


@pytest.mark.parametrize("type", ["f32", "f16", "f64", "bf16", "q4_0", "q8_0", "mxfp4", *INTEGERS])
@pytest.mark.parametrize("what", NOT_NUMBERS)
def test_what_is_no_real_number_is_refused(ctx, what, type):
    t = ctx.tensor(type, 32, "t")
    buffer = gs.CpuBackend(1).alloc_tensors(ctx)
    with pytest.raises(TypeError, match="'t'.*cannot take"):
        t.set(NOT_NUMBERS[what])
    assert not t.numpy().any()
    buffer.close()


@pytest.mark.parametrize("type", INTEGERS)
def test_floats_are_not_cut_to_integers(ctx, type):
    t = ctx.tensor(type, 2, "t")
    buffer = gs.CpuBackend(1).alloc_tensors(ctx)
    for values in ([1.0, 2.0], [np.nan, 0], [np.inf, 0], np.float16([1, 2])):
        with pytest.raises(TypeError, match="'t'.*cannot take"):
            t.set(values)
    buffer.close()


def test_integers_become_the_nearest_floats(ctx):
    tensors = {kind: ctx.tensor(kind, 2, kind) for kind in ("f64", "f32", "f16", "bf16")}
    buffer = gs.CpuBackend(1).alloc_tensors(ctx)
    given = [2**24 + 1, -(2**40)]
    for t in tensors.values():
        t.set(given)
    assert tensors["f64"].numpy().tolist() == given
    assert tensors["f32"].numpy().tolist() == [2**24, -(2**40)]
    assert tensors["bf16"].numpy().tolist() == [2**24, -(2**40)]
    assert tensors["f16"].numpy().tolist() == [np.inf, -np.inf], "as IEEE 754 has it"
    tensors["f32"].set(np.array([2**63, 1], np.uint64))
    assert tensors["f32"].numpy().tolist() == [2**63, 1]
    buffer.close()


def test_blocks_are_bytes_and_as_many_as_there_are(ctx):
    t = ctx.tensor("q8_0", 32, "t")
    buffer = gs.CpuBackend(1).alloc_tensors(ctx)
    t.set(np.zeros(34, np.uint8))
    for wrong in (33, 35, 32, 0):
        with pytest.raises(ValueError, match=f"'t'.*{wrong} bytes of blocks"):
            t.set(np.zeros(wrong, np.uint8))
    for other in (np.int8, np.uint16):
        with pytest.raises(ValueError, match="'t'.*shape"):
            t.set(np.zeros(34, other))
    t.set(np.full(32, 5, np.int8))          # numbers, not bytes
    assert (np.abs(t.numpy() - 5) < 0.1).all()
    buffer.close()


@pytest.mark.parametrize("backend", [gs.CpuBackend(1), gs.DryBackend("dry")], ids=["cpu", "dry"])
def test_a_buffer_is_filled_with_bytes(backend):
    with backend.alloc_buffer(8) as buffer:
        for wrong in (-1, 256, 300, 2**70):
            with pytest.raises(ValueError, match=f"{wrong} is no byte"):
                buffer.clear(wrong)
        for wrong in (1.5, "1", None):
            with pytest.raises(TypeError):
                buffer.clear(wrong)
        buffer.clear(np.uint8(255))


def test_a_type_is_not_a_bool(ctx):
    for wrong in (True, False):
        with pytest.raises(TypeError, match="a type is"):
            ctx.tensor(wrong, 4)
    assert ctx.tensor(1, 4).type == gs.Type.F16


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "iq4_nl"])
def test_an_integer_beyond_all_floats_is_refused(ctx, kind):
    t = ctx.tensor(kind, 32, "t")
    with gs.CpuBackend(1) as backend:
        backend.alloc_tensors(ctx)
        for value in (2**2000, -(2**1024)):
            with pytest.raises(ValueError, match=f"'t'.*{value} is beyond all floats"):
                t.set([value] + [0] * 31)
        with pytest.raises(ValueError, match="beyond all floats"):
            t.set([2**1024 - 1] * 32)


def test_a_large_tensor_is_endless_only_if_its_elements_share_bytes(ctx):
    large = ctx.tensor("f32", 1 << 37, "large")
    assert endless(large) is None
    view = ctx.restore("VIEW", "f32", large.ne, (0, 0, 0, 0), (large,), view_src=large, name="view")
    assert f"'view' has {1 << 37} elements in 4 bytes" in endless(view)
