"""Queries, keys and values of few tokens: products of one input in one launch, with what follows them up to the caches.

    mul_mat [add] [rms_norm mul] [rope] [set_rows]      for each of up to three products

One launch computes the products of equal types, with their biases; another the norms of heads, the ropes and the writes
to the caches.  All members are computed at the position of the last one, so a plan keeps their memory apart; addresses
are checked all the same, and if results overlap the members are computed one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.rope import Angles
from ggml_sched.backends.cupy.launch import MAX_BLOCKS, MAX_GRID, Builder, struct
from ggml_sched.backends.cupy.ops.groups import Wiring
from ggml_sched.backends.cupy.ops.matrix import is_few, together
from ggml_sched.backends.cupy.ops.norm import emit_norm
from ggml_sched.backends.cupy.ops.registry import OPS, float_param, int_param, optional
from ggml_sched.backends.cupy.ops.rope import PAIRS, emit_rope_set_rows
from ggml_sched.backends.cupy.ops.wiring import Members, apart
from ggml_sched.backends.cupy.regions import VIEW, Region
from ggml_sched.backends.cupy.repack import is_packed

__all__ = ["build", "is_one", "merged"]

BETWEEN = frozenset({"ADD", "RMS_NORM", "MUL", "ROPE", "SET_ROWS"})
"""Ops of the members other than products."""
MOST_PRODUCTS = 3
MOST = 16
"""The most members of a group."""

FLOATS = frozenset({Type.F32, Type.F16, Type.BF16})

HEADS = np.dtype([("a", VIEW), ("d", VIEW), ("ids", VIEW), ("factor", "<u8")]
                 + [(name, "<i4") for name in ("heads", "half", "written", "wide", "kind", "position")]
                 + [("eps", "<f4"), ("unused", "<i4")])
"""`struct Heads` of rope.cu."""
TURNS = np.dtype([("positions", VIEW), ("factors", VIEW), ("neox", "<i4"), ("has_factors", "<i4"),
                  ("magnitude", "<f4"), ("unused", "<i4"), ("per_position", "<f8", PAIRS)])
"""`struct Turns` of rope.cu."""


# -- finding --------------------------------------------------------------------------------------


def is_one(nodes: Sequence[Tensor]) -> bool:
    """Whether these nodes, the members of a fusion group, are a group that `find` of this module found."""
    ops = [node.op for node in nodes]
    return ops[0] == "MUL_MAT" and ops.count("MUL_MAT") > 1 and BETWEEN.union(("MUL_MAT",)).issuperset(ops)


def merged(wiring: Wiring, found: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups `found` in a graph and those of this module, which replace found groups that lie within them."""
    kept = {group: {wiring.nodes[i] for i in group} for group in found}
    taken = {node for group in kept.values() if any(node.op.startswith("GLU") for node in group) for node in group}
    for members in find(wiring, taken):
        inside = [group for group, inner in kept.items() if not inner.isdisjoint(members)]
        if all(kept[group].issubset(members) for group in inside):
            for group in inside:
                del kept[group]
            kept[tuple(wiring.position[node] for node in members)] = set(members)
    return sorted(kept)


