"""Norms that the products before and after them compute: the results of launches of their own, and where they stay."""

from contextlib import nullcontext

import cupy_devices as devices
import cupy_kernels
import numpy as np
import op_results
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy.device import DeviceError
from ggml_sched.backends.cupy.launch import AT_ROWS, ROW_ELEMENTS, STATE, Launch, RowState
from ggml_sched.backends.cupy.ops import carried
from ggml_sched.backends.cupy.regions import Scratch
from ggml_sched.llama import load, random_llama

RNG = np.random.default_rng(29)
EPS = 1e-5


class Layer:
    """x + w y, normed and multiplied by factors, and products with that.

    `kinds`: of w, and of the weights after the norm; `reverse`: the sum is w y + x.
    """

    def __init__(self, n: int = 128, k: int = 64, kinds: tuple[str, ...] = ("q4_0", "q4_0"), *, tokens: int = 1,
                 reverse: bool = False, rows: int = 32) -> None:
        self.ctx = ctx = gs.Context()
        self.x, self.y = ctx.tensor("f32", (n, tokens)), ctx.tensor("f32", (k, tokens))
        self.factor = ctx.tensor("f32", (n,))
        self.w = ctx.tensor(kinds[0], (k, n))
        self.product = ctx.mul_mat(self.w, self.y)
        self.sum = ctx.add(self.product, self.x) if reverse else ctx.add(self.x, self.product)
        self.normed = ctx.mul(ctx.rms_norm(self.sum, EPS), self.factor)
        self.outs = [ctx.mul_mat(ctx.tensor(kind, (n, rows + 8 * i)), self.normed) for i, kind in enumerate(kinds[1:])]

    @property
    def values(self) -> dict:
        return cupy_kernels.leaves(self.ctx, RNG)


def results(layer: Layer, outs: list[gs.Tensor], values: dict, carry: bool, order: int, **options
            ) -> tuple[list[np.ndarray], list[Launch]]:
    """The results of `outs` and the launches that gave them."""
    graph = gs.Graph(*outs)
    with cupy_kernels.placed(layer.ctx, order, 64, 0x3F):
        op_results.set_values(values)
        builder = cupy_kernels.build_grouped(graph.nodes, needed=set(outs), **options)
        if carry:
            builder.launches[:] = carried.carry(builder.launches)
        assert cupy_kernels.run(builder, order)["position"] == 0
        return [t.numpy().copy() for t in outs], builder.launches


def check(layer: Layer, outs: list[gs.Tensor] | None = None, n_less: int = 1, values: dict | None = None,
          **options) -> list[Launch]:
    """With `n_less` launches the same results, but for last bits of what is rounded to 8 bits; in each order of threads
    and blocks the same bits.  Returns the launches."""
    outs, values, seen = outs or layer.outs, layer.values if values is None else values, None
    for order in cupy_kernels.ORDERS:
        want, alone = results(layer, outs, values, False, order, **options)
        found, launches = results(layer, outs, values, True, order, **options)
        assert len(launches) == len(alone) - n_less
        for t, a, b in zip(outs, found, want, strict=True):
            assert np.array_equal(np.isnan(a), np.isnan(b))
            fine = ~np.isnan(b)
            # One level of 127 more or less, of some elements.
            assert cupy_kernels.error(a[fine], b[fine]) < (1e-9 if t.op in ("ADD", "MUL") else 1e-5), t
        bits = [a.tobytes() for a in found]
        assert seen in (None, bits), order
        seen = bits
    return launches


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", [128, 640, 4224])
def test_a_norm_between_products(n, reverse):
    """Rows whose squares are loaded before the weights, and longer ones.  What nothing reads is not written."""
    launches = check(Layer(n, reverse=reverse))
    assert [launch.kernel.partition(".")[0] for launch in launches] == ["activations", "matvec_plain", "matvec_plain"]


@pytest.mark.parametrize("n", [128, 1024])
def test_all_that_the_norms_launch_writes_is_written(n):
    layer = Layer(n)
    check(layer, [layer.product, layer.sum, layer.normed, *layer.outs])
    check(layer, [layer.normed, *layer.outs])
    check(layer, [layer.sum, *layer.outs])


@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "q5_1", "q3_k", "q6_k", "iq4_nl", "f16", "f32"])
def test_types_of_weights(kind):
    k = 256 if kind.endswith("k") else 96
    check(Layer(256, k, (kind, "q4_k" if kind.endswith("k") else kind if kind[0] != "f" else "q8_0")))


@pytest.mark.parametrize("kinds", [("q4_0", "q4_0", "q4_0", "q4_0"), ("q4_0", "q8_0", "q4_0", "q5_0"),
                                   ("q4_0", "q4_0", "q8_0")])
def test_several_products_behind_a_norm(kinds):
    """In one launch, and in one for each type: all of them divide."""
    layer = Layer(256, kinds=kinds)
    check(layer, [*layer.outs, layer.normed])


