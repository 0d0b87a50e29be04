"""Every op method gives the type and extents of ggml, and raises for sources that do not fit together.

Shapes are written innermost first.  A tensor is spelled "f32:4,3" (leaf of that type and extents).
"""

import random

import numpy as np
import pytest

import ggml_sched as gs

BIG = 2**62


class Maker:
    """Leafs by their spelling."""

    def __init__(self) -> None:
        self.ctx = gs.Context("shapes")
        self.count = 0

    def __call__(self, spelling: str) -> gs.Tensor:
        kind, ne = spelling.split(":")
        self.count += 1
        return self.ctx.tensor(kind, [int(n) for n in ne.split(",")], f"t{self.count}")

    def args(self, args):
        return [self(a) if isinstance(a, str) and ":" in a else a for a in args]

    def kwargs(self, kwargs):
        return {k: self(v) if isinstance(v, str) and ":" in v else v for k, v in kwargs.items()}


def case(op, *args, to, **kwargs):
    return pytest.param(op, args, kwargs, to, id=f"{op}-{len(args)}-{to}")


def refused(op, *args, says=None, **kwargs):
    shown = ",".join(str(a) for a in args)
    return pytest.param(op, args, kwargs, says, id=f"{op}({shown})")


SAME = ["sqr", "sqrt", "log", "dup", "silu", "gelu", "gelu_quick", "relu", "tanh", "sigmoid", "neg", "abs", "exp",
        "step", "elu", "hardswish"]
