"""Draw the pictures of the documentation from a plan: which backend computes what, lifetimes, the steps of a compute.

    python tools/pictures.py        # writes docs/pictures/*.svg

All show the plan of one small network (`network`).  Positions, offsets, bytes, splits, copies and waits are the plan's;
tests/package/test_site.py compares the files with what this program draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import ggml_sched as gs
from ggml_sched.planning.program import Load, Run

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WIDTH = 860
INK, PALE, PAPER, LINES, LIMIT = "#24292f", "#57606a", "#fcfcfd", "#d0d7de", "#cf222e"
COLOURS = {"GPU": "#a9cbe8", "CPU": "#f6cf9b"}
BLOCKS = ("#cfc6ea", "#b5dcc0", "#a9cbe8", "#f6cf9b", "#efbcd5", "#bcdedb")


def network() -> tuple[gs.Graph, list[gs.Backend]]:
    """A feed-forward block of 32 tokens: the embedding lies on the CPU, the other weights on the GPU."""
    gpu, cpu = gs.DryBackend("GPU"), gs.DryBackend("CPU")
    on_gpu, on_cpu = gs.Context(), gs.Context()
    embedding = on_cpu.tensor("f16", (256, 1000), "embedding")
    up, gate = on_gpu.tensor("f16", (256, 512), "w_up"), on_gpu.tensor("f16", (256, 512), "w_gate")
    down = on_gpu.tensor("f16", (512, 256), "w_down")
    cpu.alloc_tensors(on_cpu)
    gpu.alloc_tensors(on_gpu)
    ctx = gs.Context()
    tokens = ctx.tensor("i32", 32, "tokens", input=True)
    x = ctx.set_name(ctx.get_rows(embedding, tokens), "x")
    normed = ctx.set_name(ctx.rms_norm(x, 1e-5), "normed")
    gated = ctx.set_name(ctx.silu(ctx.set_name(ctx.mul_mat(gate, normed), "gate")), "silu")
    hidden = ctx.set_name(ctx.mul(gated, ctx.set_name(ctx.mul_mat(up, normed), "up")), "hidden")
    y = ctx.set_name(ctx.add(ctx.set_name(ctx.mul_mat(down, hidden), "down"), x), "y")
    return gs.Graph(ctx.set_output(y)), [gpu, cpu]


def make_plan() -> gs.Plan:
    graph, backends = network()
    with gs.Scheduler(backends) as scheduler:
        plan = scheduler.plan(graph)
    plan.verify()
    return plan


# -- drawing -------------------------------------------------------------------------------------------


def document(height: int, title: str, parts: list[str]) -> str:
    """An SVG file."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-size="13" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f"<title>{escape(title)}</title>",
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{LINES}"/>',
        f'<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{PALE}"/></marker></defs>',
        *parts,
        "</svg>\n",
    ])


def text(x: float, y: float, words: str, colour: str = INK, anchor: str = "start", size: int = 13) -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'


