"""Two memory maps of one graph, ggml's and ours, as an SVG file: the tensors in the arena, node by node.

    python bench/picture.py > docs/memory.svg

Needs the peer (python bench/peer/build.py).  A block is the memory of one tensor, or of a chain of in-place results,
from its first node to its last.  Both maps are to scale: ours shows the plan's offsets and lifetimes, ggml's shows the
addresses that it gave, with lifetimes from the node order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import peer
import samples

import ggml_sched as gs

GRAPH = "gpt2-124m-prefill512"
SUBJECT = "GPT-2 124M evaluates 512 tokens on one backend: its 12 layers from left to right, addresses upwards"
UNREAD = "an input that no node reads"
KINDS = {"inputs": "#9a8fc0", UNREAD: "#d3cce8", "residual stream, norms": "#5fa777", "attention": "#4c78a8",
         "feed-forward": "#e8963a"}

WIDTH, HEIGHT = 1000, 480
LEFT, PANEL, GAP, TOP, BASE = 62, 440, 34, 114, 424
"""Layout of the panels in pixels: left edge, width, gap, top and bottom."""
INK, PALE, PAPER, LINES, LIMIT = "#24292f", "#57606a", "#fcfcfd", "#e1e5ea", "#cf222e"


class Block(NamedTuple):
    """Bytes [offset, offset + size) that are allocated during the nodes [birth, death)."""

    birth: int
    death: int
    offset: int
    size: int
    kind: str


class Map(NamedTuple):
    """An arena over the nodes of a graph."""

    owner: str
    arena: int
    blocks: list[Block]

    @property
    def live(self) -> int:
        """Live bytes: the largest sum of bytes that are alive at once, without unread tensors."""
        used = [b for b in self.blocks if b.kind != UNREAD]
        return max(sum(b.size for b in used if b.birth <= t < b.death) for t in {b.birth for b in used})


def kind_of(t: gs.Tensor) -> str:
    """The part of a model that a tensor belongs to, by the name that llama.cpp gives it."""
    if t.op == "NONE":
        return "inputs"
    if t.name.startswith(("wqkv", "Qcur", "Kcur", "Vcur", "kq")):
        return "attention"
    return "feed-forward" if t.name.startswith(("ffn_up", "ffn_gate")) else "residual stream, norms"


def ours() -> Map:
    """The map of our plan."""
    graph, backends = samples.configured(GRAPH, "c1")
    with gs.Scheduler(backends) as scheduler:
        plan = scheduler.plan(graph)
    plan.verify()
    data, blocks = plan.data, []
    for i, t in enumerate(graph.tensors):
        life = data.lifetime(i)
        if life is not None and data.memory_index(i) == 0 and data.root(i) < 0:
            last = min(life[1], len(graph) - 1)
            blocks.append(Block(life[0], last + 1, data.offset(i), data.size(i), kind_of(t)))
    return Map("ggml-sched", plan.buffer_sizes[0], blocks)


def theirs() -> Map:
    """The map of ggml's plan, made in this process."""
    graph, backends = samples.configured(GRAPH, "c1")
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
        block = Block(birth, deaths.get(t, len(graph) - 1) + 1, offset, size * samples.ALIGNMENT,
                      kind_of(t) if t in deaths else UNREAD)
        before = latest.get(offset)
        if before is not None and before.death == birth + 1:    # in place: this node is the last reader
            blocks.remove(before)
            block = before._replace(death=block.death)
        latest[offset] = block
        blocks.append(block)
    return Map(f"ggml {peer.version()}", arena, blocks)


def last_uses(graph: gs.Graph) -> dict[gs.Tensor, int]:
    """For each tensor with memory, the last node that reads or writes it; the graph's end for results that a caller may
    read."""
    deaths: dict[gs.Tensor, int] = {}
    read = {s for t in graph.nodes for s in t.src}
    for i, t in enumerate(graph.nodes):
        deaths |= {s.view_src or s: i for s in (t, *t.src) if s is not None}
    return deaths | {t.view_src or t: len(graph) - 1 for t in graph.nodes if "output" in t.flags or t not in read}