SCAN = ("f32:16,2,6,4", "f32:2,6,5,3", "f32:6,5,3", "f32:16,6", "f32:16,2,5,3", "f32:16,2,5,3", "i32:3")
GOOD = [
    *(case(op, "f32:4,3,2", to="f32:4,3,2") for op in SAME),
    *(case(op, "f16:5", to="f16:5") for op in SAME),
    *(case(op, "f32:4,3,2,5", b, to="f32:4,3,2,5") for op in ("add", "sub", "mul", "div")
      for b in ("f32:4,3,2,5", "f32:4", "f32:1", "f32:1,3", "f32:2,3,1,5", "f16:4")),
    case("add", "f16:4", "f32:4", to="f16:4"),
    case("add", "f32:0,3", "f32:0,3", to="f32:0,3"),
    case("add1", "f32:4,3", "f32:1", to="f32:4,3"),
    case("add_id", "f32:4,3,2", "f32:4,7", "i32:3,2", to="f32:4,3,2"),
    case("scale", "f32:4,3", 2.0, to="f32:4,3"),
    case("scale", "f32:4,3", 2.0, 1.0, to="f32:4,3"),
    case("clamp", "f32:4,3", -1.0, 1.0, to="f32:4,3"),
    case("unary", "f32:4", "softplus", to="f32:4"),
    case("sum", "f32:4,3,2,5", to="f32:1"),
    case("sum_rows", "f32:4,3,2,5", to="f32:1,3,2,5"),
    case("mean", "f32:4,3,2,5", to="f32:1,3,2,5"),
    case("mean", "f16:4,3", to="f32:1,3"),
    case("argmax", "f32:4,3", to="i32:3"),
    case("argsort", "f32:4,3,2", to="i32:4,3,2"),
    case("argsort", "f32:4,3", "desc", to="i32:4,3"),
    case("top_k", "f32:8,3,2", 2, to="i32:2,3,2"),
    case("top_k", "f32:8,3", 0, to="i32:0,3"),
    case("top_k", "f32:8,3", 8, to="i32:8,3"),
    case("arange", 0.0, 10.0, 1.0, to="f32:10"),
    case("arange", 0.0, 1.0, 0.3, to="f32:4"),
    case("arange", 5.0, 0.0, -2.0, to="f32:3"),
    case("arange", 1.0, 1.0, 1.0, to="f32:0"),
    case("repeat", "f32:2,1", "f32:4,3,2", to="f32:4,3,2"),
    case("repeat", "f16:2,3", "f32:4,3", to="f16:4,3"),
    case("repeat", "f32:0,3", "f32:0,3", to="f32:0,3"),
    *(case("concat", "f32:4,3,2,5", b, dim, to=to) for dim, b, to in (
        (0, "f32:7,3,2,5", "f32:11,3,2,5"), (1, "f32:4,1,2,5", "f32:4,4,2,5"), (2, "f32:4,3,1,5", "f32:4,3,3,5"),
        (3, "f32:4,3,2,0", "f32:4,3,2,5"))),
    case("norm", "f32:4,3", 1e-5, to="f32:4,3"),
    case("rms_norm", "f32:4,3", 1e-5, to="f32:4,3"),
    case("l2_norm", "f32:4,3", 1e-5, to="f32:4,3"),
    case("group_norm", "f32:4,3,8", 4, 1e-5, to="f32:4,3,8"),
    case("mul_mat", "f32:8,5", "f32:8,3", to="f32:5,3"),
    case("mul_mat", "q4_0:32,5", "f32:32", to="f32:5"),
    case("mul_mat", "f16:8,5,2,1", "f32:8,3,6,4", to="f32:5,3,6,4"),
    case("mul_mat", "f32:0,5", "f32:0,3", to="f32:5,3"),
    case("mul_mat_id", "f32:8,5,4", "f32:8,2,3", "i32:2,3", to="f32:5,2,3"),
    case("mul_mat_id", "f32:8,5,4", "f32:8,1,3", "i32:2,3", to="f32:5,2,3"),
    case("get_rows", "f32:8,5", "i32:3", to="f32:8,3"),
    case("get_rows", "q8_0:32,5,2", "i32:3,2", to="f32:32,3,2"),
    case("get_rows", "i32:8,5", "i32:3", to="i32:8,3"),
    case("set_rows", "f16:8,5", "f32:8,3", "i64:3", to="f16:8,5"),
    case("set_rows", "f32:8,5,4", "f32:8,3,4", "i32:3,2", to="f32:8,5,4"),
    case("set", "f32:4,3", "f32:2", 16, 16, 16, 8, to="f32:4,3"),
    case("cpy", "f32:4,3", "f16:12", to="f16:12"),
    case("cpy", "f32:32,2", "q8_0:32,2", to="q8_0:32,2"),
    case("cont", "f32:4,3", to="f32:4,3"),
    case("cont", "f32:4,3", [6, 2], to="f32:6,2"),
    case("cast", "f32:32,2", "q4_0", to="q4_0:32,2"),
    case("cast", "f32:4,3", gs.Type.F16, to="f16:4,3"),
    case("pad", "f32:4,3", 1, 2, to="f32:5,5"),
    case("pad", "f32:4,3", 0, 0, 1, 1, to="f32:4,3,2,2"),
    case("reshape", "f32:4,3,2", 24, to="f32:24"),
    case("reshape", "f32:4,3,2", 2, 3, 4, to="f32:2,3,4"),
    case("reshape", "f32:4,3,2", (2, 12), to="f32:2,12"),
    case("reshape", "f32:0,3", 3, 0, to="f32:3,0"),
    case("reshape_1d", "f32:4,3", 12, to="f32:12"),
    case("reshape_2d", "f32:4,3", 2, 6, to="f32:2,6"),
    case("reshape_3d", "f32:4,3", 2, 3, 2, to="f32:2,3,2"),
    case("reshape_4d", "f32:4,3", 2, 3, 2, 1, to="f32:2,3,2"),
    case("reshape", "q4_0:64,2", 128, to="q4_0:128"),
    case("permute", "f32:2,3,4,5", 1, 2, 3, 0, to="f32:5,2,3,4"),
    case("permute", "q4_0:32,3,4", 0, 2, 1, 3, to="q4_0:32,4,3"),
    case("transpose", "f32:2,3,4,5", to="f32:3,2,4,5"),
    case("view_1d", "f32:4,3", 5, 12, to="f32:5"),
    case("view_1d", "f32:4,3", 12, to="f32:12"),
    case("view_1d", "f32:4,3", 0, 48, to="f32:0"),
    case("view_2d", "f32:4,3", 2, 3, 16, 8, to="f32:2,3"),
    case("view_3d", "f32:4,3,2", 2, 3, 2, 16, 48, 8, to="f32:2,3,2"),
    case("view_4d", "f32:4,3,2,2", 1, 2, 2, 2, 16, 48, 96, 12, to="f32:1,2,2,2"),
    case("view_2d", "f32:4", 4, 9, 0, to="f32:4,9"),                        # rows over each other
    case("view_1d", "q4_0:64", 32, 18, to="q4_0:32"),
    case("diag_mask_inf", "f32:4,3,2", 1, to="f32:4,3,2"),
    case("diag_mask_zero", "f32:4,3,2", 1, to="f32:4,3,2"),
    case("soft_max", "f32:8,3,4", to="f32:8,3,4"),
    case("soft_max", "f32:8,3,4", "f16:8,3", 0.5, to="f32:8,3,4"),
    case("soft_max", "f32:8,3,4,2", "f32:8,32,2,1", 0.5, 8.0, to="f32:8,3,4,2"),
    case("soft_max", "f32:8,3,4", sinks="f32:4", to="f32:8,3,4"),
    case("soft_max_ext", "f32:8,3,4", "f32:8,3", 0.5, 0.0, to="f32:8,3,4"),
    case("rope", "f32:8,4,3", "i32:3", 8, to="f32:8,4,3"),
    case("rope", "f16:8,4,3,2", "i32:3", 4, "neox", "f32:2", to="f16:8,4,3,2"),
    case("rope", "f32:8,4,3", "i32:3", 0, 2, to="f32:8,4,3"),
    case("flash_attn_ext", "f32:8,5,4,2", "f16:8,7,2,2", "f16:6,7,2,2", "f16:7,5", to="f32:6,4,5,2"),
    case("ssm_conv", "f32:8,5,2", "f32:4,5", to="f32:5,5,2"),
    case("ssm_conv", "f32:3,5,2", "f32:4,5", to="f32:5,0,2"),
    case("ssm_scan", *SCAN, to="f32:756"),
    case("ssm_scan", "f32:16,1,6,4", "f32:1,6,5", "f32:6,5", "f32:1,6", "f32:16,1,5", "f32:16,1,5", "i32:1",
         to="f32:126"),
    case("swiglu_oai", "f32:8,3", "f32:8,3", to="f32:8,3"),
    case("glu", "f32:8,3", "swiglu", to="f32:4,3"),
    *(case(op, "f32:8,3,2", to="f32:4,3,2") for op in ("swiglu", "geglu", "reglu")),
    *(case(f"{op}_split", "f32:8,3", "f32:8,3", to="f32:8,3") for op in ("swiglu", "geglu", "reglu")),
]


def dense_strides(kind: gs.Type, ne) -> tuple[int, ...]:
    row = ne[0] // kind.block_size * kind.type_size
    return kind.type_size, row, row * ne[1], row * ne[1] * ne[2]