def find(wiring: Wiring, taken: Collection[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The members of each group; `taken`: nodes that other groups keep."""
    by_input: dict[Tensor, list[Tensor]] = {}
    for node in wiring.nodes:
        if node.op == "MUL_MAT" and node not in taken and _is_projection(node):
            by_input.setdefault(node.src[1], []).append(node)
    for products in by_input.values():
        members = _members(wiring, products[:MOST_PRODUCTS]) if len(products) > 1 else None
        if members is not None:
            yield members


def _is_projection(node: Tensor) -> bool:
    a, x = node.src[:2]
    return (is_few(node) and node.n_elements > 0 and node.view_src is None and node.type == Type.F32
            and OPS["MUL_MAT"].fits(node) and x.ne[2:] == a.ne[2:] == (1, 1))


def _members(wiring: Wiring, products: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The products and the nodes that depend on one of them, in the order of the graph, up to the first node that
    cannot be a member: its op is not in BETWEEN, or a node outside the group computes a source of it meanwhile, or
    there are MOST members.  None if such a node comes before the last product."""
    first, last = (wiring.position[products[i]] for i in (0, -1))
    own = set(products)
    members: list[Tensor] = []
    written: set[Tensor] = set()            # members, and views of their results
    for i in range(first, len(wiring.nodes)):
        node = wiring.nodes[i]
        if node in own:
            members.append(node)
            written.add(node)
            continue
        sources = [t for t in (*node.src, node.view_src) if t is not None]
        if not any(t in written for t in sources):
            continue
        written.add(node)
        if not node.computes:
            continue
        others = (t.root for t in sources if t not in written)
        if (node.op not in BETWEEN or len(members) == MOST
                or any(t.computes and wiring.position.get(t, first) >= first for t in others)):
            if i < last:
                return None
            break
        members.append(node)
    return tuple(members) if own.issubset(members) else None


# -- products -------------------------------------------------------------------------------------


def build(b: Builder, nodes: tuple[Tensor, ...], positions: Sequence[int]) -> bool:
    """Append the launches of a group's members; returns False, and appends nothing, if memory overlaps, or for other
    layouts."""
    members = Members(b, nodes)
    where = dict(zip(nodes, positions, strict=True))
    products = [node for node in nodes if node.op == "MUL_MAT"]
    if len(products) > MOST_PRODUCTS or not all(map(_is_projection, products)):
        return False
    x = b.region(products[0].src[1])
    if any(b.region(p.src[1]) != x for p in products):
        return False
    results: dict[Tensor, Tensor] = {}
    for p in products:
        biased = members.only_reader(p)
        results[p] = biased if biased is not None and _is_bias(members, biased, p) else p
    others = [node for node in nodes if node not in products and node not in results.values()]
    if not _may_come_first(b, members, results, others):
        return False
    kinds: dict[tuple[Type, bool, int], list[Tensor]] = {}
    for p in products:
        a = p.src[0]
        kinds.setdefault((a.type, is_packed(a), a.nb[0]), []).append(p)
    for alike in kinds.values():
        b.reset()
        together(b, [(p, results[p], None if results[p] is p else results[p].src[1]) for p in alike])
    _rest(b, members, others, where)
    return True


def _may_come_first(b: Builder, members: Members, results: dict[Tensor, Tensor], others: Sequence[Tensor]) -> bool:
    """Whether the memory that the members use allows computing all products at once, before the other members.
    `results`: {product: the node, itself or the sum with its bias, that is written}."""
    read = [t for p, result in results.items() for t in (*p.src[:2], *([] if result is p else result.src[1:]))]
    for result in results.values():
        before = [node for node in others if members.number[node] < members.number[result]]
        touched = [t for node in before for t in (node, *node.src) if t is not None]
        rest = [other for other in results.values() if other is not result]
        if not apart(b, result, (*read, *rest, *touched)) or not all(apart(b, node, read) for node in before):
            return False
    return True


def _is_bias(members: Members, node: Tensor, product: Tensor) -> bool:
    """Whether a node adds a row, a bias, to each column of a product."""
    if node.op != "ADD" or members.producer(node, 0) is not product or node.type != Type.F32:
        return False
    bias = node.src[1]
    return (bias.type == Type.F32 and bias.ne == (node.ne[0], 1, 1, 1) and bias.nb[0] == 4 and node.is_contiguous
            and node.ne == product.ne)


# -- norms, ropes, writes -------------------------------------------------------------------------


class Heads(NamedTuple):
    """What is done with the heads of `source`: a norm (with `factor`), a rope, a write to a cache; None: not done.
    `members`: the nodes that do it, in order."""

    source: Tensor
    norm: Tensor | None
    factor: Tensor | None
    rope: Tensor | None
    write: Tensor | None
    members: tuple[Tensor, ...]

    @property
    def result(self) -> Tensor:
        return self.members[-1]


def _rest(b: Builder, members: Members, others: Sequence[Tensor], where: dict[Tensor, int]) -> None:
    all_heads = list(_find_heads(members, others))
    in_heads = {node for heads in all_heads for node in heads.members}
    single = [node for node in others if node not in in_heads]
    after = [node for node in single if members.reads(node, in_heads)]
    before = [node for node in single if node not in after]
    if len(all_heads) > 1 and _are_one(b, members, all_heads, before, after):
        for node in before:
            _one(b, node, where)
        _emit(b, all_heads, where)
        for node in after:
            _one(b, node, where)
        return
    ends = {heads.result: heads for heads in all_heads}
    for node in others:
        if node in ends:
            _alone(b, ends[node], where)
        elif node not in in_heads:
            _one(b, node, where)


def _one(b: Builder, node: Tensor, where: dict[Tensor, int]) -> None:
    b.begin(where[node], node, OPS[node.op].inplace)
    OPS[node.op].build(b, node)


def _alone(b: Builder, heads: Heads, where: dict[Tensor, int]) -> None:
    """Append launches for the members of `heads`: norm and factor in one kernel, rope and write in one, where memory
    allows; else one by one."""
    rest = list(heads.members)
    if heads.norm is not None and heads.factor is not None:
        norm, mul = rest[:2]
        if apart(b, mul, (heads.factor,)) and b.region(norm.src[0]).address != b.region(mul).address:
            b.begin(where[mul], mul)
            b.written(norm)
            emit_norm(b, norm, mul, b.region(norm.src[0]), scale=b.region(heads.factor))
            rest = rest[2:]
    if heads.rope is not None and heads.write is not None and apart(
            b, heads.write, (*(t for t in heads.rope.src if t is not None), heads.write.src[1])):
        for node in rest[:-2]:
            _one(b, node, where)
        b.begin(where[heads.write], heads.write)
        b.written(heads.rope)
        emit_rope_set_rows(b, heads.rope, heads.write)
        return
    for node in rest:
        _one(b, node, where)


def _find_heads(members: Members, others: Sequence[Tensor]) -> Iterator[Heads]:
    """The ropes among `others`, each with the norm before it and the cache write after it where there are any, then the
    cache writes without a rope."""
    taken: set[Tensor] = set()
    for rope in others:
        if rope.op != "ROPE" or not _is_simple(rope):
            continue
        mul = members.producer(rope, 0)
        norm = members.producer(mul, 0) if mul is not None and mul.op == "MUL" else None
        source, factor = rope.src[0], None
        before: tuple[Tensor, ...] = ()
        if (mul is not None and norm is not None and norm.op == "RMS_NORM" and members.only_reader(mul) is rope
                and members.only_reader(norm) is mul and norm.ne[0] == rope.ne[0] and mul.src[1].type == Type.F32
                and mul.ne == rope.ne and mul.src[1].ne == (rope.ne[0], 1, 1, 1) and mul.src[1].nb[0] == 4
                and norm.src[0].type == Type.F32 and norm.ne == norm.src[0].ne == rope.ne):
            source, before, factor = norm.src[0], (norm, mul), mul.src[1]
        else:
            norm = None
        write = members.only_reader(rope)
        if write is None or not _is_write(write, rope) or members.producer(write, 0) is not rope:
            write = None
        found = (*before, rope, *([write] if write is not None else []))
        taken.update(found)
        yield Heads(source, norm, factor, rope, write, found)
    for write in others:
        if write not in taken and write.op == "SET_ROWS" and _is_write(write, None):
            yield Heads(write.src[0], None, None, None, write, (write,))


def _is_simple(rope: Tensor) -> bool:
    return (rope.type == rope.src[0].type == Type.F32 and rope.ne[3] == 1 and rope.n_elements > 0
            and int_param(rope, 1) <= 2 * PAIRS and rope.is_contiguous and rope.ne[0] < 1 << 20
            and rope.ne[1] < MAX_GRID // 4)


def _is_write(write: Tensor, rope: Tensor | None) -> bool:
    """Whether a node writes whole rows of floats, one for each id; with `rope`, rows that the rope's heads fill."""
    if write.op != "SET_ROWS" or write.type not in FLOATS:
        return False
    rows, ids = write.src[:2]
    return (rows.ne[2:] == (1, 1) and ids.ne == (rows.ne[1], 1, 1, 1) and rows.type == Type.F32 and rows.ne[0] > 1
            and rows.n_elements > 0
            and (rope is None or rows.is_contiguous and rows.ne[:2] == (rope.ne[0] * rope.ne[1], rope.ne[2])))


def _are_one(b: Builder, members: Members, all_heads: Sequence[Heads], before: Sequence[Tensor],
             after: Sequence[Tensor]) -> bool:
    """Whether one launch may compute all heads: all ropes have equal angles, and no result lies where other heads are
    read or written.  `before`, `after`: members that are computed before and after that launch."""
    ropes = [heads.rope for heads in all_heads if heads.rope is not None]
    if not ropes or len(all_heads) > 3 or any(members.reads(node, after) for heads in all_heads
                                              for node in heads.members):
        return False
    one = ropes[0]
    for rope in ropes[1:]:
        if (rope.op_params != one.op_params or rope.ne[0] != one.ne[0] or rope.ne[2] != one.ne[2]
                or b.region(rope.src[1]) != b.region(one.src[1])
                or [b.region(t) for t in rope.src[2:] if t is not None]
                != [b.region(t) for t in one.src[2:] if t is not None]):
            return False
    for heads in all_heads:
        mine = [t for t in (heads.factor, *(() if heads.rope is None else heads.rope.src[1:]),
                            *(() if heads.write is None else heads.write.src[1:2])) if t is not None]
        theirs = [t for other in all_heads if other is not heads for t in (other.source, other.result)]
        if not apart(b, heads.result, (*mine, *theirs)):
            return False
        # A result may overwrite its own source, if each head of the result lies where it lay in the source.
        same = heads.write is None and (heads.result.ne, heads.result.nb) == (heads.source.ne, heads.source.nb) and (
            b.region(heads.result).address == b.region(heads.source).address)
        if not same and not apart(b, heads.result, (heads.source,)):
            return False
    shifted = [(node, [m for heads in all_heads for m in heads.members if members.number[m] < members.number[node]])
               for node in before]
    shifted += [(node, [m for heads in all_heads for m in heads.members if members.number[m] > members.number[node]])
                for node in after]
    if not all(members.may_move(node, over) for node, over in shifted):
        return False
    # All heads are computed at the position of the last: no member in between may write what an earlier one reads.
    return all(members.may_move(m, [n for other in all_heads if other is not heads for n in other.members
                                    if members.number[n] > members.number[m]])
               for heads in all_heads for m in heads.members)


def _emit(b: Builder, all_heads: Sequence[Heads], where: dict[Tensor, int]) -> None:
    """Append the launch of all heads."""
    rope = next(heads.rope for heads in all_heads if heads.rope is not None)
    last = max((heads.result for heads in all_heads), key=lambda t: where[t])
    b.begin(where[last], last)
    for heads in all_heads:
        for node in heads.members:
            b.written(node)
    width, tokens, half = rope.ne[0], rope.ne[2], int_param(rope, 1) // 2
    parts, n_heads, slots = [], 0, 1
    for heads in all_heads:
        part = _heads_struct(b, heads, width, where)
        parts.append(part)
        n_heads += int(part["heads"][0])
        slots = max(slots, int(part["a"]["ne"][0][0]) - int(part["half"][0]))
    parts += [struct(HEADS)] * (3 - len(parts))
    angles, factors = Angles(rope), optional(rope, 2)
    per_position = np.pad(angles.per_position[:half], (0, PAIRS - half))
    turn_of = struct(TURNS, positions=_view(b.region(rope.src[1])), neox=int_param(rope, 2) == 2,
                     factors=_view(b.region(rope if factors is None else factors)),
                     has_factors=factors is not None, magnitude=angles.magnitude, per_position=per_position)
    b.launch("rope.turn_heads", (min(tokens, MAX_BLOCKS), n_heads), (min(1024, -(-slots // 32) * 32),), *parts, turn_of,
             b.error)


def _view(region: Region) -> np.ndarray:
    return region.bound(0)


def _heads_struct(b: Builder, heads: Heads, width: int, where: dict[Tensor, int]) -> np.ndarray:
    """The `struct Heads` of `heads`; without a rope, rows are divided into heads of `width` elements if possible."""
    a, d = b.region(heads.source), b.region(heads.result)
    if heads.rope is None:
        row = heads.source.ne[0]
        width = width if row % width == 0 else row
        a = a.shaped((width, row // width, heads.source.ne[1], 1), (a.nb[0], a.nb[0] * width, a.nb[1], a.nb[2]))
    part = struct(HEADS, a=_view(a), d=_view(d), heads=a.ne[1], kind=heads.result.type,
                  half=0 if heads.rope is None else int_param(heads.rope, 1) // 2, written=heads.write is not None)
    part["ids"] = _view(d)
    if heads.write is not None:
        ids = heads.write.src[1]
        part["ids"], part["wide"] = _view(b.region(ids)), ids.type == Type.I64
        part["position"] = where[heads.write]
    if heads.norm is not None and heads.factor is not None:
        part["factor"], part["eps"] = b.region(heads.factor).address, float_param(heads.norm, 0)
    return part
