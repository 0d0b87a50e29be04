"""Compares stock llama.cpp with llama.cpp on our planner: tokens, buffers, touched memory, time; a page of Markdown.

    python bench/hooking.py [--levels alloc sched] [--models NAME ...] [--all] [--rounds N] [--skip PART ...] > FILE

llama.cpp is that of llama-cpp-python (`pip install '.[peer]'`).  A hook stays for the life of a process, so stock and
hooked run in separate processes, in turn.  Models have their real sizes and no weights (hooked/models.py): they are
opened, reserve and allocate, and nothing is computed; devices other than the CPU are dry (hooked/devices.cpp).  Tokens
are those of small models that have weights, on devices that compute.  Memory is that of processes whose kernels touch
the pages of their results and compute nothing (hooked/touch.cpp); random batches show what is planned again.  Sizes are
what llama.cpp logs, times what passes inside the functions, the median over contexts and processes.  hooked/page.py
writes them down.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
from hooked import build, models, page
from report import processor

import ggml_sched
from ggml_sched.llama.synthetic import OWN, random_model

PARTS = ("sizes", "memory", "tokens", "batches")
HERE = Path(__file__).resolve().parent
SMALL = HERE.parent / "tests" / "data" / "models"
PACKAGES = Path(ggml_sched.__file__).resolve().parents[1]
"""The folder of the measured package: installed, or compiled in place."""


def installed() -> str | None:
    """The reason why llama.cpp cannot be hooked here, or None."""
    if importlib.util.find_spec("ggml_sched.llama_cpp") is None:
        return "ggml_sched.llama_cpp is missing: stock alone"
    return None


class Worker:
    """Runs jobs of hooked/worker.py, each in a fresh process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.libraries, self.jobs = folder, build.build(), 0
        self.warmed: dict[str, bool] = {}

    def run(self, mode: str, model: Path, what: str, ways: list[dict], devices: int = 0,
            pipeline: bool = False) -> list[dict]:
        self.jobs += 1
        job = self.folder / f"{self.jobs}.json"
        job.write_text(json.dumps({"mode": "stock" if mode == "again" else mode, "model": str(model), "what": what,
                                   "ways": ways, "devices": devices, "pipeline": pipeline,
                                   "libraries": self.libraries}))
        # Without reuse of graphs each decode allocates; threads of OpenMP would spin.
        environment = os.environ | {"LLAMA_GRAPH_REUSE_DISABLE": "1", "OMP_NUM_THREADS": "1",
                                    "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES),
                                                                                os.environ.get("PYTHONPATH")]))}
        if what in ("sizes", "memory"):
            environment["LD_PRELOAD"] = self.libraries["holes"]
        if what == "memory":
            # As installed: modules that were compiled before.
            environment["LD_PRELOAD"] += f":{self.libraries['touch']}"
            environment["PYTHONPYCACHEPREFIX"] = str(self.folder / "bytecode")
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run([sys.executable, str(HERE / "hooked" / "worker.py"), str(job)], capture_output=True,
                              text=True, env=environment)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        died = {"failed": f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
        return lines + [died] * (len(ways) - len(lines))


def ways_of(name: str) -> Iterator[tuple[str, int, dict]]:
    """The ways in which a model is opened: description, number of devices, context arguments."""
    metadata = (models.GRAPHS | models.VOCABULARIES | models.OTHERS)[name][1]
    ctx, layers = min(metadata["context_length"], 4096), metadata["block_count"]
    usual = {"n_ctx": ctx, "n_batch": 512, "flash": 0, "n_seq": 1, "layers": 0, "embeddings": False,
             "outputs": 0}
    yield "CPU", 0, usual
    yield "CPU, flash", 0, usual | {"flash": 1}
    yield "CPU, batch 64", 0, usual | {"n_batch": 64}
    yield "CPU, 4 sequences", 0, usual | {"n_seq": 4}
    yield "CPU, context 512", 0, usual | {"n_ctx": 512}
    yield "CPU, embeddings", 0, usual | {"embeddings": True}
    yield "CPU, 1 output", 0, usual | {"outputs": 1}
    yield "CPU, flash, 1 output", 0, usual | {"flash": 1, "outputs": 1}
    yield "1 device", 1, usual | {"layers": 999}
    yield "1 device, half", 1, usual | {"layers": layers // 2}
    yield "1 device, half, flash", 1, usual | {"layers": layers // 2, "flash": 1}
    yield "3 devices", 3, usual | {"layers": 999}
    yield "3 devices, flash", 3, usual | {"layers": 999, "flash": 1}
    yield "3 devices, flash, 1 output", 3, usual | {"layers": 999, "flash": 1, "outputs": 1}


def sizes(worker: Worker, name: str, modes: list[str], rounds: int, folder: Path) -> dict[str, dict[str, list[dict]]]:
    """Rows by the words of a way and by mode, one for each round."""
    path = models.write(name, folder)
    found: dict[str, dict[str, list[dict]]] = {}
    ways = list(ways_of(name))
    for devices in sorted({count for _, count, _ in ways}):
        asked = [(words, way) for words, count, way in ways if count == devices]
        for _ in range(rounds):
            for mode in modes:
                rows = worker.run(mode, path, "sizes", [way for _, way in asked], devices)
                for (words, _), row in zip(asked, rows, strict=True):
                    found.setdefault(words, {}).setdefault(mode, []).append(row)
    return found


def memory(worker: Worker, name: str, modes: list[str], folder: Path) -> dict[str, dict[str, list[dict]]]:
    """As `sizes`, each way in a process of its own; the first one of a mode compiles modules and is not counted."""
    path = models.write(name, folder)
    found: dict[str, dict[str, list[dict]]] = {}
    for words, devices, way in ways_of(name):
        for mode in modes:
            if not worker.warmed.get(mode):
                worker.run(mode, path, "memory", [way], devices)
                worker.warmed[mode] = True
            found.setdefault(words, {})[mode] = worker.run(mode, path, "memory", [way], devices)
    return found


def small_models(folder: Path) -> Iterator[Path]:
    """Models that have weights: those of the tests, and a random one of each architecture."""
    yield from sorted(SMALL.glob("*.gguf"))
    for arch in ("llama", *OWN):
        path = folder / f"random-{arch}.gguf"
        path.write_bytes(random_model(arch, 7, tied=arch == "gemma2"))
        yield path


def tokens(worker: Worker, modes: list[str], folder: Path) -> tuple[list[page.Tokens], list[str]]:
    """Logits of each mode beside those of stock: how many ways gave the same bits, and the largest difference.

    The mode "again" is stock in another process: its differences are not due to the hook.
    """
    rows, wrong = [], []
    for path in small_models(folder):
        same = dict.fromkeys(modes, 0)
        furthest, refused, count = dict.fromkeys(modes, 0.0), 0, 0
        for devices, pipeline in ((0, False), (1, False), (2, True), (3, False)):
            ways = [{"n_ctx": 256, "n_batch": 24, "flash": flash, "n_seq": n_seq, "layers": layers,
                     "embeddings": False, "outputs": 0, "file": ""} for flash in (0, 1) for n_seq in (1, 3)
                    for layers in ((0,) if devices == 0 else (999, 2))]
            results = {}
            for mode in dict.fromkeys([*modes, "stock"]):
                for i, way in enumerate(ways):
                    way["file"] = str(folder / f"{mode}-{i}.npy")
                results[mode] = worker.run(mode, path, "tokens", ways, devices, pipeline)
            for i, row in enumerate(results["stock"]):
                if "failed" in row:
                    refused += 1
                    continue
                count += 1
                want = np.load(folder / f"stock-{i}.npy")
                for mode in modes:
                    if "failed" in results[mode][i]:
                        wrong.append(f"{path.stem}, {mode}, {ways[i]}: {results[mode][i]['failed']}")
                        continue
                    got = np.load(folder / f"{mode}-{i}.npy")
                    same[mode] += np.array_equal(got.view(np.uint32), want.view(np.uint32))
                    furthest[mode] = max(furthest[mode], float(np.abs(got - want).max(initial=0)))
        for mode in modes:
            if not furthest[mode] <= page.CLOSE:
                wrong.append(f"{path.stem}, {mode}: logits differ by {furthest[mode]:.2e}")
        rows.append(page.Tokens(path.stem, count, refused, same, furthest))
    return rows, wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--levels", nargs="*", choices=page.LEVELS, default=list(page.LEVELS), help="what is hooked")
    parser.add_argument("--models", nargs="*", choices=[*models.GRAPHS, *models.VOCABULARIES, *models.OTHERS],
                        help="models whose sizes and memory are measured")
    parser.add_argument("--all", action="store_true", help="the models of other architectures, too")
    parser.add_argument("--rounds", type=int, default=2, help="processes for each mode")
    parser.add_argument("--batches", type=int, default=10_000, help="how many random ones")
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[], help="what is left out")
    parser.add_argument("--files", type=Path, help="a folder that keeps the models")
    options = parser.parse_args(arguments)
    missing = installed()
    modes = ["stock", *([] if missing else options.levels)]
    names = options.models or [*models.GRAPHS, *models.VOCABULARIES, *(models.OTHERS if options.all else ())]
    hooked = modes[1:] or ["again"]
    wrong, found = [], page.Found({}, {}, {}, [])
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Path(folder))
        files = options.files or Path(folder)
        files.mkdir(parents=True, exist_ok=True)
        for name in names:
            if "sizes" not in options.skip:
                print(f"sizes of {name}", file=sys.stderr)
                found.sizes[name] = sizes(worker, name, modes, options.rounds, files)
            if "memory" not in options.skip:
                print(f"memory of {name}", file=sys.stderr)
                found.memory[name] = memory(worker, name, modes, files)
        wrong += [f"{name}, {words}, {mode}: {row['failed']}" for part in (found.sizes, found.memory)
                  for name, ways in part.items() for words, by_mode in ways.items() for mode, rows in by_mode.items()
                  if mode != "stock" for row in rows if "failed" in row and "failed" not in by_mode["stock"][0]]
        if "batches" not in options.skip:
            print("random batches", file=sys.stderr)
            found.batches.update(batches(worker, modes, Path(folder), options.batches))
        wrong += [f"batches of {name}, {mode}: {row['failed']}" for name, by_mode in found.batches.items()
                  for mode, row in by_mode.items() if "failed" in row]
        if "tokens" not in options.skip:
            logits, differ = tokens(worker, hooked, Path(folder))
            found.tokens.extend(logits)
            wrong += differ
    print(written(found, modes, missing, wrong))
    return bool(wrong)


def batches(worker: Worker, modes: list[str], folder: Path, count: int) -> dict[str, dict[str, dict]]:
    """Random batches of small models, one of them recurrent: counts of new plans, buffers and waits, by model and
    mode."""
    found: dict[str, dict[str, dict]] = {}
    for arch in ("llama", "mamba"):
        path = folder / f"batches-{arch}.gguf"
        path.write_bytes(random_model(arch, 7))
        for layers, devices in ((0, 0), (2, 1)):
            way = {"n_ctx": 64 * 128, "n_batch": 64, "flash": 0, "n_seq": 64, "layers": layers, "embeddings": False,
                   "outputs": 0, "count": count}
            found[f"{arch}, {'1 device, half' if devices else 'CPU'}"] = {
                mode: worker.run(mode, path, "batches", [way], devices)[0] for mode in modes}
    return found


def written(found: page.Found, modes: list[str], missing: str | None, wrong: list[str]) -> str:
    """The page as Markdown text."""
    groups = {"": list(models.GRAPHS), "large vocabularies, few layers": list(models.VOCABULARIES),
              "other models": list(models.OTHERS)}
    parts = ["# llama.cpp on our planner, measured", "Written by `python bench/hooking.py`; how to use it: "
             "[llama.cpp on our planner in one line](llama-cpp.md).",
             f"Machine: {processor()}.  llama.cpp is that of llama-cpp-python {version('llama-cpp-python')}."]
    parts += [missing] if missing else []
    if modes[1:]:
        parts += ["## Summary", page.summary(found, modes[1:], groups)]
    if found.sizes:
        parts += ["## Compute buffers and time", page.table_of_sizes(found.sizes, modes[1:])]
    if found.memory:
        parts += ["## Memory that is touched", page.MEMORY, page.table_of_memory(found.memory, modes[1:])]
    if found.batches:
        parts += ["## Random batches", page.BATCHES, page.table_of_batches(found.batches, modes)]
    if found.tokens:
        parts += ["## Logits", page.table_of_tokens(found.tokens, modes[1:] or ["again"])]
    return "\n\n".join([*parts, "## What was wrong", "\n".join(f"* {line}" for line in wrong or ["Nothing."])])


if __name__ == "__main__":
    raise SystemExit(main())