VIEWS = {"permute", "transpose", "view_1d", "view_2d", "view_3d", "view_4d"}


@pytest.mark.parametrize(("op", "args", "kwargs", "to"), GOOD)
def test_results(op, args, kwargs, to):
    make = Maker()
    sources = make.args(args)
    t = getattr(make.ctx, op)(*sources, **make.kwargs(kwargs))
    kind, ne = to.split(":")
    extents = [int(n) for n in ne.split(",")]
    assert str(t.type) == kind
    assert t.ne == tuple(extents + [1] * (4 - len(extents)))
    if op not in VIEWS:
        assert t.nb == dense_strides(t.type, t.ne) and t.is_contiguous
    assert make.ctx.tensors[-1] is t
    assert gs.Graph(t).nodes[-1] is t
    given = [a for a in sources if isinstance(a, gs.Tensor)]
    if op != "repeat":                                    # the second only lends its shape
        assert all(a in t.src for a in given)


def test_every_op_method_has_a_case():
    tested = {case.values[0] for case in GOOD}
    other = {"tensor", "restore", "set_name", "set_input", "set_output", "keep_until", "close", "rope_ext", "glu_split",
             "closed", "name", "tensors"}
    methods = {name for name in dir(gs.Context) if not name.startswith("_")}
    assert methods - tested - other == set()


