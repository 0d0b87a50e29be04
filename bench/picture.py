"""Two memory maps of one graph, ggml's and ours, as an SVG file: the tensors in the arena, node by node.

    python bench/picture.py > docs/memory.svg

Needs the peer (python bench/peer/build.py).  A block is the memory of one tensor, or of a chain of in-place results,
from its first node to its last.  Both maps are to scale, drawn as `Plan.to_svg` draws two plans: ours shows the plan's
offsets and lifetimes, ggml's shows the addresses that it gave, with lifetimes from the node order.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import peer
import samples

import ggml_sched as gs
from ggml_sched.view.drawing import Column, column_of, draw
from ggml_sched.view.memory import MemoryMap
from ggml_sched.view.roles import roles_of

GRAPH = "gpt2-124m-prefill512"
SUBJECT = "GPT-2 124M evaluates 512 tokens on one backend: its 12 layers from left to right, addresses upwards"


class Block(NamedTuple):
    """Bytes [offset, offset + size) that are allocated during the nodes [birth, death) for tensor `owner`."""

    birth: int
    death: int
    offset: int
    size: int
    owner: gs.Tensor


def our_plan() -> gs.Plan:
    graph, backends = samples.configured(GRAPH, "c1")
    with gs.Scheduler(backends) as scheduler:
        plan = scheduler.plan(graph)
    plan.verify()
    return plan


def ours(plan: gs.Plan) -> Column:
    """What is drawn of our plan."""
    return titled(column_of(plan), "ggml-sched")


def theirs(plan: gs.Plan) -> Column:
    """What is drawn of ggml's plan, made in this process, beside ours."""
    graph, backends = samples.configured(GRAPH, "c1")
    found, arena, read = blocks_of(graph, backends)
    role = dict(zip(graph.tensors, roles_of(graph), strict=True))
    time = [*accumulate((t.computes for t in graph.nodes), initial=0)]
    alive = [b for b in found if b.owner in read]
    live = max(sum(b.size for b in alive if b.birth <= t < b.death) for t in {b.birth for b in alive})
    owner = [graph.id_of(b.owner) for b in found]
    rows = [(i, time[b.birth], max(time[b.death], time[b.birth] + 1), b.offset, b.offset + b.size, role[b.owner])
            for i, b in zip(owner, found, strict=True)]
    names = [b.owner.name if b.owner in read else f"{b.owner.name}, which no node reads" for b in found]
    of = MemoryMap("CPU", arena, live, *np.array(rows, np.int64).T)
    return titled(replace(column_of(plan), maps=(of,), names=[names]), f"ggml {peer.version()}")


def titled(column: Column, owner: str) -> Column:
    (of,) = column.maps
    above = of.arena / of.live - 1
    where = f"{above:.1%} above the most that are alive at once" if above else "the most that are alive at once"
    return replace(column, title=owner, subtitle=f"{of.arena:,} bytes, {where}")


def blocks_of(graph: gs.Graph, backends: tuple) -> tuple[list[Block], int, set[gs.Tensor]]:
    """ggml's blocks, the bytes of its arena, and the tensors that some node reads or writes."""
    position = {t: i for i, t in enumerate(graph.nodes)}
    own = [t for t in graph.tensors if t.view_src is None and not t.is_resident]
    own.sort(key=lambda t: position.get(t, -1))
    deaths = last_uses(graph)
    with peer.Peer(graph, backends) as other:
        other.alloc()
        address = {t: other.address(t) for t in own}
        arena = other.buffer_sizes[0]
    start = min(address.values())
    blocks: list[Block] = []
    latest: dict[int, Block] = {}
    for t in own:
        birth, offset, size = position.get(t, 0), address[t] - start, -(-t.nbytes // samples.ALIGNMENT)
        block = Block(birth, deaths.get(t, len(graph) - 1) + 1, offset, size * samples.ALIGNMENT, t)
        before = latest.get(offset)
        if before is not None and before.death == birth + 1:    # in place: this node is the last reader
            blocks.remove(before)
            block = before._replace(death=block.death)
        latest[offset] = block
        blocks.append(block)
    return blocks, arena, set(deaths)


def last_uses(graph: gs.Graph) -> dict[gs.Tensor, int]:
    """For each tensor with memory, the last node that reads or writes it; the graph's end for results that a caller may
    read."""
    deaths: dict[gs.Tensor, int] = {}
    read = {s for t in graph.nodes for s in t.src}
    for i, t in enumerate(graph.nodes):
        deaths |= {s.view_src or s: i for s in (t, *t.src) if s is not None}
    return deaths | {t.view_src or t: len(graph) - 1 for t in graph.nodes if "output" in t.flags or t not in read}


def drawing(left: Column, right: Column) -> str:
    """The file: both maps at one scale, and a line at the most bytes that are alive at once."""
    (theirs,), (ours,) = left.maps, right.maps
    title = f"{left.title} takes {theirs.arena:,} bytes, {right.title} {ours.arena:,}"
    return draw([left, right], title, SUBJECT)


def main() -> None:
    if not peer.available():
        sys.exit("no peer: run python bench/peer/build.py, to draw what ggml does")
    plan = our_plan()
    print(drawing(theirs(plan), ours(plan)), end="")


if __name__ == "__main__":
    main()
