"""Experts: from the router's scores to ids and weights in one launch, and the weighted sum of the results in another.

    soft_max argsort get_rows [sum_rows clamp div]      choose_experts of sort.cu
    mul add ...                                         weighted_sum of experts.cu
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cupy.launch import Builder
from ggml_sched.backends.cupy.ops.groups import Group, Wiring
from ggml_sched.backends.cupy.ops.registry import OPS, float_param, int_param, optional
from ggml_sched.backends.cupy.ops.sort import KEY
from ggml_sched.backends.cupy.ops.wiring import apart
from ggml_sched.backends.cupy.regions import Region

__all__ = ["GROUPS", "build_sum", "is_sum", "merged"]

MOST_EXPERTS = 1024
"""The most experts from which tokens choose: a block has their keys and probabilities in shared memory."""
MOST_USED = 32
"""The most experts that a token chooses: one warp adds their weights, in the order of SUM_ROWS."""
MOST_ADDED = 32
"""The most experts' results that a weighted sum adds."""


def _named(*ops: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset({op}) for op in ops)


# -- choosing -------------------------------------------------------------------------------------


def _choosing(normalised: bool) -> Group:
    def fits(scores: Tensor, order: Tensor, weights: Tensor, last: Tensor) -> bool:
        """Whether one kernel can compute these nodes and those between, by their types and layouts."""
        (n, tokens), used = scores.ne[:2], weights.ne[1]
        return (scores.ne[2:] == (1, 1) and n <= MOST_EXPERTS and 0 < used <= min(n, MOST_USED)
                and scores.n_elements > 0 and order.ne == scores.ne and order.is_contiguous
                and weights.ne == (1, used, tokens, 1) and weights.is_contiguous
                and last.type == Type.F32 and last.is_contiguous
                and (last.ne == (used, tokens, 1, 1) if normalised else last is weights))

    def find(last: Tensor, wiring: Wiring) -> tuple[Tensor, ...] | None:
        members: tuple[Tensor, ...] = ()
        weights: Tensor | None = last
        if normalised:
            clamp = wiring.inner(last.src[1], ("CLAMP",))
            total = None if clamp is None else wiring.inner(clamp.src[0], ("SUM_ROWS",))
            if clamp is None or total is None or total.src[0] is not last.src[0]:
                return None
            members = (total, clamp, last)
            weights = last.src[0]
            if weights.op == "RESHAPE" and wiring.readers[weights] == 2 and wiring.readers[weights.src[0]] == 1:
                weights = weights.src[0]
            if "output" in weights.flags or weights.op != "GET_ROWS" or weights not in wiring.position:
                return None
        assert weights is not None
        table, ids = weights.src[:2]
        order = ids.src[0] if ids.op == "VIEW" and ids.view_offs == 0 else None
        if order is None or order.op != "ARGSORT" or order not in wiring.position or order.view_src is not None:
            return None
        scores = order.src[0]
        if (scores.op != "SOFT_MAX" or scores not in wiring.position or "output" in scores.flags
                or table.op != "RESHAPE" or table.src[0] is not scores or wiring.readers[table] != 1
                or wiring.readers[scores] != 2):
            return None
        n, tokens = scores.ne[:2]
        found = (fits(scores, order, weights, last)
                 and optional(scores, 1) is None and optional(scores, 2) is None
                 and float_param(scores, 1) == 0 and int_param(order, 0) == 1
                 and table.ne == (1, n, tokens, 1) and ids.ne == (ids.ne[0], tokens, 1, 1) and ids.nb[1] == order.nb[1]
                 and weights.ne[1] == ids.ne[0] and (not normalised or last.view_src is None)
                 and all(OPS[node.op].fits(node) for node in (scores, order, weights)))
        return (scores, order, weights, *members) if found else None

    def build(b: Builder, nodes: tuple[Tensor, ...]) -> bool:
        scores, order, weights, last = *nodes[:3], nodes[-1]
        # Only the order and the last result are written to memory.
        if any(b.is_needed(node) for node in nodes if node is not order and node is not last):
            return False
        if not fits(scores, order, weights, last):
            return False
        if not apart(b, last, (scores.src[0], order)) or not apart(b, order, (scores.src[0],)):
            return False
        n, tokens, used = scores.ne[0], scores.ne[1], weights.ne[1]
        padded = 1 << max(0, n - 1).bit_length()
        to = b.region(last)
        clamp = nodes[4] if normalised else None
        b.rows("sort.choose_experts", tokens, n, b.region(scores.src[0]), b.region(order),
               Region(to.address, (used, tokens, 1, 1), (4, 4 * used, 4 * used * tokens, 4 * used * tokens)),
               np.int64(tokens), np.int32(padded), float_param(scores, 0), np.int32(normalised),
               np.float32(0) if clamp is None else float_param(clamp, 0),
               np.float32(0) if clamp is None else float_param(clamp, 1), shared=KEY * padded + 4 * n)
        return True

    return Group(_named("SOFT_MAX", "ARGSORT", "GET_ROWS", *(("SUM_ROWS", "CLAMP", "DIV") if normalised else ())),
                 find, build)