REFUSED = [
    *(refused(op, "f32:4,3", b, says=op) for op in ("add", "sub", "mul", "div")
      for b in ("f32:3", "f32:8", "f32:4,2", "f32:4,3,2", "f32:0", "f32:4,6")),
    refused("add1", "f32:4", "f32:2", says="2 elements"),
    refused("add1", "f32:4", "f32:0", says="0 elements"),
    refused("add_id", "f32:4,3,2", "f32:5,7", "i32:3,2", says="add_id"),
    refused("add_id", "f32:4,3,2", "f32:4,7", "i32:2,2", says="add_id"),
    refused("add_id", "f32:4,3,2", "f32:4,7", "f32:3,2", says="i32"),
    refused("unary", "f32:4", "frobnicate", says="'frobnicate'"),
    refused("glu", "f32:8", "frobnicate", says="'frobnicate'"),
    refused("glu", "f32:7", "swiglu", says="halves"),
    refused("glu_split", "f32:8", "f32:8", "frobnicate", says="'frobnicate'"),
    refused("glu_split", "f32:8", "f32:4", "swiglu", says="differ"),
    refused("glu_split", "f32:8", "f16:8", "swiglu", says="differ"),
    refused("argmax", "f32:4,3,2", says="matrix"),
    refused("argmax", "f32:0,3", says="index"),
    refused("top_k", "f32:4", 5, says="k = 5"),
    refused("top_k", "f32:4", -1, says="k = -1"),
    refused("arange", 0.0, 1.0, 0.0, says="by 0"),
    refused("arange", 0.0, 1.0, -1.0, says="elements"),
    refused("arange", 0.0, float("inf"), 1.0, says="inf"),
    refused("arange", float("nan"), 1.0, 1.0, says="nan"),
    refused("arange", 0.0, 1e300, 1e-300, says="elements"),
    refused("repeat", "f32:3", "f32:4", says="repeat"),
    refused("repeat", "f32:0", "f32:4", says="repeat"),
    refused("repeat", "f32:4,3", "f32:4", says="repeat"),
    refused("concat", "f32:4,3", "f32:4,2", 0, says="dimension 1"),
    refused("concat", "f32:4,3", "f16:4,3", 0, says="type"),
    refused("concat", "f32:4,3", "f32:4,3", 4, says="dimension 4"),
    refused("concat", "f32:4,3", "f32:4,3", -1, says="dimension -1"),
    refused("group_norm", "f32:4,3,8", 0, 1e-5, says="0 groups"),
    refused("group_norm", "f32:4,3,8", -3, 1e-5, says="-3 groups"),
    refused("mul_mat", "f32:8,5", "f32:7,3", says="length"),
    refused("mul_mat", "f32:8,5,2", "f32:8,3,3", says="dimension 2"),
    refused("mul_mat", "f32:8,5,4", "f32:8,3,2", says="dimension 2"),
    refused("mul_mat", "f32:8,5,1,0", "f32:8,3,1,2", says="dimension 3"),
    refused("mul_mat_id", "f32:8,5,4", "f32:8,2,3", "f32:2,3", says="i32"),
    refused("mul_mat_id", "f32:8,5,4", "f32:7,2,3", "i32:2,3", says="length"),
    refused("mul_mat_id", "f32:8,5,4", "f32:8,2,3", "i32:2,4", says="tokens"),
    refused("mul_mat_id", "f32:8,5,4", "f32:8,2,3", "i32:3,3", says="spread"),
    refused("mul_mat_id", "f32:8,5,4", "f32:8,0,3", "i32:3,3", says="spread"),
    refused("mul_mat_id", "f32:8,5,4,2", "f32:8,2,3", "i32:2,3", says="dimensions"),
    refused("mul_mat_id", "f32:8,5,4", "f32:8,2,3", "i32:2,3,2", says="dimensions"),
    refused("get_rows", "f32:8,5", "f32:3", says="i32"),
    refused("get_rows", "f32:8,5", "i64:3", says="i32"),
    refused("get_rows", "f32:8,5,2", "i32:3", says="fit"),
    refused("get_rows", "f32:8,5", "i32:3,2", says="fit"),
    refused("set_rows", "f32:8,5", "f32:8,3", "f32:3", says="i64 or i32"),
    refused("set_rows", "f32:8,5", "f16:8,3", "i64:3", says="f32"),
    refused("set_rows", "f32:8,5", "f32:7,3", "i64:3", says="fit"),
    refused("set_rows", "f32:8,5", "f32:8,3", "i64:4", says="fit"),
    refused("set_rows", "f32:8,5,2", "f32:8,3,1", "i64:3", says="fit"),
    refused("set_rows", "f32:8,5", "f32:8,3", "i64:3,0", says="fit"),
    refused("set", "f32:4,3", "f16:2", 16, 16, 16, 8, says="type"),
    refused("set", "f32:4,3", "f32:2", 16, 16, 16, 44, says="inside"),
    refused("set", "f32:4,3", "f32:2", 16, 16, 16, -4, says="inside"),
    refused("set", "f32:4,3", "f32:2,2", 48, 48, 48, 0, says="inside"),
    refused("set", "f32:4,3", "f32:2,2", 2**62, 48, 48, 0, says="inside"),
    refused("cpy", "f32:4,3", "f32:11", says="elements"),
    refused("cont", "f32:4,3", [5, 2], says="elements"),
    refused("cast", "f32:4,3", "q4_0", says="blocks"),
    refused("cast", "f32:4,3", "q9_9", says="'q9_9'"),
    refused("pad", "f32:4,3", -1, says="-1"),
    refused("pad", "f32:4,3", 2**31, says="2147483648"),
    refused("pad", "f16:4,3", 1, says="f32"),
    refused("reshape", "f32:4,3", 11, says="elements"),
    refused("reshape", "f32:4,3", -12, says="-12"),
    refused("reshape", "f32:4,3", -1, 12, says="-1"),
    refused("reshape", "f32:4,3", BIG, BIG, BIG, 16, says="overflow"),
    refused("reshape", "f32:4,3", (), says="dimensions"),
    refused("reshape", "f32:4,3", (1, 1, 1, 1, 12), says="dimensions"),
    refused("reshape", "q4_0:64", 16, 4, says="blocks"),
    refused("permute", "f32:4,3", 0, 1, 2, 2, says="order"),
    refused("permute", "f32:4,3", 0, 1, 2, 4, says="order"),
    refused("permute", "f32:4,3", -1, 1, 2, 3, says="order"),
    refused("permute", "q4_0:32,3", 1, 0, 2, 3, says="blocks"),
    refused("transpose", "q4_0:32,3", says="blocks"),
    refused("view_1d", "f32:4,3", 13, says="inside"),
    refused("view_1d", "f32:4,3", 12, 4, says="inside"),
    refused("view_1d", "f32:4,3", 1, 48, says="inside"),
    refused("view_1d", "f32:4,3", 1, -4, says="inside"),
    refused("view_1d", "f32:4,3", 1, 2**63 - 1, says="inside"),
    refused("view_1d", "f32:4,3", -1, says="-1"),
    refused("view_1d", "f32:4,3", 2**62, says="view"),
    refused("view_1d", "q4_0:64", 31, says="blocks"),
    refused("view_2d", "f32:4,3", 4, 4, 16, says="inside"),
    refused("view_2d", "f32:4,3", 4, 2, -16, says="-16"),
    refused("view_2d", "f32:4,3", 4, -2, 16, says="-2"),
    refused("view_2d", "f32:4,3", 4, 2**62, 2**62, says="overflow"),
    refused("view_3d", "f32:4,3,2", 4, 3, 2, 16, 49, says="inside"),
    refused("view_4d", "f32:4,3,2", 4, 3, 2, 2, 16, 48, 96, says="inside"),
    refused("soft_max", "f32:8,3,4", "f32:7,3", says="mask"),
    refused("soft_max", "f32:8,3,4", "f32:8,2", says="mask"),
    refused("soft_max", "f32:8,3,4", "i32:8,3", says="mask"),
    refused("soft_max", "f32:8,3,4", "f32:8,3,3", says="mask"),
    refused("soft_max", "f32:8,3,4", "f32:8,3,0", says="mask"),
    refused("soft_max", "f32:8,3,4", max_bias=8.0, says="max_bias"),
    refused("soft_max", "f32:8,3,4", sinks="f32:3", says="sinks"),
    refused("soft_max", "f32:8,3,4", sinks="f16:4", says="sinks"),
    refused("rope", "f32:8,4,3", "i32:4", 8, says="positions"),
    refused("rope", "f32:8,4,3", "f32:3", 8, says="positions"),
    refused("rope", "f32:8,4,3", "i32:3", 9, says="n_dims"),
    refused("rope", "f32:8,4,3", "i32:3", 10, says="n_dims"),
    refused("rope", "f32:8,4,3", "i32:3", -2, says="n_dims"),
    refused("rope", "f32:8,4,3", "i32:3", 8, "sideways", says="sideways"),
    refused("rope", "f32:8,4,3", "i32:3", 8, 7, says="7"),
    refused("rope", "f32:8,4,3", "i32:3", 8, 0, "f32:3", says="freq_factors"),
    refused("rope", "q8_0:32,4,3", "i32:3", 8, says="f32 or f16"),
    refused("ssm_conv", "f32:8,5,2", "f32:4,6", says="fit"),
    refused("ssm_conv", "f32:8,5,2", "f32:10,5", says="fit"),
    refused("ssm_conv", "f32:8,5,2", "f32:0,5", says="fit"),
    refused("ssm_conv", "f16:8,5,2", "f32:4,5", says="f32"),
    *(refused("ssm_scan", *scan, says=says) for says, scan in (
        ("do not fit", ("f32:16,2,7,4", *SCAN[1:])),
        ("steps", (*SCAN[:2], "f32:6,4,3", *SCAN[3:])),
        ("neither", (*SCAN[:3], "f32:8,6", *SCAN[4:])),
        ("does not fit", (*SCAN[:4], "f32:16,4,5,3", "f32:16,4,5,3", "i32:3")),
        ("does not fit", (*SCAN[:4], "f32:16,0,5,3", "f32:16,0,5,3", "i32:3")),
        ("differ", (*SCAN[:5], "f32:16,1,5,3", "i32:3")),
        ("ids", (*SCAN[:6], "i32:2")),
        ("ids", (*SCAN[:6], "i64:3")),
        ("must be f32", (*SCAN[:5], "f16:16,2,5,3", "i32:3")))),
    refused("flash_attn_ext", "f32:8,5,4", "f16:7,7,4", "f16:8,7,4", says="fit"),
    refused("flash_attn_ext", "f32:8,5,4", "f16:8,7,4", "f16:8,6,4", says="fit"),
    refused("flash_attn_ext", "f32:8,5,4", "f16:8,7,3", "f16:8,7,3", says="dimension 2"),
    refused("flash_attn_ext", "f32:8,5,4", "f16:8,7,4", "f16:8,7,4", "f16:6,5", says="mask"),
    refused("flash_attn_ext", "f32:8,5,4", "f16:8,7,4", "f16:8,7,4", "f16:7,4", says="mask"),
    refused("flash_attn_ext", "f32:8,5,4", "f16:8,7,4", "f16:8,7,4", "i32:7,5", says="mask"),
    refused("flash_attn_ext", "f32:8,5,4", "f16:8,7,4", "f16:8,7,4", max_bias=1.0, says="max_bias"),
    refused("flash_attn_ext", "f32:8,5,4", "f16:8,7,4", "f16:8,7,4", sinks="f32:3", says="sinks"),
]


