"""Roles: the part of a model that a tensor belongs to, and the one colour that it has in every drawing.

A role follows from the names that llama.cpp gives nodes and weights; a node without such a name has the role of the
weight that it reads, or, if it reads none, of another source.  In a graph without such names roles are classes of ops.
The colours differ from each other and from the paper, also for readers who confuse red and green
(tests/view/test_roles.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ggml_sched._graph import Graph, Tensor
from ggml_sched.view.ink import ink_on

__all__ = ["ATTENTION", "COPIES", "DEEP", "EXPERTS", "FEED_FORWARD", "INPUTS", "OTHER", "OUTPUT", "RECURRENT",
           "ROLES", "STREAM", "Role", "role_of_name", "roles_of"]


class Role(NamedTuple):
    """One role: its name in legends, and its colour."""

    name: str
    colour: str


(INPUTS, STREAM, ATTENTION, FEED_FORWARD, EXPERTS, RECURRENT, OUTPUT, COPIES, OTHER,
 PRODUCTS, ELEMENTS, REDUCTIONS) = range(12)
ROLES = (Role("inputs", "#716ec4"), Role("residual stream, norms", "#52c491"), Role("attention", "#64b2fe"),
         Role("feed-forward", "#fbaa22"), Role("experts", "#c03914"), Role("recurrent", "#209192"),
         Role("output", "#8a3e72"), Role("copies", "#a49409"), Role("other", "#c7cdd4"),
         Role("matrix products", "#64b2fe"), Role("element by element", "#fbaa22"),
         Role("norms, reductions", "#52c491"))
"""The roles; the constants above are indices of this tuple.  The last three are for graphs without such names."""
DEEP = frozenset(number for number, role in enumerate(ROLES) if ink_on(role.colour) == "#ffffff")
"""The roles with dark colours, on which texts are white."""

_NODES = re.compile(r"""
    (?P<r2>wqkv|[QKVqkv]cur|[qkv]_|kq|qk|__fattn__|attn_out|cache_[kv]_|attn_(?!norm|inp))
  | (?P<r4>ffn_moe)
  | (?P<r3>ffn_(?!inp|norm))
  | (?P<r5>cache_[rs]_|ssm_|rwkv|wkv|conv_|mamba)
  | (?P<r6>result_(?!norm))
  | (?P<r1>embd|inp_embd|inpL|l_out|ffn_inp|\w*norm(?![a-z]))
    """, re.X)
"""Matches how the names of llama.cpp's nodes begin; the digit in the name of the matching group is the role."""
_WEIGHTS = re.compile(r"""
    (?:\w+\.)*?(?:blk\.\d+\.)?(?:
    (?P<r1>(?:attn|ffn|layer|output|token_embd|post|enc\.output)?\w*_norm)
  | (?P<r4>ffn_gate_inp|\w+_exps|exp_probs)
  | (?P<r2>attn_|cross_attn|wq|wk|wv)
  | (?P<r3>ffn_)
  | (?P<r5>ssm_|time_mix|channel_mix|shortconv)
  | (?P<r6>output\.)
  | (?P<r1b>token_embd|position_embd|token_types))
    """, re.X)
"""Matches how the names of weights in model files begin; the digit in the name of the matching group is the role."""
_OPS = {PRODUCTS: ("MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "FLASH_ATTN_EXT", "CONV_2D", "SSM_SCAN", "SSM_CONV"),
        REDUCTIONS: ("NORM", "RMS_NORM", "GROUP_NORM", "L2_NORM", "SOFT_MAX", "SUM", "SUM_ROWS", "MEAN", "ARGMAX"),
        ELEMENTS: ("ADD", "ADD1", "SUB", "MUL", "DIV", "SCALE", "SQR", "SQRT", "CLAMP", "UNARY", "GLU", "ROPE")}
"""{role: its ops}, for graphs without llama.cpp's names."""
_ROLE_OF_OP = {op: role for role, ops in _OPS.items() for op in ops}


def role_of_name(name: str, weight: bool = False) -> int | None:
    """The role that follows from the name of a node, or of a weight (`weight`); None if the name says none."""
    found = (_WEIGHTS if weight else _NODES).match(name)
    return None if found is None or found.lastgroup is None else int(found.lastgroup[1])


def roles_of(graph: Graph) -> list[int]:
    """The role of each tensor of a graph, by id; leafs that are no weights or caches are inputs."""
    roles: list[int | None] = [None] * len(graph.tensors)
    ids = {t: i for i, t in enumerate(graph.tensors)}
    for t in graph.leafs:
        held = t.is_resident or bool(t.resident)
        cache = t.name.startswith("cache_")
        roles[ids[t]] = role_of_name(t.name, held and not cache) if held else INPUTS
    said = [role_of_name(t.name) for t in graph.nodes]
    if all(role is None for role in said):
        for t in graph.nodes:
            roles[ids[t]] = _ROLE_OF_OP.get(t.op.partition(":")[0], OTHER)
    else:
        for t, role in zip(graph.nodes, said, strict=True):
            if role is None and not t.computes:
                role = roles[ids[t.root]]
            elif role is None:
                role = _inherited([(s, roles[ids[s]]) for s in t.src if s is not None])
            roles[ids[t]] = role
    return [OTHER if role is None else role for role in roles]


def _inherited(sources: Sequence[tuple[Tensor, int | None]]) -> int | None:
    """The role of a node whose name says none, from its sources and their roles: that of a weight or cache, else that
    of the last other source.  The role of the residual stream, which passes through all layers, counts only if there is
    no other; None without any role."""
    held = [role for s, role in sources if s.op == "NONE" and role is not None and role != INPUTS]
    made = [role for s, role in sources if s.op != "NONE" and role is not None]
    return next((role for role in [*held, *reversed(made), *held, *made] if role != STREAM),
                STREAM if held or made else None)
