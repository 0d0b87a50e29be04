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


_NUMBERS = {
    "scale: 'x' .*: s ": lambda ctx, x, i, given: ctx.scale(x, given),
    "scale: 'x' .*: bias ": lambda ctx, x, i, given: ctx.scale(x, 1.0, given),
    "clamp: 'x' .*: min ": lambda ctx, x, i, given: ctx.clamp(x, given, 1.0),
    "clamp: 'x' .*: max ": lambda ctx, x, i, given: ctx.clamp(x, 0.0, given),
    "swiglu_oai: 'x' .*: limit ": lambda ctx, x, i, given: ctx.swiglu_oai(x, x, limit=given),
    "arange: start ": lambda ctx, x, i, given: ctx.arange(given, 4),
    "arange: stop ": lambda ctx, x, i, given: ctx.arange(0, given),
    "arange: step ": lambda ctx, x, i, given: ctx.arange(0, 4, given),
    "norm: 'x' .*: eps ": lambda ctx, x, i, given: ctx.norm(x, given),
    "rms_norm: 'x' .*: eps ": lambda ctx, x, i, given: ctx.rms_norm(x, given),
    "group_norm: 'x' .*: eps ": lambda ctx, x, i, given: ctx.group_norm(x, 1, given),
    "l2_norm: 'x' .*: eps ": lambda ctx, x, i, given: ctx.l2_norm(x, given),
    "soft_max: 'x' .*: scale ": lambda ctx, x, i, given: ctx.soft_max(x, None, given),
    "soft_max: 'x' .*: max_bias ": lambda ctx, x, i, given: ctx.soft_max(x, None, 1.0, given),
    "rope: 'x' .*: freq_base ": lambda ctx, x, i, given: ctx.rope(x, i, 4, freq_base=given),
    "rope: 'x' .*: beta_slow ": lambda ctx, x, i, given: ctx.rope(x, i, 4, beta_slow=given),
    "flash_attn_ext: 'x' .*: logit_softcap ": lambda ctx, x, i, given: ctx.flash_attn_ext(x, x, x, None, 1, 0, given),
}
_INTS = {
    "top_k: 'x' .*: k ": lambda ctx, x, i, given: ctx.top_k(x, given),
    "group_norm: 'x' .*: n_groups ": lambda ctx, x, i, given: ctx.group_norm(x, given, 1e-5),
    "diag_mask_inf: 'x' .*: n_past ": lambda ctx, x, i, given: ctx.diag_mask_inf(x, given),
    "rope: 'x' .*: n_dims ": lambda ctx, x, i, given: ctx.rope(x, i, given),
    "rope: 'x' .*: n_ctx_orig ": lambda ctx, x, i, given: ctx.rope(x, i, 4, n_ctx_orig=given),
    "view: 'x' .*: ne1 ": lambda ctx, x, i, given: ctx.view_2d(x, 1, given, 32),
    "permute: 'x' .*: axis0 ": lambda ctx, x, i, given: ctx.permute(x, given, 1, 2, 3),
    "set: 'x' .*: offset ": lambda ctx, x, i, given: ctx.set(x, x, 0, 0, 0, given),
    "concat: 'x' .*: dim ": lambda ctx, x, i, given: ctx.concat(x, x, given),
    "pad: 'x' .*: p0 ": lambda ctx, x, i, given: ctx.pad(x, given),
    "reshape: 'x' .*: extent .*": lambda ctx, x, i, given: ctx.reshape(x, given, 4),
    "reshape: 'x' .*: extent": lambda ctx, x, i, given: ctx.reshape(x, given),
    "cont: 'x' .*: extent": lambda ctx, x, i, given: ctx.cont(x, given if given is not None else 0.5),
    "extent": lambda ctx, x, i, given: ctx.tensor("f32", given),
}
_WRONG = ["1", None, [[]], np.zeros((2, 2))]
"""What is neither a number nor, where an op takes extents, a list of them."""


def _refuse(make, error, match, given):
    ctx = gs.Context()
    x, i = ctx.tensor("f32", (8, 4, 4), "x"), ctx.tensor("i32", (4,), "i")
    with pytest.raises(error, match=match) as caught:
        make(ctx, x, i, given)
    assert len(ctx.tensors) == 2 and len(str(caught.value)) < 200


@pytest.mark.parametrize("names", _NUMBERS)
def test_a_wrong_number_is_answered_with_the_op_the_parameter_and_the_value(names):
    for given in _WRONG:
        _refuse(_NUMBERS[names], TypeError, f"^{names}is a number, not ", given)
    for given in (10**400, -(10**5000)):
        _refuse(_NUMBERS[names], gs.GraphError, rf"^{names}= an int of \d+ bits is beyond float32", given)
    _refuse(_NUMBERS[names], gs.GraphError, f"^{names}= nan is no number", float("nan"))
    _refuse(_NUMBERS[names], gs.GraphError, rf"^{names.partition(':')[0]}: .*1e\+300", 1e300)


@pytest.mark.parametrize("names", _INTS)
def test_a_wrong_int_is_answered_with_the_op_the_parameter_and_the_value(names):
    for given in (*_WRONG, 1.5):
        _refuse(_INTS[names], TypeError, f"^{names}", given)
    for given in (10**400, -(10**5000)):
        _refuse(_INTS[names], gs.GraphError, rf"^{names}.*an int of \d+ bits", given)


def test_a_mode_or_an_order_without_a_hash_is_answered_as_others_are():
    for given in ([], np.zeros(2), 10**5000):
        _refuse(lambda ctx, x, i, given: ctx.rope(x, i, 4, given), gs.GraphError, '"normal" or "neox", not', given)
        _refuse(lambda ctx, x, i, given: ctx.argsort(x, given), ValueError, '"asc" or "desc", not', given)


@pytest.mark.parametrize(("given", "says"), [
    ((0, 1, 0), "0.0 to 1.0 by 0.0 is not a finite progression"),
    ((0, 1, np.inf), "by inf is not a finite progression"),
    ((0, 1, 1e-300), r"0.0 to 1.0 by 1e-300 has 1e\+300 elements"), ((0, 1e30, 1), r"has 1e\+30 elements"),
    ((0, 1e-300, 1e-301), "step = 1e-301 is 0 in float32")])
def test_an_arange_that_never_ends_is_answered_in_few_characters(given, says):
    _refuse(lambda ctx, x, i, given: ctx.arange(*given), gs.GraphError, says, given)