@pytest.mark.parametrize(("op", "args", "kwargs", "says"), REFUSED)
def test_refusals_name_the_op_and_the_numbers(op, args, kwargs, says):
    make = Maker()
    args, kwargs = make.args(args), make.kwargs(kwargs)
    before = make.ctx.tensors
    with pytest.raises(gs.GraphError) as raised:
        getattr(make.ctx, op)(*args, **kwargs)
    message = str(raised.value)
    assert says in message, message
    assert make.ctx.tensors == before
    # Wherever the fault lies with a tensor, it is named; sizes of results and unknown kinds stand alone.
    if op != "arange" and says not in ("'frobnicate'", "'q9_9'", "order", "blocks"):
        assert "'t" in message, message


@pytest.mark.parametrize("op", ["relu", "mul_mat", "reshape", "permute", "view_1d", "soft_max", "get_rows"])
def test_something_that_is_no_tensor_is_a_type_error(ctx, op):
    for wrong in (None, 3, "x", object()):
        with pytest.raises(TypeError):
            getattr(ctx, op)(wrong, wrong)
    assert ctx.tensors == ()


@pytest.mark.parametrize("call", [
    lambda ctx, a: ctx.unary(a, None), lambda ctx, a: ctx.glu(a, None), lambda ctx, a: ctx.glu_split(a, a, None)])
def test_a_kind_that_is_none_is_a_type_error(ctx, call):
    a = ctx.tensor("f32", (8, 4))
    with pytest.raises(TypeError, match="kind"):
        call(ctx, a)
    assert ctx.tensors == (a,)


INTS = {
    "view_1d": (lambda ctx, a, n: ctx.view_1d(a, n), lambda ctx, a, n: ctx.view_1d(a, 1, n)),
    "view_2d": tuple(lambda ctx, a, n, k=k: ctx.view_2d(a, *(n if i == k else 1 for i in range(4))) for k in range(4)),
    "view_3d": tuple(lambda ctx, a, n, k=k: ctx.view_3d(a, *(n if i == k else 1 for i in range(6))) for k in range(6)),
    "view_4d": tuple(lambda ctx, a, n, k=k: ctx.view_4d(a, *(n if i == k else 1 for i in range(8))) for k in range(8)),
    "reshape": tuple(lambda ctx, a, n, k=k: getattr(ctx, f"reshape_{k}d")(a, *[1] * (k - 1), n) for k in range(1, 5)),
    "permute": tuple(lambda ctx, a, n, k=k: ctx.permute(a, *(n if i == k else i for i in range(4))) for k in range(4)),
    "top_k": (lambda ctx, a, n: ctx.top_k(a, n),),
    "group_norm": (lambda ctx, a, n: ctx.group_norm(a, n, 1e-5),),
    "set": tuple(lambda ctx, a, n, k=k: ctx.set(a, a, *(n if i == k else 1 for i in range(4))) for k in range(4)),
    "concat": (lambda ctx, a, n: ctx.concat(a, a, n),),
    "pad": tuple(lambda ctx, a, n, k=k: ctx.pad(a, *(n if i == k else 1 for i in range(4))) for k in range(4)),
    "diag_mask": (lambda ctx, a, n: ctx.diag_mask_inf(a, n), lambda ctx, a, n: ctx.diag_mask_zero(a, n)),
    "rope": (lambda ctx, a, n: ctx.rope(a, ctx.tensors[1], n),
             lambda ctx, a, n: ctx.rope(a, ctx.tensors[1], 2, n_ctx_orig=n)),
}
"""Every int that an op method takes, as a call that gives it one."""