GROUPS: list[Group] = [_choosing(True), _choosing(False)]


# -- adding ---------------------------------------------------------------------------------------


def is_sum(nodes: Sequence[Tensor]) -> bool:
    """Whether these nodes, the members of a fusion group, are a weighted sum of experts' results."""
    return len(nodes) > 1 and nodes[0].op == "MUL" and all(node.op == "ADD" for node in nodes[1:])


def merged(wiring: Wiring, found: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The groups `found` in a graph, and the weighted sums that share no node with them."""
    taken, sums = {i for group in found for i in group}, []
    for node in wiring.nodes:
        members = _weighted_sum(node, wiring) if node.op == "ADD" else None
        if members is not None:
            positions = tuple(wiring.position[member] for member in members)
            if taken.isdisjoint(positions):
                sums.append(positions)
                taken.update(positions)
    return sorted([*found, *sums])


def _weighted_sum(last: Tensor, wiring: Wiring) -> tuple[Tensor, ...] | None:
    """The nodes of the weighted sum that ends in the ADD `last`: a MUL of the experts' results by their weights, and
    the ADDs of its views, one view for each expert.  None if there is no such sum, or if other nodes read the product
    or a view."""
    sums, views = [last], [last.src[1]]
    while (inner := wiring.inner(sums[0].src[0], ("ADD",))) is not None and len(sums) < MOST_ADDED:
        sums.insert(0, inner)
        views.insert(0, inner.src[1])
    views.insert(0, sums[0].src[0])
    product = views[0].src[0] if views[0].op == "VIEW" else None
    if (product is None or product.op != "MUL" or product not in wiring.position or "output" in product.flags
            or product.view_src is not None or wiring.readers[product] != len(views)):
        return None
    n, used, tokens, _ = product.ne
    same = all(
        view.op == "VIEW" and view.src[0] is product and wiring.readers[view] == 1 and "output" not in view.flags
        and view.ne == (n, tokens, 1, 1) and view.nb[0] == 4 and view.nb[1] == product.nb[2]
        and view.view_offs == i * product.nb[1] for i, view in enumerate(views))
    found = (same and len(views) == used and last.n_elements > 0 and _sum_fits(product, sums)
             and all(t.view_src is None for t in sums))
    return (product, *sums) if found else None


def _sum_fits(product: Tensor, sums: Sequence[Tensor]) -> bool:
    """Whether one kernel can compute a product and its sums over axis 1, by their types and layouts."""
    n, used, tokens, batch = product.ne
    return (batch == 1 and product.ne == product.src[0].ne and product.src[1].ne == (1, used, tokens, 1)
            and all(t.type == Type.F32 for t in (*sums, product, *product.src[:2]))
            and all(t.ne == (n, tokens, 1, 1) for t in sums))


def build_sum(b: Builder, nodes: tuple[Tensor, ...]) -> bool:
    """Append the launch of a weighted sum; returns False, and appends nothing, if memory overlaps, or for other
    layouts."""
    product, last = nodes[0], nodes[-1]
    x, w = product.src[:2]
    if any(b.is_needed(node) for node in nodes[:-1]) or not _sum_fits(product, nodes[1:]) or not apart(b, last, (x, w)):
        return False
    b.flat("experts.weighted_sum", last.n_elements, b.region(x), b.region(w), b.region(last),
           np.int64(last.n_elements))
    return True
