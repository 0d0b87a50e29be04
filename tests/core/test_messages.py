"""What the errors of tensors and graphs say to those who come from another library, and how tensors are called."""

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched import llama


@pytest.mark.parametrize(("given", "ours"), [("float32", "f32"), ("FLOAT16", "f16"), ("int8", "i8"), ("int64", "i64"),
                                             ("bfloat16", "bf16"), ("half", "f16"), ("torch.float32", "f32"),
                                             ("int", "i32")])
def test_the_type_names_of_other_libraries_are_answered_with_ggmls(given, ours):
    with pytest.raises(gs.GraphError, match=f"unknown tensor type {given!r}; ggml calls it {ours!r}"):
        gs.Context().tensor(given, (4,))


@pytest.mark.parametrize("given", [np.float32, np.dtype("f4"), np.dtype("<f4")])
def test_a_dtype_is_answered_with_ggmls_name(given):
    with pytest.raises(TypeError, match="a type is a gs.Type or its name, .*; ggml calls it 'f32'"):
        gs.Context().tensor(given, (4,))


@pytest.mark.parametrize("given", ["nonsense", "uint8", "float8_e4m3", "floatx"])
def test_a_type_that_ggml_has_not_is_answered_without_a_guess(given):
    with pytest.raises(gs.GraphError, match=f"unknown tensor type {given!r}$"):
        gs.Context().tensor(given, (4,))


def test_a_list_of_outputs_is_answered_with_how_to_give_them():
    ctx = gs.Context()
    y = ctx.silu(ctx.tensor("f32", (4,)))
    for given in ([y], (y, y)):
        with pytest.raises(TypeError, match=r"Graph\(y\) or Graph\(\*outputs\)"):
            gs.Graph(given)
    with pytest.raises(TypeError, match="not 3$"):
        gs.Graph(3)


@pytest.mark.parametrize("alignment", [3, 6, 24, 96])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment):
    with pytest.raises(ValueError, match=f"'GPU': alignment {alignment} is not a power of two"):
        gs.DryBackend("GPU", alignment)


def test_a_tensor_without_a_name_is_called_by_its_id_as_soon_as_it_has_one():
    ctx = gs.Context()
    x = ctx.tensor("f32", (4,), input=True)
    y = ctx.silu(x)
    named = ctx.tensor("f32", (4,), "n")
    assert repr(y) == "<Tensor unnamed UNARY:SILU f32 [4x1x1x1]>"
    assert repr(named) == "<Tensor 'n' NONE f32 [4x1x1x1]>"
    with pytest.raises(gs.GraphError, match=r"unnamed tensor \(UNARY:SILU f32"):
        ctx.mul_mat(y, ctx.tensor("f32", (3,)))
    graph = gs.Graph(ctx.add(y, named))
    assert repr(y) == f"<Tensor {graph.id_of(y)} UNARY:SILU f32 [4x1x1x1]>"
    with pytest.raises(TypeError, match="Tensor"):
        graph.id_of(None)
    assert graph.id_of(x) == 0 and repr(x) == "<Tensor 0 NONE f32 [4x1x1x1]>"
    for t, called in ((y, rf"tensor {graph.id_of(y)} \(UNARY:SILU f32"), (x, r"tensor 0 \(NONE f32")):
        with pytest.raises(gs.GraphError, match=called):
            ctx.mul_mat(t, ctx.tensor("f32", (3,)))


def test_a_name_that_the_package_lacks_is_an_error_with_which_python_suggests_one():
    with pytest.raises(AttributeError, match="no attribute 'Schedulor'") as caught:
        gs.Schedulor  # noqa: B018
    assert caught.value.name == "Schedulor" and caught.value.obj is gs


def test_a_backend_of_a_scheduler_is_not_found_by_its_name():
    backend = gs.DryBackend("GPU")
    with pytest.raises(TypeError, match="given as the Backend, not as 'GPU'"):
        gs.Scheduler([backend], budgets={"GPU": 1 << 20})
    with gs.Scheduler([backend]) as scheduler:
        with pytest.raises(TypeError, match="given as the Backend, not as 'GPU'"):
            scheduler.buffer_size("GPU")
        with pytest.raises(gs.PlacementError, match="is not one of the scheduler's backends"):
            scheduler.buffer_size(gs.DryBackend("GPU"))


def test_dir_of_the_package_lists_the_public_names_alone():
    assert set(dir(gs)) == {*gs.__all__, "llama", "__version__"}
    assert all(hasattr(gs, name) for name in gs.__all__)
    assert set(dir(llama)) == set(llama.__all__)