@pytest.mark.parametrize("op", INTS)
def test_an_int_is_never_cut_from_something_else(ctx, op):
    a, _ = ctx.tensor("f32", (8, 8), "the source"), ctx.tensor("i32", 1)
    for call in INTS[op]:
        for wrong in (2.7, 2.0, "2", np.float32(2), None, 2j):
            if wrong is None and op.startswith("view"):
                continue        # a dense stride
            with pytest.raises(TypeError):
                call(ctx, a, wrong)
        for wrong in (2**63, -2**63 - 1, 2**200):
            with pytest.raises(gs.GraphError, match="the source"):
                call(ctx, a, wrong)
    assert len(ctx.tensors) == 2
    assert ctx.view_1d(a, np.int32(3), np.uint8(4)).ne[0] == ctx.top_k(a, np.int64(3)).ne[0] == 3


def test_elements_that_63_bits_do_not_count_are_refused(ctx):
    """With strides of 0 they take few bytes; their product once came out as 0, and fitted an empty tensor."""
    a = ctx.tensor("f32", 4, "the source")
    with pytest.raises(gs.GraphError, match="the source"):
        ctx.view_4d(a, 4, 2**40, 2**40, 1, 0, 0, 0)
    with pytest.raises(gs.GraphError, match=r"2\*\*63"):
        ctx.restore("VIEW", "f32", (2**32, 2**32, 1, 1), (0, 0, 0, 0), (a,), a)
    assert ctx.view_4d(a, 1, 2**31, 2**31, 1, 0, 0, 0).n_elements == 2**62
    assert ctx.view_4d(a, 4, 2**40, 2**40, 0, 0, 0, 0).nbytes == 0, "no elements at all"


def test_op_params_hold_what_was_given(ctx):
    a = ctx.tensor("f32", (8, 8), "the source")
    for beyond in (2**31, -2**31 - 1, 2**40):
        with pytest.raises(gs.GraphError, match=r"the source.*int32"):
            ctx.diag_mask_inf(a, beyond)
    for beyond in (1e39, -1e300):
        with pytest.raises(gs.GraphError, match=r"the source.*float32"):
            ctx.scale(a, beyond)
    assert ctx.diag_mask_inf(a, 2**31 - 1).op_params == (2**31 - 1,)
    assert ctx.scale(a, float("inf")).op_params == (0x7f800000,)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "ne"), [
    ("f32", (2**63,)), ("f32", (2**62,)), ("f32", (2**40, 2**40)), ("i8", (2**31, 2**31, 2**31)), ("f32", (-1,)),
    ("f32", (4, -1)), ("f32", (2**200,)), ("q4_0", (31,)), ("q4_0", (16, 2)), ("q4_0", (1,)), ("f32", ()),
    ("f32", (1, 1, 1, 1, 1)), ("q4_K", (128,)), ("f64", (2**60, 2)),
])
def test_leafs_that_cannot_be(ctx, kind, ne):
    with pytest.raises(gs.GraphError):
        ctx.tensor(kind, ne)
    assert ctx.tensors == ()


@pytest.mark.parametrize("wrong", ["4", 1.5, np.float64(4), np.array(1.5), None, [1.5], ["4"], {}, object()])
def test_extents_that_are_no_numbers(wrong):
    with pytest.raises((TypeError, gs.GraphError)):
        gs.Context().tensor("f32", wrong)


@pytest.mark.parametrize("given", [12, np.int64(12), np.uint8(12), np.array(12), [12], (np.int32(12),), np.array([12])],
                         ids=repr)
def test_extents_are_whatever_has_an_index_or_a_sequence_of_such(ctx, given):
    x = ctx.tensor("f32", (4, 3), "x")
    made = [ctx.tensor("f32", given), ctx.reshape(x, given), ctx.cont(x, given)]
    if not np.ndim(given):
        made.append(ctx.reshape_1d(x, given))
    assert {t.ne for t in made} == {(12, 1, 1, 1)}
    assert ctx.reshape(x, np.int64(6), np.int64(2)).ne == ctx.reshape(x, np.array([6, 2])).ne == (6, 2, 1, 1)


@pytest.mark.parametrize(("kind", "ne", "nbytes"), [
    ("f32", (2**61 - 1,), 2**63 - 4), ("i8", (2**31, 2**31), 2**62), ("f32", (0, 2**40), 0), ("f32", (0,), 0),
    ("q4_0", (0,), 0), ("q4_0", (64, 3), 108), ("q8_0", (32,), 34), ("q6_K", (256,), 210), ("f16", (3, 5), 30),
    ("i64", (3,), 24), ("bf16", (7,), 14), ("f32", 5, 20), ("f32", [5], 20),
])
def test_sizes_of_leafs(kind, ne, nbytes):
    t = gs.Context().tensor(kind, ne)
    assert t.nbytes == nbytes


@pytest.mark.parametrize("wrong", ["f33", "", "F 32", 4, 5, 63, 64, -1, 10**30])
def test_unknown_types(wrong):
    with pytest.raises(gs.GraphError):
        gs.Context().tensor(wrong, 4)


@pytest.mark.parametrize("wrong", [None, 1.0, object(), ["f32"]])
def test_types_that_are_no_types(wrong):
    with pytest.raises(TypeError):
        gs.Context().tensor(wrong, 4)