def test_a_gated_unit_behind_a_norm_rounds_for_the_next_product():
    layer = Layer(256)
    ctx = layer.ctx
    gate, up = (ctx.mul_mat(ctx.tensor("q4_0", (256, 64)), layer.normed) for _ in range(2))
    unit = ctx.swiglu_split(gate, up)
    layer.outs = [ctx.mul_mat(ctx.tensor("q4_0", (64, 32)), unit)]
    check(layer)


@pytest.mark.parametrize(("n", "k"), [(256, 2304), (2304, 64)])
def test_warps_that_share_rows(n, k):
    """Of the product before the norm, or of that after it: few rows and long columns."""
    launches = check(Layer(n, k, rows=16))
    assert [bool(launch.args[0]["part"]) for launch in launches[1:]] == [k > n, n > k]


def test_norms_one_after_the_other():
    """Each row is kept until it has been read, while the next is written."""
    layer = Layer(128, 128)
    ctx, x, y = layer.ctx, layer.x, layer.y
    for _ in range(5):
        x = ctx.add(ctx.mul_mat(ctx.tensor("q4_0", (128, 128)), y), x)
        y = ctx.mul(ctx.rms_norm(x, EPS), ctx.tensor("f32", (128,)))
        # A product that reads the row is the next that has a norm after it: it has only one of the two.
    layer.outs = [ctx.mul_mat(ctx.tensor("q8_0", (128, 40)), y)]
    launches = check(layer, n_less=3)
    slots = [arg.slot for launch in launches for arg in launch.args if isinstance(arg, RowState)]
    assert set(slots) == {0, 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_finite_behind_the_norm(bad):
    layer = Layer(256)
    values = layer.values
    values[layer.x][..., 77] = bad
    found, _ = results(layer, layer.outs, values, True, 0)
    want, _ = results(layer, layer.outs, values, False, 0)
    assert np.isnan(want[0]).all() and np.isnan(found[0]).all()


def test_rows_of_zeros_and_tiny_and_large_rows():
    for size in (0.0, 1e-12, 1e12):
        layer = Layer(256)
        values = layer.values
        values[layer.x] *= np.float32(size)
        values[layer.y] *= np.float32(size)
        check(layer, values=values)


# -- where a norm keeps its launch ------------------------------------------------------------------------------------


def stays(layer: Layer, outs: list[gs.Tensor] | None = None, **options) -> None:
    check(layer, outs, 0, **options)


def test_norms_that_keep_their_launch():
    stays(Layer(tokens=2))                                      # two columns
    stays(Layer(96))                                            # whose squares are no four at once
    stays(Layer(), exact=True)                                  # whose columns stay f32
    stays(Layer(kinds=("q4_0", "f16")))                         # likewise
    stays(Layer(rows=12))                                       # blocks behind it without rows


@pytest.mark.parametrize("how", ["centred", "shifted", "doubled", "read before", "read by few and many"])
def test_norms_of_other_kinds_keep_their_launch(how):
    layer = Layer(128)
    ctx = layer.ctx
    if how == "centred":
        normed = ctx.mul(ctx.norm(layer.sum, EPS), layer.factor)
    elif how == "shifted":
        normed = ctx.add(layer.normed, ctx.tensor("f32", (128,)))
    elif how == "doubled":
        normed = ctx.mul(ctx.rms_norm(ctx.add(layer.product, layer.product), EPS), layer.factor)
    else:
        normed = layer.normed
    weights = ctx.tensor("q4_0", (128, 32))
    layer.outs = [ctx.mul_mat(weights, normed)]
    if how == "read before":                # by a product in f32, which comes first
        layer.outs.insert(0, ctx.mul_mat(ctx.tensor("f32", (128, 8)), normed))
    if how == "read by few and many":
        table, ids = ctx.tensor("q4_0", (128, 32, 4)), ctx.tensor("i32", (2, 1))
        layer.outs.append(ctx.mul_mat_id(table, ctx.reshape_3d(normed, 128, 1, 1), ids))
        check(layer)                        # experts of one token have one column
        return
    stays(layer)


def launches_of(layer: Layer) -> list[Launch]:
    with cupy_kernels.placed(layer.ctx, 0, 0, 0):
        layer.values                        # noqa: B018  # nothing runs
        return list(cupy_kernels.build_grouped(gs.Graph(*layer.outs, layer.sum).nodes, needed={
            *layer.outs, layer.sum}).launches)


def moved(launch: Launch, at: int, address: int) -> Launch:
    args = list(launch.args)
    args[at] = np.uint64(address) if isinstance(args[at], np.generic) else args[at]._replace(address=address)
    return launch._replace(args=tuple(args))


def test_results_in_memory_that_other_blocks_read_keep_the_launch():
    """As no plan has them: the sum over the f32 columns of the product, or a product over the norm's row."""
    layer = Layer(kinds=("f16", "q4_0"))
    found = launches_of(layer)
    product, norm, after = found
    assert len(carried.carry(found)) == 2
    kept = norm.args[carried.NORM_AT["kept"]].address
    d = carried.PRODUCT_AT["d"]
    assert len(carried.carry([moved(product, carried.PRODUCT_AT["x"], kept + 256), norm, after])) == 3
    for name in ("d", "factor", "kept"):
        assert len(carried.carry([product, norm, moved(after, d, norm.args[carried.NORM_AT[name]].address)])) == 3
    other = norm.args[carried.NORM_AT["a"]].address
    assert len(carried.carry([product, moved(norm, carried.NORM_AT["kept"], other), after])) == 2       # in place
    assert len(carried.carry([product, moved(norm, carried.NORM_AT["kept"], other + 16), after])) == 3


def test_whatever_is_between_keeps_the_launch():
    found = launches_of(Layer(kinds=("f16", "q4_0")))
    product, norm, after = found
    for steps in ([product, "staged", norm, after], [product, norm, "staged", after], [product, norm],
                  [norm, product, after], [product, norm, after, found[2]._replace(kernel="mma_plain.q4_0_16")]):
        assert carried.carry(steps) == steps


def test_a_row_that_is_still_read_is_not_written():
    """Products far after their norm: the third norm would write what the first's last product reads."""
    product, norm, after = launches_of(Layer(kinds=("f16", "q4_0")))
    at = {name: carried.NORM_AT[name] for name in ("q", "runs")}

    def norm_at(offset: int) -> tuple[Launch, Launch]:
        args, reads = list(norm.args), list(after.args)
        args[at["q"]], args[at["runs"]] = reads[3], reads[4] = Scratch(offset), Scratch(offset + 512)
        return norm._replace(args=tuple(args)), after._replace(args=tuple(reads))

    (n0, a0), (n1, a1), (n2, a2) = map(norm_at, (0, 1024, 2048))
    assert len(carried.carry([product, n0, a0, product, n1, a1, product, n2, a2])) == 6
    assert len(carried.carry([product, n0, a0, product, n1, a1, product, n2, a2, a0])) == 8


def test_rows_lie_behind_the_counters():
    assert STATE.itemsize == RowState(1, "squares").offset + 4 * ROW_ELEMENTS // 32
    assert RowState(0, "q").offset == AT_ROWS and not any(
        RowState(slot, part).offset % 256 for slot in (0, 1) for part in ("q", "runs", "squares"))
    state = np.zeros(1, STATE)
    state["rounded"]["runs"][0, 1, 3] = 1, 2
    flat = state.view(np.uint8)
    assert flat[RowState(1, "runs").offset + 24 :][:8].view(np.float32).tolist() == [1, 2]


# -- plans ------------------------------------------------------------------------------------------------------------


def logits(data: bytes, monkeypatch, carry: bool, seed: int = 0, **options) -> tuple[np.ndarray, int]:
    with monkeypatch.context() as patch:
        if not carry:
            patch.setattr("ggml_sched.backends.cupy.plan.carry", list)
        on = devices.device(seed, order=seed)
        with devices.backend(on, **options) as cuda, load(data, [cuda], n_ctx=64) as model:
            found = [model.eval([3, 5]), *(model.eval([t]) for t in (1, 2, 3, 4))]
            return np.concatenate(found), on.counts.launches


@pytest.mark.parametrize(("options", "seed"), [({}, 0), ({"capture": False}, 1), ({"overlap": True}, 4711)])
def test_models_give_the_same_tokens(options, seed, monkeypatch):
    """Eager, captured, replayed and with launches that overlap; two layers have three such norms."""
    data = random_llama(1, n_vocab=64, n_embd=128, n_layer=2, n_head=2, n_head_kv=2, n_ff=64, dtype="q8_0")
    want, alone = logits(data, monkeypatch, False)
    found, fewer = logits(data, monkeypatch, True, seed, **options)
    assert cupy_kernels.error(found, want) < 1e-5
    assert options or fewer < alone


# -- planted bugs -----------------------------------------------------------------------------------------------------

BUGS = {
    "": ("", ""),
    "the first block rounds": ("== others;\n    __syncthreads();\n    if (!is_last || threadIdx",
                               "== 0;\n    __syncthreads();\n    if (!is_last || threadIdx"),
    "a row of squares too few": ("i < norm.n / 128; i += 32", "i < norm.n / 128 - 1; i += 32"),
    "a sum that is not divided": ("v1 /= root;", ""),
    "the norm's result is not divided": ("v / root * norm.factor[i]", "v * norm.factor[i]"),
    "the sum is not kept": ("norm.kept[i] = v", "norm.kept[i] = x"),
}


@pytest.mark.parametrize("bug", [bug if i < 3 else pytest.param(bug, marks=pytest.mark.soak)
                                 for i, bug in enumerate(BUGS)])
def test_planted_bugs_are_found(bug, tmp_path, monkeypatch):
    cupy_kernels.edit_sources(monkeypatch, tmp_path, *([("matvec.cuh", *BUGS[bug])] if bug else []))
    with pytest.raises((AssertionError, DeviceError)) if bug else nullcontext():
        layer = Layer(4224)
        check(layer, [layer.sum, layer.normed, *layer.outs])
