"""Nodes for C code: op and type numbers that never change, and tables of nodes with addresses."""

import ctypes

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched._graph import NodeTable, op_numbers

# -- numbers -----------------------------------------------------------------------------------

OPS = """
    NONE VIEW RESHAPE PERMUTE TRANSPOSE SCALE DIAG_MASK_ZERO DIAG_MASK_INF ADD ADD1 SUB MUL DIV SQR SQRT LOG ROPE
    RMS_NORM SOFT_MAX FILL ADD_ID ROPE_BACK SILU_BACK RMS_NORM_BACK CLAMP SOFT_MAX_BACK DUP ACC SUM SUM_ROWS CUMSUM
    MEAN ARGMAX COUNT_EQUAL REPEAT REPEAT_BACK CONCAT NORM GROUP_NORM L2_NORM MUL_MAT MUL_MAT_ID OUT_PROD SET CPY
    CONT GET_ROWS GET_ROWS_BACK SET_ROWS DIAG SIN COS CONV_TRANSPOSE_1D IM2COL IM2COL_BACK IM2COL_3D CONV_2D
    CONV_3D CONV_2D_DW CONV_TRANSPOSE_2D POOL_1D POOL_2D POOL_2D_BACK UPSCALE PAD PAD_REFLECT_1D ROLL ARANGE
    TIMESTEP_EMBEDDING ARGSORT TOP_K LEAKY_RELU TRI FLASH_ATTN_EXT FLASH_ATTN_BACK SSM_CONV SSM_SCAN WIN_PART
    WIN_UNPART GET_REL_POS ADD_REL_POS RWKV_WKV6 GATED_LINEAR_ATTN RWKV_WKV7 SOLVE_TRI GATED_DELTA_NET MAP_CUSTOM1
    MAP_CUSTOM2 MAP_CUSTOM3 CUSTOM CROSS_ENTROPY_LOSS CROSS_ENTROPY_LOSS_BACK OPT_STEP_ADAMW OPT_STEP_SGD
"""
UNARY = """ABS SGN NEG STEP TANH ELU RELU SIGMOID GELU GELU_QUICK SILU HARDSWISH HARDSIGMOID EXP GELU_ERF XIELU FLOOR
    CEIL ROUND TRUNC EXPM1 SOFTPLUS"""
GLU = "REGLU GEGLU SWIGLU SWIGLU_OAI GEGLU_ERF GEGLU_QUICK"


def test_the_numbers_of_ops_never_change():
    """Compiled kernels know them.  New ops are added at the end of each list."""
    frozen = {name: k for k, name in enumerate(OPS.split())}
    frozen |= {f"UNARY:{name}": 128 + k for k, name in enumerate(UNARY.split())}
    frozen |= {f"GLU:{name}": 192 + k for k, name in enumerate(GLU.split())}
    assert op_numbers() == frozen


# -- tables ------------------------------------------------------------------------------------


def words(*given):
    return (*given, *[0] * (16 - len(given)))


def test_a_table_has_the_facts_of_its_nodes(ctx):
    a = ctx.tensor("f16", (8, 3), "a", input=True)
    b = ctx.tensor("f32", (8, 3), "b")
    x = ctx.set_output(ctx.restore("SOFT_MAX", "f32", (8, 3, 1, 1), (4, 32, 96, 96), (a, None, b), op_params=(7, -1)))
    table = NodeTable([x])
    assert len(table) == 1 and table.tensors == (x, a, b)
    assert table.fields(0) == {
        "op": 18, "sub_op": 0, "type": 0, "flags": 2, "ne": (8, 3, 1, 1), "nb": (4, 32, 96, 96), "nbytes": 96,
        "params": words(7, -1), "src": (1, None, 2), "data": None}
    with pytest.raises(IndexError, match="node 1 of 1"):
        table.fields(1)                     # a source is not one of the nodes
    table = NodeTable(iter([a, x, x]))
    assert len(table) == 3 and table.fields(0)["flags"] == 1 and table.fields(0)["type"] == 1
    assert table.fields(1) == table.fields(2) and table.fields(1)["src"] == (0, None, 3)


@pytest.mark.parametrize(("make", "op", "sub_op"), [
    (lambda ctx, a: ctx.silu(a), 128, 10), (lambda ctx, a: ctx.abs(a), 128, 0), (lambda ctx, a: ctx.reglu(a), 192, 0),
    (lambda ctx, a: ctx.swiglu_split(a, a), 192, 2), (lambda ctx, a: ctx.add(a, a), 8, 0),
    (lambda ctx, a: ctx.scale(a, 2.0), 5, 0), (lambda ctx, a: ctx.permute(a, 1, 0, 2, 3), 3, 0)])
def test_families_and_their_members(make, op, sub_op):
    ctx = gs.Context()
    node = make(ctx, ctx.tensor("f32", (8, 4)))
    found = NodeTable([node]).fields(0)
    assert (found["op"], found["sub_op"]) == (op, sub_op)
    assert found["params"] == words(*node.op_params)


def test_sources_that_are_nodes_are_found_in_the_table(ctx):
    x = ctx.tensor("f32", 4)
    y = ctx.sqr(x)
    z = ctx.add(y, x)
    table = NodeTable((z, y))
    assert table.tensors == (z, y, x)
    assert table.fields(0)["src"] == (1, 2) and table.fields(1)["src"] == (2,)
    assert NodeTable((z,)).tensors == (z, y, x) and NodeTable(()).tensors == ()


def test_data_is_where_the_bytes_are(ctx):
    x = ctx.tensor("f32", (4, 3), "x")
    view = ctx.view_1d(x, 4, 16)
    y = ctx.sqr(view)
    with gs.CpuBackend(1) as backend:
        buffer = backend.alloc_tensors(ctx)
        backend.set_tensor(x, np.arange(12, dtype=np.float32))
        table = NodeTable([y, view])
        data = table.fields(1)["data"]
        assert data == buffer.base + x.offset + 16 == buffer.base + view.offset
        assert (ctypes.c_float * 4).from_address(data)[:] == [4, 5, 6, 7]
        buffer.close()
        assert table.fields(1)["data"] == data              # as it was when the table was made
        assert NodeTable([y, view]).fields(1)["data"] is None


def test_data_of_nothing(ctx):
    """No address, one that a lease has ended, or one in a buffer whose addresses mean nothing."""
    x = ctx.tensor("f32", 4, "x")
    y = ctx.sqr(x)
    assert NodeTable([x]).fields(0)["data"] is None
    with gs.Scheduler([gs.DryBackend("dry")]) as scheduler:
        scheduler.alloc(gs.Graph(ctx.add(ctx.relu(x), y)))
        assert max(x.offset, y.offset) > 0 == x.buffer.base
        assert [NodeTable([t]).fields(0)["data"] for t in (x, y)] == [None, None]
    with gs.CpuBackend(1) as backend, gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(gs.Graph(y))
        assert NodeTable([y]).fields(0)["data"] == y.buffer.base + y.offset
        scheduler.reset()
        assert NodeTable([y]).fields(0)["data"] is None


@pytest.mark.parametrize("wrong", [None, "x", 3])
def test_a_table_of_what_is_no_tensor(ctx, wrong):
    with pytest.raises(TypeError):
        NodeTable([ctx.tensor("f32", 4), wrong])