def test_types_by_name_number_and_member(ctx):
    for kind in gs.Type:
        for spelling in (kind, int(kind), str(kind), str(kind).upper()):
            if spelling == str(kind).upper() and spelling.lower() != str(kind).lower():
                continue
            assert ctx.tensor(spelling, kind.block_size).type is kind
        assert ctx.tensor(kind, kind.block_size).nbytes == kind.type_size


def test_results_that_overflow(ctx):
    """Each case has small sources and an impossibly large result."""
    row = ctx.tensor("i8", (1, 2**40), "row")
    column = ctx.tensor("i8", (1, 2**40), "column")
    with pytest.raises(gs.GraphError, match="MUL_MAT"):
        ctx.mul_mat(row, column)
    wide = ctx.tensor("i8", 2**61, "wide")
    for call in (lambda: ctx.cast(wide, "f32"), lambda: ctx.cast(wide, "i64"),
                 lambda: ctx.concat(ctx.tensor("i8", 2**62), ctx.tensor("i8", 2**62), 0),
                 lambda: ctx.mean(ctx.tensor("i8", (1, 2**62)))):
        with pytest.raises(gs.GraphError):
            call()


def test_a_view_of_a_view_is_a_view_of_the_root(ctx):
    a = ctx.tensor("f32", 100, "a")
    outer = ctx.view_1d(a, 50, 40)
    inner = ctx.view_1d(outer, 10, 20)
    assert inner.view_src is a and inner.view_offs == 60 and inner.src == (outer,)
    # Inside the root is enough, as in ggml: a window may look beyond the view that it was taken from.
    assert ctx.view_1d(outer, 60, 0).nbytes == 240
    with pytest.raises(gs.GraphError, match="'a'"):
        ctx.view_1d(outer, 91, 0)
    with pytest.raises(gs.GraphError):
        ctx.view_1d(outer, 1, 2**63 - 20)


def test_views_of_permuted_tensors_keep_their_strides(ctx):
    a = ctx.tensor("f32", (4, 3, 2), "a")
    t = ctx.transpose(a)
    assert (t.ne, t.nb) == ((3, 4, 2, 1), (16, 4, 48, 96)) and not t.is_contiguous
    for call in (lambda: ctx.reshape(t, 24), lambda: ctx.soft_max(t),
                 lambda: ctx.mul_mat(ctx.transpose(ctx.tensor("f32", (4, 3))), ctx.tensor("f32", 3))):
        with pytest.raises(gs.GraphError, match="contiguous"):
            call()
    assert ctx.cont(t).is_contiguous
    assert ctx.transpose(t).nb == a.nb and ctx.transpose(t).is_contiguous
    assert ctx.permute(a, 2, 0, 1, 3).ne == (3, 2, 4, 1)


@pytest.mark.parametrize("op", ["add", "mul", "sub", "div", "add1", "scale", "sqr", "sqrt", "log", "rms_norm",
                                "soft_max", "diag_mask_inf", "diag_mask_zero", "rope"])
def test_in_place_variants_are_views_of_their_first_source(op):
    make = Maker()
    a = make("f32:8,3,4")
    more = {"add": ["f32:8"], "mul": ["f32:8"], "sub": ["f32:8"], "div": ["f32:8"], "add1": ["f32:1"], "scale": [2.0],
            "rms_norm": [1e-5], "diag_mask_inf": [0], "diag_mask_zero": [0], "rope": ["i32:4", 8]}.get(op, [])
    t = getattr(make.ctx, op)(a, *make.args(more), inplace=True)
    assert t.view_src is a and t.view_offs == 0 and (t.ne, t.nb) == (a.ne, a.nb)


def test_op_params_are_ggmls_words(ctx):
    a = ctx.tensor("f32", (8, 4, 3))
    assert ctx.scale(a, 0.5).op_params == (0x3F000000,)
    assert ctx.scale(a, 0.0).op_params == ()
    assert ctx.silu(a).op_params == (10,) and ctx.silu(a).op == "UNARY:SILU"
    assert ctx.abs(a).op_params == ()
    assert ctx.permute(a, 0, 2, 1, 3).op_params == (0, 2, 1, 3)
    assert ctx.rope(a, ctx.tensor("i32", 3), 8, "neox").op_params[:3] == (0, 8, 2)
    assert ctx.swiglu(a).op_params == (2,)
    assert ctx.argsort(a, "desc").op_params == (1,)
    assert ctx.set(a, a, 32, 128, 384, 0, inplace=True).op_params == (32, 128, 384, 0, 1)
    assert ctx.pad(a, 1, 0, 2).op_params == (0, 1, 0, 0, 0, 2)
    assert ctx.view_1d(ctx.tensor("i8", 2**33), 8, 2**32 + 8).op_params == (8, 1)
    assert ctx.scale(a, 1.0, -0.0).op_params == (0x3F800000, -2**31)


def test_trailing_zeros_of_given_op_params_are_cut(ctx):
    a = ctx.tensor("f32", 4)
    for given, kept in (((0, 3, 0, 0), (0, 3)), ((0,) * 16, ()), ((-1,) * 16, (-1,) * 16)):
        assert ctx.restore("SCALE", "f32", a.ne, a.nb, (a,), op_params=given).op_params == kept


