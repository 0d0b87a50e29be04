"""The timeline of one token of a model larger than its memory as an SVG file: fetches beside computes.

    python tools/token_picture.py --record [FOLDER]     # measures a token, and writes tools/streamed_token.json
    python tools/token_picture.py                       # writes docs/pictures/token.svg from that file

The model is a Llama of four layers with random weights in f32, in a limit of half its weights; its file is written to
FOLDER, which must be on a real disk.  Of TOKENS tokens the fastest is recorded: when each step of its program ran, by
`scheduler.trace()`, and when each weight was read, by the store's listener.  Where a step waited for a weight, it
computes from the end of that fetch on.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pictures import BLOCKS, FOLDER, INK, LINES, PALE, WIDTH, document, text

__all__ = ["drawing", "recorded"]

RECORD, PICTURE = Path(__file__).resolve().parent / "streamed_token.json", FOLDER / "token.svg"
TOKENS = 40
LEFT, TOP, ROW = 86, 66, 30


def record(folder: str | None) -> dict[str, Any]:
    """The fastest of some tokens; times are milliseconds since its evaluation began."""
    import ggml_sched as gs
    from ggml_sched import llama
    from ggml_sched.planning.program import Fetch, Run

    data = llama.random_llama(1, n_vocab=2048, n_embd=1024, n_head=16, n_head_kv=4, n_ff=2816, n_layer=4, n_ctx=256,
                              extra={"tokenizer.ggml.model": "no_vocab"})
    best: dict[str, Any] = {"milliseconds": float("inf")}
    with tempfile.TemporaryDirectory(dir=folder) as there:
        path = Path(there) / "model.gguf"
        path.write_bytes(data)
        with llama.load(path, [gs.CpuBackend()], n_ctx=256, n_batch=32, memory=len(data) // 2) as model:
            store, scheduler = model.store, model.scheduler
            assert isinstance(store, gs.FileStore) and model.residency is not None
            for token in range(TOKENS):
                fetched: list[Any] = []
                store.listener = fetched.append
                with scheduler.trace() as trace:
                    began = time.perf_counter()
                    model.eval([token + 1])
                    took = (time.perf_counter() - began) * 1e3
                if took >= best["milliseconds"]:
                    continue
                compute, = trace.computes
                steps = compute.plan.program.steps
                # A trace counts seconds from its own beginning, the listener those of time.perf_counter.
                shift = trace.recordings[0].start / 1e9 - compute.start - began
                read = {one.tensor: one for one in fetched}
                reads = [[one.tensor, one.nbytes, (one.began - began) * 1e3, (one.ended - began) * 1e3]
                         for one in sorted(fetched, key=lambda one: one.began)]
                runs = []
                for span in compute.steps:
                    step = steps[span.number]
                    if not isinstance(step, Run) or compute.plan.backends[step.backend].is_store:
                        continue
                    start, stop = (span.start + shift) * 1e3, (span.stop + shift) * 1e3
                    awaited = [steps[wait.step] for wait in step.waits if not wait.back]
                    names = [compute.plan.graph.tensors[one.tensor].name for one in awaited if isinstance(one, Fetch)]
                    ready = max([start, *((read[name].ended - began) * 1e3 for name in names)])
                    runs.append([names[-1] if names else "", start, min(ready, stop), stop])
                best = {"milliseconds": took, "weights": sum(use.nbytes for uses in model.residency.uses.values()
                                                             for use in uses),
                        "limit": len(data) // 2, "fetched": model.residency.nbytes, "reads": reads, "runs": runs}
            store.listener = None
    return best


def rounded(value: Any) -> Any:
    """Times to microseconds."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return {key: rounded(one) for key, one in value.items()} if isinstance(value, dict) else value


def recorded() -> dict[str, Any]:
    """The token that was recorded."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def block(x: float, y: float, wide: float, colour: str, title: str, dashed: bool = False) -> str:
    style = f'fill="{colour}" stroke="{PALE}" stroke-width=".8"' + (' stroke-dasharray="2 2"' if dashed else "")
    return (f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.6):.1f}" height="{ROW - 6}" {style}><title>{title}</title>'
            "</rect>")


def drawing() -> str:
    """The SVG file: two lanes of reads, one of computing, milliseconds to the right."""
    found = recorded()
    took = found["milliseconds"]
    scale = (WIDTH - LEFT - 20) / took
    reads, runs = found["reads"], found["runs"]
    colours = {name: BLOCKS[k % len(BLOCKS)] for k, (name, *_) in enumerate(reads)}
    rate = found["fetched"] / 1e3 / max(stop for *_, stop in reads)
    parts = [text(20, 30, f"One token: {found['fetched'] / 1e6:.0f} of {found['weights'] / 1e6:.0f} MB of weights are "
                          f"read in {took:.0f} ms, {rate:,.0f} MB/s; the kernels take "
                          f"{sum(stop - ready for _, _, ready, stop in runs):.0f} ms.", PALE)]
    for k, name in enumerate(("disk", "", "CPU")):
        y = TOP + ROW * k + (10 if k == 2 else 0)
        parts.append(text(20, y + 17, name, size=15))
    free = [0.0, 0.0]
    for name, nbytes, start, stop in reads:
        lane = min(range(2), key=lambda k: (free[k] > start + 0.01, k))
        free[lane] = stop
        x, wide, y = LEFT + start * scale, (stop - start) * scale, TOP + ROW * lane
        parts.append(block(x, y, wide, colours[name], f"{name}: {nbytes:,} bytes, {start:.1f} .. {stop:.1f} ms"))
        short = name.removesuffix(".weight").replace("blk.", "")
        if wide > 6.2 * len(short):
            parts.append(text(x + wide / 2, y + 16, short, INK, "middle", 11))
    y = TOP + ROW * 2 + 10
    for name, start, ready, stop in runs:
        if ready > start:
            parts.append(block(LEFT + start * scale, y, (ready - start) * scale, "none",
                               f"waits for {name}, {start:.1f} .. {ready:.1f} ms", dashed=True))
        parts.append(block(LEFT + ready * scale, y, (stop - ready) * scale, colours.get(name, LINES),
                           f"computes {'with ' + name if name else 'with weights that stay'}, {ready:.1f} .. "
                           f"{stop:.1f} ms"))
    base = y + ROW + 4
    step = next(n for n in (1, 2, 5, 10, 20, 50, 100) if took / n <= 12)
    for tick in range(0, int(took) + 1, step):
        x = LEFT + tick * scale
        parts.append(f'<path d="M{x:.1f} {base - 4}v5" stroke="{PALE}"/>')
        parts.append(text(x, base + 16, str(tick), PALE, "middle", 11))
    parts.append(text(WIDTH - 20, base + 34, "milliseconds", PALE, "end", 11))
    parts.append(text(LEFT, base + 34, "dashed: the CPU waits for a weight; grey: it computes with weights that stay; "
                                       "coloured: with the weight of that colour", PALE, size=11))
    return document(base + 50, "One token of a model larger than its memory", parts)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        RECORD.write_text(json.dumps(rounded(record(sys.argv[2] if len(sys.argv) > 2 else None))) + "\n",
                          encoding="utf-8")
    PICTURE.write_text(drawing(), encoding="utf-8")