def box(x: float, y: float, wide: float, high: float, colour: str, *lines: str, dashed: bool = False) -> str:
    """A rectangle with lines of text in its middle."""
    style = f'rx="4" fill="{colour}" stroke="{PALE}"' + (' stroke-dasharray="4 3"' if dashed else "")
    first = y + high / 2 + 4.5 - 8 * (len(lines) - 1)
    words = [text(x + wide / 2, first + 16 * i, line, anchor="middle", size=12 if i else 13)
             for i, line in enumerate(lines)]
    return "\n".join([f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" {style}/>', *words])


def arrow(x0: float, y0: float, x1: float, y1: float, dashed: bool = False) -> str:
    """A curve from one point to another with a head at its end."""
    style = ' stroke-dasharray="5 4"' if dashed else ""
    bend = (y1 - y0) / 2 if abs(y1 - y0) > abs(x1 - x0) / 2 else 0
    middle = (f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} " if bend else "L")
    return (f'<path d="M{x0:.1f} {y0:.1f}{middle}{x1:.1f} {y1:.1f}" fill="none" stroke="{PALE}" stroke-width="1.4"'
            f'{style} marker-end="url(#end)"/>')


# -- the pictures --------------------------------------------------------------------------------------


def placement(plan: gs.Plan) -> str:
    """Backends as lanes, nodes from left to right in the order of execution, copies as dashed arrows between lanes."""
    graph, left, wide = plan.graph, 150, (WIDTH - 170) / len(plan.graph)
    lanes = {backend: 80 + 110 * i for i, backend in enumerate(plan.backends)}
    parts = [text(20, 32, "Each node is computed by one backend; a copy brings what another backend made.", PALE)]
    for split_number, split in enumerate(plan.splits):
        x = left + wide * split.start - 4
        parts.append(f'<rect x="{x:.1f}" y="{lanes[split.backend] - 26}" width="{wide * len(split) - 2:.1f}" '
                     f'height="82" rx="6" fill="none" stroke="{LINES}" stroke-width="1.5"/>')
        parts.append(text(x + 6, lanes[split.backend] - 11, f"split {split_number}", PALE, size=12))
    for backend, y in lanes.items():
        parts.append(text(20, y + 18, backend.name, size=16))
        held = [t.name for t in graph.leafs if t.is_resident and t.backend is backend]
        parts.append(text(20, y + 38, ", ".join(held), PALE, size=12))
    for i, node in enumerate(graph.nodes):
        backend = plan.backend_of(node)
        parts.append(box(left + wide * i, lanes[backend], wide - 10, 44, COLOURS[backend.name], node.name,
                         node.op.removeprefix("UNARY:").lower()))
    for copy in plan.copies:
        made = graph.nodes.index(copy.tensor)
        first = plan.splits[copy.split].start
        down = lanes[copy.backend] > lanes[plan.backend_of(copy.tensor)]
        y0 = lanes[plan.backend_of(copy.tensor)] + (44 if down else 0)
        y1 = lanes[copy.backend] + (-26 if down else 56)
        x0, x1 = left + wide * made + wide / 2 - 5, left + wide * first + wide / 2 - 5
        parts.append(arrow(x0, y0, x1, y1, dashed=True))
        words = f"copy {copy.tensor.name}: {copy.nbytes:,} bytes"
        parts.append(text(x1 + 14, (y0 + y1) / 2 + 12, words, PALE, size=12))
    return document(280, "The nodes of a small network on two backends", parts)


def lifetimes(plan: gs.Plan) -> str:
    """The arena of the first backend: positions to the right, addresses upwards, a block for each memory."""
    data, names = plan.data, [plan.name_of(i) for i in plan.data.sequence]
    found: dict[int, list[int]] = {}
    """{owner of a memory: ids of the tensors that are computed in it, in order}."""
    for i in data.sequence:
        if data.memory_index(i) == 0:
            found.setdefault(data.root(i) if data.root(i) >= 0 else i, []).append(i)
    arena, live, n = plan.buffer_sizes[0], plan.live_bytes[0], len(names)
    every = sum(t.nbytes for t in plan.graph.nodes if plan.backend_of(t) is plan.backends[0])
    every += sum(copy.nbytes for copy in plan.copies if copy.backend is plan.backends[0])
    left, base, top, wide = 90, 320, 76, (WIDTH - 120) / n
    scale = (base - top) / arena
    parts = [text(20, 32, f"The arena of {plan.backends[0].name}: {arena:,} bytes, where a memory for each tensor "
                          f"would take {every:,}.", PALE)]
    parts.append(f'<rect x="{left}" y="{top}" width="{wide * n:.1f}" height="{base - top}" fill="{PALE}" '
                 f'fill-opacity=".08"/>')
    for number, (owner, members) in enumerate(found.items()):
        (birth, death), offset, size = data.lifetime(owner), data.offset(owner), data.size(owner)
        x, y = left + wide * birth, base - (offset + size) * scale
        parts.append(box(x + 1, y + 1, wide * (min(death, n - 1) + 1 - birth) - 2, size * scale - 2,
                         BLOCKS[number % len(BLOCKS)], " → ".join(plan.name_of(i) for i in members),
                         f"{size:,} at {offset:,}"))
    parts.append(f'<path d="M{left} {base - live * scale:.1f}H{left + wide * n:.1f}" stroke="{LIMIT}" stroke-width="2" '
                 f'stroke-dasharray="7 4"/>')
    parts.append(text(left + wide * n, base - live * scale - 8, f"live bytes: {live:,}", LIMIT, "end"))
    for i, name in enumerate(names):
        parts.append(text(left + wide * (i + 0.5), base + 20, str(i), PALE, "middle", 12))
        parts.append(text(left + wide * (i + 0.5), base + 37, name, INK, "middle", 12))
    parts.append(text(left - 10, base, "0", PALE, "end", 12))
    parts.append(text(left - 10, top + 12, f"{arena:,}", PALE, "end", 12))
    return document(375, "Lifetimes and offsets of the tensors of a small network", parts)


def program(plan: gs.Plan) -> str:
    """The steps of a compute, a lane for the queue of each backend, and the waits between the queues."""
    steps, left = plan.program.steps, 90
    wide = (WIDTH - 110) / len(steps)
    lanes = {b: 70 + 100 * b for b in range(len(plan.backends))}
    rule = "Steps of one backend run one after the other; an arrow is a wait for another backend's step."
    parts = [text(20, 32, rule, PALE)]
    for b, y in lanes.items():
        parts.append(text(20, y + 34, plan.backends[b].name, size=16))
        parts.append(f'<path d="M{left} {y + 30}H{WIDTH - 20}" stroke="{LINES}" stroke-width="1.5"/>')
    for k, step in enumerate(steps):
        what = (f"run {step.first} .. {step.last}" if isinstance(step, Run) and step.first < step.last else
                f"run {step.first}" if isinstance(step, Run) else f"{step.kind} {plan.name_of(step.tensor)}")
        colour = COLOURS[plan.backends[step.backend].name]
        parts.append(box(left + wide * k + 8, lanes[step.backend] + 6, wide - 16, 48, colour, f"{k}: {what}",
                         dashed=isinstance(step, Load)))
        for wait in step.waits:
            if not wait.back:
                x0, x1 = left + wide * (wait.step + 0.5), left + wide * (k + 0.5)
                upwards = lanes[step.backend] < lanes[steps[wait.step].backend]
                y0 = lanes[steps[wait.step].backend] + (6 if upwards else 54)
                parts.append(arrow(x0, y0, x1, lanes[step.backend] + (56 if upwards else 4)))
    return document(260, "The program of a small network", parts)


PICTURES: dict[str, Callable[[gs.Plan], str]] = {"placement": placement, "lifetimes": lifetimes, "program": program}


def drawings() -> Iterator[tuple[str, str]]:
    """(name of the file, its contents) of every picture."""
    plan = make_plan()
    for name, draw in PICTURES.items():
        yield f"{name}.svg", draw(plan)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, drawing in drawings():
        (FOLDER / name).write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
