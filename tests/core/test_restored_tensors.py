"""Tensors restored from files: each op's demands on its sources and its root are checked before planning.

Each case is a small file with one mistake.  A planner that took it would compute the wrong numbers: order, lifetimes
and in-place reuse are decided by sources and roots.
"""

import copy

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched._graph import op_names
from ggml_sched.graph.graphfile import graph_from_dict
from ggml_sched.testing.contract.cases import CASES


def tensor(name: str, op: str = "NONE", ne=(4,), **fields) -> dict:
    """A dense f32 tensor of a file."""
    ne = [*ne, 1, 1, 1][:4]
    nb = [4]
    for n in ne[:3]:
        nb.append(nb[-1] * n)
    return {"name": name, "op": op, "type": "f32", "ne": ne, "nb": nb, **fields}


def good_file() -> dict:
    """x and w, a node of each kind, and a leaf of which other leafs are views."""
    return {
        "meta": {}, "nodes": [2, 3, 4, 5, 6, 7, 8], "leafs": [0, 1, 9],
        "tensors": [
            tensor("x", ne=(4, 2)),
            tensor("w", ne=(4, 3)),
            tensor("sum", "ADD", ne=(4, 2), src=[0, 0]),
            tensor("view", "VIEW", src=[2], view_src=2, view_offs=16),
            tensor("flat", "RESHAPE", ne=(8,), src=[2], view_src=2),
            tensor("turned", "TRANSPOSE", src=[2], view_src=2) | {"ne": [2, 4, 1, 1], "nb": [16, 4, 32, 32]},
            tensor("moved", "PERMUTE", src=[2], view_src=2) | {"ne": [4, 1, 2, 1], "nb": [4, 32, 16, 32]},
            tensor("product", "MUL_MAT", ne=(3, 2), src=[1, 2]),
            tensor("copy", "CPY", src=[3, 9], view_src=1, view_offs=16),
            tensor("row", view_src=1, view_offs=16),
        ],
    }


def test_the_good_file_computes():
    graph = graph_from_dict(good_file())
    x, w, sum, view, flat, turned, moved, product, copied, row = graph.tensors
    with gs.CpuBackend(1) as backend, gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph).verify()
        x.set(np.arange(8.0))
        w.set(np.arange(12.0))
        scheduler.compute(graph)
        assert np.array_equal(row.numpy(), [8, 10, 12, 14])


def dense(d: dict, i: int, *ne: int) -> None:
    d["tensors"][i].update({k: tensor("", ne=ne)[k] for k in ("ne", "nb")})


