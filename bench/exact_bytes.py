"""Bytes that a dry run predicts beside those that an unmodified llama.cpp allocates: a page of Markdown.

    python bench/exact_bytes.py [--models NAME ...] [--files FOLDER] > FILE

Models have their real sizes and no weights (hooked/models.py); devices other than the CPU are imitated: one, two of
unequal memory, three.  llama.cpp opens each model in 28 ways, unmodified and with both levels of the hook, in processes
of their own (hooked/allocated.py), and every buffer that it holds then is compared with what `dry_run` predicted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from hooked import build, models

os.environ["GGML_SCHED"] = "off"
from ggml_sched.llama_cpp import DryRunError, dry_run  # noqa: E402

HERE = Path(__file__).resolve().parent
GIB = 1 << 30
ONE, TWO = [("HOST0", 24 * GIB)], [("HOST0", 24 * GIB), ("HOST1", 8 * GIB)]
THREE = [*TWO, ("HOST2", 12 * GIB)]
LEVELS = {"stock": "off", "alloc": "alloc", "sched": "sched"}


def ways_of(layers: int, n_ctx: int) -> list[tuple[list[tuple[str, int]], bool, dict]]:
    """28 ways to open a model: devices, whether they have events, settings."""
    usual = {"n_ctx": n_ctx, "use_extra_bufts": False}
    half, flash, all_layers = {"n_gpu_layers": layers // 2}, {"flash_attn": True}, {"n_gpu_layers": -1}
    experts = {"override_tensor": {r"ffn_(up|gate|down)": "CPU"}}
    found = [([], False, way) for way in (
        {}, flash, {"n_batch": 64}, {"n_ubatch": 128}, {"n_seq_max": 4}, {"n_seq_max": 4, "kv_unified": True},
        {"embedding": True, "n_batch": 128}, {"n_ctx": 512})]
    found += [(ONE, False, way) for way in (
        all_layers, half, half | flash, {"n_gpu_layers": 1}, all_layers | experts, all_layers | {"offload_kqv": False},
        all_layers | flash | {"n_seq_max": 2})]
    found += [(TWO, False, way) for way in (
        all_layers, all_layers | flash, half, all_layers | {"tensor_split": [1, 4]}, all_layers | experts | flash,
        {"n_gpu_layers": layers} | flash)]
    found += [(TWO, True, way) for way in (all_layers, all_layers | flash)]
    found += [(THREE, False, way) for way in (
        all_layers, all_layers | flash, half, all_layers | {"tensor_split": [2, 1, 1]},
        all_layers | {"override_tensor": {"attn": "HOST2", "ffn_down": "HOST0"}})]
    return [(devices, pipeline, usual | way) for devices, pipeline, way in found]


def allocated(mode: str, path: Path, libraries: dict[str, str], devices: list, pipeline: bool,
              ways: list[dict]) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        job.write_text(json.dumps({"mode": mode, "path": str(path), "libraries": libraries, "devices": devices,
                                   "pipeline": pipeline, "ways": ways}))
        done = subprocess.run([sys.executable, str(HERE / "hooked/allocated.py"), str(job)], capture_output=True,
                              text=True, env=os.environ | {"LD_PRELOAD": libraries["holes"], "GGML_SCHED": "off"})
        rows = [json.loads(line) for line in done.stdout.splitlines()]
    return rows + [{"failed": done.stderr[-200:]}] * (len(ways) - len(rows))


def off(run, level: str, buffers: list[list]) -> int:
    """Bytes by which predicted and allocated buffers differ, of one type and purpose each, in the order of sizes."""
    want: dict[tuple[str, str], list[int]] = {}
    for kind, what, nbytes in buffers:
        want.setdefault((kind, what), []).append(nbytes)
    got: dict[tuple[str, str], list[int]] = {}
    for piece in (*run.pieces, *run.compute[level]):
        if piece.nbytes:
            what = piece.kind if piece.kind in ("weights", "compute") else "other"
            got.setdefault((piece.buffer, what), []).append(piece.nbytes)
    total = 0
    for key in {*want, *got}:
        a, b = sorted(want.get(key, [])), sorted(got.get(key, []))
        a, b = [0] * (len(b) - len(a)) + a, [0] * (len(a) - len(b)) + b
        total += sum(abs(x - y) for x, y in zip(a, b, strict=True))
    return total


def measure(name: str, path: Path, libraries: dict[str, str]) -> tuple[list[object], list[str]]:
    metadata = (models.GRAPHS | models.VOCABULARIES | models.OTHERS)[name][1]
    ways = ways_of(metadata["block_count"], min(metadata["context_length"], 2048))
    groups: dict[str, list[int]] = {}
    for i, (devices, pipeline, _) in enumerate(ways):
        groups.setdefault(json.dumps([devices, pipeline]), []).append(i)
    wrong, seconds, refused = [], [], 0
    n_buffers, largest, differ = 0, 0, dict.fromkeys(LEVELS, 0)
    for members in groups.values():
        devices, pipeline, _ = ways[members[0]]
        runs: list = []
        for i in members:
            began = time.perf_counter()
            try:
                runs.append(dry_run(path, devices=devices or None, pipeline=pipeline, **ways[i][2]))
            except DryRunError as error:
                runs.append(error)
            seconds.append(time.perf_counter() - began)
        for mode, level in LEVELS.items():
            rows = allocated(mode, path, libraries, devices, pipeline, [ways[i][2] for i in members])
            for i, run, row in zip(members, runs, rows, strict=True):
                if "failed" in row or isinstance(run, DryRunError):
                    refused += mode == "stock"
                    if isinstance(run, DryRunError) != ("failed" in row):
                        wrong.append(f"{name}, {mode}, {ways[i]}: {row.get('failed', run)}")
                    continue
                n_buffers += len(row["buffers"])
                largest = max(largest, sum(nbytes for *_, nbytes in row["buffers"]))
                bytes_off = off(run, level, row["buffers"])
                differ[mode] += bytes_off
                if bytes_off:
                    wrong.append(f"{name}, {mode}, {ways[i]}: {bytes_off} bytes off")
    return [name, len(ways) - refused, n_buffers, f"{largest / 1e9:.1f}", *differ.values(),
            f"{statistics.median(seconds):.2f}"], wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    every = [*models.GRAPHS, *models.VOCABULARIES, *models.OTHERS]
    parser.add_argument("--models", nargs="*", choices=every, default=every)
    parser.add_argument("--files", type=Path, help="a folder that keeps the models")
    options = parser.parse_args(arguments)
    libraries, rows, wrong = build.build(), [], []
    with tempfile.TemporaryDirectory() as folder:
        files = options.files or Path(folder)
        files.mkdir(parents=True, exist_ok=True)
        for name in options.models:
            row, differ = measure(name, models.write(name, files), libraries)
            print(*row, *differ, file=sys.stderr, flush=True)
            rows.append(row)
            wrong += differ
    head = ("model", "ways", "buffers", "GB at most", "off: llama.cpp", "off: `alloc`", "off: `sched`", "s for each")
    print("# Bytes that dry runs predict\n\nWritten by `python bench/exact_bytes.py`; how to use them: "
          "[exact bytes before a model is opened](llama-cpp.md#exact-bytes-before-a-model-is-opened).  llama.cpp is "
          f"that of llama-cpp-python {version('llama-cpp-python')}; devices are imitated.\n\n"
          "Bytes off are those by which predicted buffers differ from the buffers that llama.cpp holds then, over all "
          "ways: unmodified, and with both levels of the hook.  The last column has the median time of a dry run, its "
          "process included.\n")
    print("| " + " | ".join(head) + " |\n|---" + "|--:" * (len(head) - 1) + "|")
    for row in rows:
        print("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) + " |")
    print("\n## What was wrong\n\n" + "\n".join(f"* {line}" for line in wrong or ["Nothing."]))
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