# -- drawing ---------------------------------------------------------------------------------------


def drawing(left: Map, right: Map) -> str:
    """The page: both maps at one scale, and a line at the most bytes that are alive at once."""
    time, top = clock(), max(left.arena, right.arena)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" fill="{INK}">',
        f"<title>{left.owner} takes {left.arena:,} bytes, {right.owner} {right.arena:,}</title>",
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="{PAPER}" stroke="#d0d7de"/>',
        text(LEFT, 32, SUBJECT, PALE),
        *scale(top),
        *panel(left, LEFT, time, top),
        *panel(right, LEFT + PANEL + GAP, time, top),
        *limit(right.live, top),
        *legend(),
        "</svg>\n",
    ])


def clock() -> list[int]:
    """For each node, and for the end, the number of computing nodes before it: views take no time."""
    graph, _ = samples.configured(GRAPH, "c1")
    return list(accumulate((t.computes for t in graph.nodes), initial=0))


def height(nbytes: int, top: int) -> float:
    return BASE - (BASE - TOP) * nbytes / top


def text(x: float, y: float, words: str, colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}"{more}>{words}</text>'


def scale(top: int) -> Iterator[str]:
    for mib in range(0, top >> 20, 10):
        y = height(mib << 20, top)
        yield f'<path d="M{LEFT - 4} {y:.1f}H{LEFT + 2 * PANEL + GAP}" stroke="{LINES}"/>'
        yield text(LEFT - 9, y + 4, f"{mib} MiB" if mib else "0", PALE, ' text-anchor="end" font-size="12"')


def panel(of: Map, x: int, time: list[int], top: int) -> Iterator[str]:
    """The arena as a grey rectangle, its blocks, and its title."""
    y, step = height(of.arena, top), PANEL / time[-1]
    big = ' font-size="15"'
    yield text(x, 70, of.owner, more=' font-size="20" font-weight="600"')
    above = of.arena / of.live - 1
    yield text(x, 93, f"{of.arena:,} bytes, {f'{above:.1%} above the line' if above else 'on the line'}", more=big)
    yield f'<rect x="{x}" y="{y:.1f}" width="{PANEL}" height="{BASE - y:.1f}" fill="{PALE}" fill-opacity=".09"/>'
    for kind, colour in KINDS.items():
        outlines = []
        for b in sorted(b for b in of.blocks if b.kind == kind):
            wide = max((time[b.death] - time[b.birth]) * step, 0.8)
            high = max(b.size / top * (BASE - TOP), 0.5)
            outlines.append(f"M{x + time[b.birth] * step:.1f} {height(b.offset, top):.1f}"
                            f"h{wide:.1f}v-{high:.1f}h-{wide:.1f}z")
        if outlines:
            yield f'<path fill="{colour}" stroke="{PAPER}" stroke-width=".5" d="{"".join(outlines)}"/>'
    yield f'<path d="M{x} {y:.1f}H{x + PANEL}" stroke="{INK}" stroke-width="2"/>'


def limit(live: int, top: int) -> Iterator[str]:
    y, end = height(live, top), LEFT + 2 * PANEL + GAP
    yield f'<path d="M{LEFT} {y:.1f}H{end}" stroke="{LIMIT}" stroke-width="2" stroke-dasharray="7 4"/>'
    yield text(end, y - 10, f"most bytes alive at once: {live:,}", LIMIT, ' text-anchor="end"')


def legend() -> Iterator[str]:
    x = LEFT
    for kind, colour in KINDS.items():
        yield f'<rect x="{x}" y="{BASE + 24}" width="13" height="13" rx="2" fill="{colour}"/>'
        yield text(x + 19, BASE + 35, kind)
        x += 44 + round(6.9 * len(kind))


def main() -> None:
    if not peer.available():
        sys.exit("no peer: run python bench/peer/build.py, to draw what ggml does")
    print(drawing(theirs(), ours()), end="")


if __name__ == "__main__":
    main()