WRONG = {
    "a leaf with an op": (lambda t, d: d.update(nodes=[2, 3, 4, 5, 6, 8], leafs=[0, 1, 7, 9]), "'product'.*leaf"),
    "a node without an op": (lambda t, d: d.update(nodes=[9, 2, 3, 4, 5, 6, 7, 8], leafs=[0, 1]), "'row'.*node"),
    "a computed tensor that is no node": (lambda t, d: d.update(nodes=[2, 3, 4, 5, 6, 8]), "'product'.*not among"),
    "a leaf with a source": (lambda t, d: t[9].update(src=[0]), "'row'.*source"),
    "a leaf with an empty source": (lambda t, d: t[1].update(src=[-1]), "'w'.*source"),
    "an op NONE node with a source": (lambda t, d: t[2].update(op="NONE"), "'sum'.*source"),
    "a leaf that views a node": (lambda t, d: t[9].update(view_src=2), "'row'.*'sum'"),
    "a view without a root": (lambda t, d: [t[3].pop(k) for k in ("view_src", "view_offs")], "'view'.*view_src"),
    "a reshape without a root": (lambda t, d: t[4].pop("view_src"), "'flat'.*view_src"),
    "a permutation without a root": (lambda t, d: t[6].pop("view_src"), "'moved'.*view_src"),
    "a transpose without a root": (lambda t, d: t[5].pop("view_src"), "'turned'.*view_src"),
    "a view of nothing": (lambda t, d: t[3].update(src=[]), "'view'.*source 0"),
    "a view of an empty slot": (lambda t, d: t[3].update(src=[-1]), "'view'.*source 0"),
    "a view of another root": (lambda t, d: t[3].update(src=[0]), "'view'.*'x'.*'sum'"),
    "a view of a view's other root": (lambda t, d: t[3].update(src=[9]), "'view'.*'row'.*'sum'"),
    "a root that is a view": (lambda t, d: t[3].update(src=[4], view_src=4), "'view'.*'flat'.*itself a view"),
    "a view of another type": (lambda t, d: t[3].update(type="i32"), "'view'.*i32"),
    "a reshape to more": (lambda t, d: dense(d, 4, 7), "'flat'.*'sum'"),
    "a reshape with gaps": (lambda t, d: t[4].update(ne=[4, 1, 1, 1], nb=[8, 16, 16, 16]), "'flat'"),
    "a reshape elsewhere": (lambda t, d: (dense(d, 2, 4, 3), dense(d, 0, 4, 3), dense(d, 4, 8), t[4].update(
        view_offs=16)), "'flat'"),
    "a reshape of a transpose": (lambda t, d: t[4].update(src=[5]), "'flat'.*'turned'"),
    "a transpose that is none": (lambda t, d: t[5].update(nb=[4, 8, 32, 32]), "'turned'.*'sum'"),
    "a transpose elsewhere": (lambda t, d: (t[5].update(ne=[2, 4, 1, 1], src=[3], view_offs=0)), "'turned'.*'view'"),
    "a permutation that is none": (lambda t, d: t[6].update(ne=[2, 1, 4, 1]), "'moved'.*'sum'"),
    "an offset into nothing": (lambda t, d: t[7].update(view_offs=4), "'product'.*view_offs"),
    "a product of nothing": (lambda t, d: t[7].update(src=[]), "'product'.*source 0"),
    "a product of one": (lambda t, d: t[7].update(src=[1]), "'product'.*source 1"),
    "a product with a hole": (lambda t, d: t[7].update(src=[-1, 2]), "'product'.*source 0"),
    "a sum of one": (lambda t, d: t[2].update(src=[0]), "'sum'.*source 1"),
    "an unknown residence": (lambda t, d: t[1].update(resident="cloud"), "'w'.*'cloud'"),
    "a node that is resident": (lambda t, d: t[2].update(resident="weight"), "'sum'.*'weight'"),
    "writes to what it does not name": (lambda t, d: t[8].update(src=[3]), "'copy'.*'w'"),
    "writes to elements twice": (lambda t, d: t[7].update(nb=[4, 4, 24, 24]), "'product'.*share"),
    "writes some rows of nothing": (lambda t, d: (t[8].update(op="SET_ROWS", src=[3, 9, 1]), [
        t[8].pop(k) for k in ("view_src", "view_offs")]), "'copy'.*view_src"),
    "writes with gaps": (lambda t, d: t[7].update(nb=[8, 24, 48, 48]), "'product'.*gaps"),
    "writes to one element": (lambda t, d: t[8].update(nb=[0, 16, 16, 16]), "'copy'.*share"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_means_nothing_is_refused_by_name(case):
    change, message = WRONG[case]
    data = good_file()
    change(data["tensors"], data)
    with pytest.raises(gs.GraphError, match=message):
        graph_from_dict(data)


@pytest.mark.parametrize("op", [op for op in op_names() if op not in ("NONE", "ARANGE", "CUSTOM")])
def test_every_op_that_reads_needs_what_it_reads(ctx, op):
    for src in ((), (None,), (None, ctx.tensor("f32", 4))):
        with pytest.raises(gs.GraphError, match=f"'t'.*{op}.*source 0"):
            ctx.restore(op, "f32", (4,), (4, 16, 16, 16), src, name="t")


WITH_FEWER = {"SSM_SCAN": 6, **{op: 1 for op in op_names() if op.startswith("GLU:")}}
"""{op: with how many sources ggml has nodes that CpuBackend does not compute}: scans of earlier ggml have no ids,
and a GLU of one source has another shape than one of two."""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_node_without_a_source_that_its_kernel_needs_is_refused(case):
    leafs, node = case.made()
    for n in range(len(node.src)):
        try:
            fewer = leafs.ctx.restore(node.op, node.type, node.ne, node.nb, node.src[:n], view_src=node.view_src,
                                      view_offs=node.view_offs, op_params=node.op_params)
        except gs.GraphError as error:
            assert node.op in str(error)
        else:
            assert WITH_FEWER.get(node.op) == n or gs.CpuBackend(1).supports_op(fewer), f"{node.op} of {n} sources"


def test_blocks_lie_side_by_side(ctx):
    """The bytes of a row are counted so: blocks closer than they are wide would end outside the tensor."""
    for apart in (0, 4, 33, 35, 68):
        with pytest.raises(gs.GraphError, match=f"'t'.*q8_0 blocks of 34 bytes.*{apart}"):
            ctx.restore("NONE", "q8_0", (64, 2), (apart, 68, 136, 136), name="t")
    assert ctx.restore("NONE", "q8_0", (64, 2), (34, 68, 136, 136)).nbytes == 136


def test_from_order_checks_what_is_a_node(ctx):
    x = ctx.tensor("f32", 4, "x")
    y = ctx.set_name(ctx.sqr(x), "y")
    z = ctx.set_name(ctx.sqr(y), "z")
    with pytest.raises(gs.GraphError, match="'y'.*SQR.*leaf"):
        gs.Graph.from_order([x, y, z], [z], [x, y])
    with pytest.raises(gs.GraphError, match="'x'.*NONE.*node"):
        gs.Graph.from_order([x, y, z], [x, y, z], [])
    assert gs.Graph.from_order([x, y, z], [y, z], [x]).nodes == (y, z)


def test_nothing_is_written_to_elements_that_share_bytes(ctx):
    x, y = ctx.tensor("f32", (4, 3), "x"), ctx.tensor("f32", 12, "y")
    wide = ctx.set_name(ctx.view_2d(y, 4, 3, 8), "wide")
    for write in (lambda: ctx.cpy(x, wide), lambda: ctx.scale(wide, 2.0, inplace=True),
                  lambda: ctx.set_rows(wide, x, ctx.tensor("i32", 3))):
        with pytest.raises(gs.GraphError, match="'wide.*share"):
            write()
    # Apart, in whatever order; or with a single element along the dimension that does not move.
    for nb in (16, 12):
        ctx.cpy(ctx.view_2d(x, 3, 3, 16), ctx.view_2d(y, 3, 3, nb))
    ctx.cpy(x, ctx.transpose(ctx.cont(ctx.transpose(x))))
    ctx.cpy(ctx.view_1d(x, 4), ctx.view_2d(y, 4, 1, 0))
    assert ctx.sqr(wide).ne == (4, 3, 1, 1)         # reading them is fine


# -- leafs that are views of leafs --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_a_root_lives_until_its_last_view_has_been_read_leaf_or_node(policy):
    """ggml counts the views that are nodes; the last reader of one that is a leaf then frees the root."""
    data = {"meta": {}, "nodes": [2, 3, 5, 6], "leafs": [0, 1, 4], "tensors": [
        tensor("w", ne=(64,)),
        tensor("leaf view", ne=(32,), view_src=0),
        tensor("node view", "VIEW", ne=(32,), src=[0], view_src=0, view_offs=128),
        tensor("early", "SQRT", ne=(32,), src=[1]),
        tensor("x", ne=(64,)),
        tensor("between", "SQRT", ne=(64,), src=[4]),
        tensor("late", "CONCAT", ne=(96,), src=[2, 5]),
    ]}
    graph = graph_from_dict(data)
    w, part, _, early, x, _, late = graph.tensors
    with gs.CpuBackend(1) as backend, gs.Scheduler([backend], policy=policy) as scheduler:
        scheduler.alloc(graph).verify()
        values = np.arange(64, dtype=np.float32)
        w.set(values)
        x.set(values * values)
        part.set(values[:32] + 1)
        assert np.array_equal(w.numpy(), np.r_[values[:32] + 1, values[32:]])
        for _ in range(2):
            scheduler.compute(graph)
            assert np.array_equal(late.numpy(), np.r_[values[32:], values])


@pytest.mark.parametrize("op", ["NONE", "VIEW"])
def test_the_root_of_an_output_that_is_no_node_is_not_computed_over(op):
    """A leaf that is a view, or a view that the file's order leaves out: it can be read all the same."""
    data = {"meta": {}, "nodes": [2], "leafs": [0, 1] if op == "NONE" else [0], "tensors": [
        tensor("root", ne=(8,)),
        tensor("view", op, ne=(4,), view_src=0, flags=["output"], src=[] if op == "NONE" else [0]),
        tensor("node", "SQR", ne=(8,), src=[0])]}
    graph = graph_from_dict(data)
    root, view, node = graph.tensors
    with gs.CpuBackend(1) as backend, gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph).verify()
        root.set(np.arange(8.0))
        scheduler.compute(graph)
        assert view.numpy().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_a_root_that_only_a_leaf_looks_at_is_placed(policy):
    data = {"meta": {}, "nodes": [2], "leafs": [0, 1], "tensors": [
        tensor("root", ne=(8,)), tensor("view", ne=(4,), view_src=0, view_offs=16), tensor("node", "SQR", src=[1])]}
    graph = graph_from_dict(data)
    root, view, node = graph.tensors
    a, b = gs.CpuBackend(1, name="a"), gs.CpuBackend(1, name="b")
    for assigned in ((), (node,), (view,), (root,)):
        with gs.Scheduler([a, b], policy=policy) as scheduler:
            for t in assigned:
                scheduler.set_tensor_backend(t, b)
            plan = scheduler.alloc(graph)
            plan.verify()
            assert plan.backend_of(view) is plan.backend_of(root) is not None
            root.set(np.arange(8.0))
            scheduler.compute(graph)
            assert node.numpy().tolist() == [16, 25, 36, 49]


def test_a_wrong_file_changes_no_tensor_of_its_context(ctx):
    """A refused file adds no tensor to the context."""
    x = ctx.tensor("f32", 4, "x")
    with pytest.raises(gs.GraphError):
        ctx.restore("VIEW", "f32", (4,), (4, 16, 16, 16), (x,))
    assert ctx.tensors == (x,)
    wrong = copy.deepcopy(good_file())
    wrong["tensors"][7]["src"] = []
    with pytest.raises(gs.GraphError):
        graph_from_dict(wrong, ctx=ctx)