NAMED_AFTER = {
    "VIEW": (" (view)", lambda ctx, a: ctx.view_2d(a, 4, 4, 16)),
    "RESHAPE": (" (reshaped)", lambda ctx, a: ctx.reshape(dense(ctx, a), 4, 4)),
    "PERMUTE": (" (permuted)", lambda ctx, a: ctx.permute(a, 1, 0, 2, 3)),
    "TRANSPOSE": (" (transposed)", lambda ctx, a: ctx.transpose(a)),
    "CONT": (" (cont)", lambda ctx, a: ctx.cont(a)),
    "CPY": (" (copy)", lambda ctx, a: ctx.cast(a, "f32")),
    "SCALE": (" (view)", lambda ctx, a: ctx.scale(a, 2.0, inplace=True)),
}


def dense(ctx, a):
    """`a` if it can be reshaped, else a dense tensor of its name."""
    return a if a.is_contiguous else ctx.tensor("f32", a.ne[:2], a.name)


def bounded(name):
    """A name of 255 characters in place of a generated one of more than 256."""
    return name if len(name) <= 256 else f"{name[:126]}...{name[-126:]}"


def test_names_are_those_of_the_moment_an_op_was_called():
    """Put together when first read, in whatever order; naming what came before changes nothing."""
    rng = random.Random(3)
    for _ in range(60):
        ctx = gs.Context()
        made = [ctx.tensor("f32", (4, 4), rng.choice(["x", ""]))]
        names = [made[0].name]
        for _ in range(rng.randrange(60)):
            k = rng.randrange(len(made)) if rng.random() < 0.2 else len(made) - 1
            a, name = made[k], names[k]
            if rng.random() < 0.1:
                names[k] = f"named {len(made)}"
                ctx.set_name(a, names[k])
                continue
            if rng.random() < 0.1:
                assert a.name == name
            op, (ending, make) = rng.choice(list(NAMED_AFTER.items()))
            made.append(make(ctx, a))
            assert made[-1].op == op
            names.append("" if op == "SCALE" and not name else bounded(name + ending))
        order = list(range(len(made)))
        rng.shuffle(order)
        for k in order:
            assert made[k].name == names[k] == made[k].name


def test_names_with_many_endings(ctx):
    """More than fit into the number that holds them."""
    t = ctx.tensor("f32", (4, 4), "x")
    for n in range(1, 100):
        t = ctx.transpose(ctx.permute(t, 0, 1, 2, 3))
        if n % 33 == 0:
            assert t.name == bounded("x" + " (permuted) (transposed)" * n)


@pytest.mark.parametrize("length", [1, 248, 249, 250, 1000])
def test_given_names_stay_whole_and_generated_ones_are_bounded(ctx, length):
    given = ("abcdefghij" * 100)[:length]
    x = ctx.tensor("f32", 4, given)
    view, copy = ctx.view_1d(x, 4), ctx.cpy(x, ctx.tensor("f32", 4, "b"))
    assert (view.name, copy.name) == (bounded(f"{given} (view)"), bounded(f"b (copy of {given})"))
    assert x.name == given and ctx.set_name(view, given).name == given


def test_names_of_copies_of_copies_do_not_grow(ctx):
    """A state of 8 rows that each step shifts by one row: the names doubled with each step."""
    state = ctx.tensor("f32", (4, 8), "state")
    for _ in range(2000):
        rows = ctx.cont(ctx.view_2d(state, 4, 7, 16, 16))
        state = ctx.view_2d(ctx.cpy(rows, ctx.view_2d(state, 4, 7, 16, 0)), 4, 8, 16, 0)
        assert len(state.name) <= 256
    assert state.name.startswith("state (view) (copy of state (view) (cont)) (view) (view)")
    assert state.name.endswith(" (view) (cont)) (view)")


@pytest.mark.parametrize("reads_early", [False, True])
def test_names_of_20000_nested_views_are_bounded_whenever_they_are_read(ctx, reads_early):
    views = [ctx.tensor("f32", 4, "x")]
    for _ in range(20_000):
        views.append(ctx.view_1d(views[-1], 4))
        assert not reads_early or len(views[-1].name) <= 256
    assert max(len(view.name) for view in views) <= 256
    assert views[20].name == "x" + 20 * " (view)"
    assert views[-1].name == bounded("x" + 20_000 * " (view)")


def test_names_of_copies(ctx):
    a, b, nameless = ctx.tensor("f32", 4, "a"), ctx.tensor("f32", 4, "b"), ctx.tensor("f32", 4)
    copy = ctx.cpy(ctx.view_1d(a, 4), ctx.view_1d(b, 4))
    assert (copy.name, ctx.cpy(a, nameless).name) == ("b (view) (copy of a (view))", "a (copy)")
    assert ctx.cpy(nameless, nameless).name == " (copy)" and ctx.set_rows(
        ctx.tensor("f32", (4, 2), "m"), ctx.tensor("f32", (4, 1)), ctx.tensor("i64", 1)).name == "m (view)"


def test_flags_and_names():
    ctx = gs.Context("flags")
    a = ctx.tensor("f32", 4, "a", input=True)
    b = ctx.tensor("f32", 4, "b", input=True, output=True)
    c = ctx.set_output(ctx.relu(a))
    assert (a.flags, b.flags, c.flags) == ({"input"}, {"input", "output"}, {"output"})
    assert ctx.set_name(c, "c") is c and c.name == "c"
    assert ctx.set_input(ctx.tensor("f32", 4)).flags == {"input"}
    assert repr(c) == "<Tensor 'c' UNARY:RELU f32 [4x1x1x1]>"
