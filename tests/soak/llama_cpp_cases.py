"""Runs llama_cpp_load.py over models and devices, and compares hooked processes with stock ones.

Owns a folder of jobs, models and adapters.  Invariant: acts that are compared ran with the same job but for the level.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hooked import build

from ggml_sched.llama.gguf import open_gguf
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.synthetic import random_model

__all__ = ["CASES", "LEVELS", "MANY", "WALKED", "Case", "Runner"]

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "data" / "models"
LEVELS = ("alloc", "sched", "turns")
"""Of processes; one that takes turns gives each context the other level."""
RANK = 4


@dataclass(frozen=True)
class Case:
    """A model (a file's name, or "random" and an architecture) and the devices that it is on."""

    model: str
    devices: int = 0
    pipeline: bool = False
    layers: int = 0

    @property
    def has_window(self) -> bool:
        """Whether some layers have a sliding attention window."""
        return self.model in ("random gpt-oss", "random gemma3")

    def __str__(self) -> str:
        where = f"-{self.devices} devices-{self.layers} layers" if self.devices else ""
        return self.model.replace(" ", "-") + where + ("-pipeline" if self.pipeline else "")


CASES = (Case("tiny-llama-q4_0"), Case("tiny-qwen3-f32", 1, layers=2), Case("random gpt-oss", 2, True, 999),
         Case("random gemma3", 3, layers=4), Case("random mamba"))
WALKED = (*CASES, Case("tiny-llama-q4_0", 2, True, 999), Case("random qwen3moe", 2, layers=2),
          Case("random deepseek2", 1, layers=999), Case("random gemma2", 2, layers=2), Case("random gpt2", 1, layers=2),
          Case("random phi3"))
MANY = (Case("tiny-llama-q4_0"), Case("tiny-qwen3-f32", 3, layers=999), Case("random gpt-oss", 1, layers=2))


class Runner:
    """Runs llama_cpp_load.py; a stock process runs once per case."""

    def __init__(self, folder: Path, package: Path = ROOT, **environment: str) -> None:
        self.folder, self.package, self.environment = folder, package, environment
        self.libraries, self.jobs, self.stock = build.build(), 0, {}
        self.stderr = ""
        """Of the last process."""

    def run(self, mode: str, case: Case, acts: list, *, reuse: bool = True) -> list[dict]:
        """The output of the acts in a process: stock, at a level, or with levels in turn."""
        if mode == "stock" and (case, str(acts)) in self.stock:
            return self.stock[case, str(acts)]
        self.jobs += 1
        job = self.folder / f"{self.jobs}.json"
        path = self.path(case.model)
        job.write_text(json.dumps({
            "mode": "alloc" if mode == "turns" else mode, "turns": mode == "turns", "model": str(path),
            "lora": adapter(path, self.folder), "libraries": self.libraries, "devices": case.devices,
            "pipeline": case.pipeline, "layers": case.layers, "what": "tokens", "acts": acts}))
        folders = [self.package, self.package / "bench", self.package / "tests" / "soak"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GGML_NO_BACKTRACE": "1", **self.environment,
                       "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}
        environment.pop("LLAMA_GRAPH_REUSE_DISABLE", None)
        if not reuse:
            environment["LLAMA_GRAPH_REUSE_DISABLE"] = "1"
        done = subprocess.run([sys.executable, "-X", "faulthandler", folders[2] / "llama_cpp_load.py", str(job)],
                              capture_output=True, text=True, env=environment, timeout=1800)
        assert done.returncode == 0, f"{mode} {case} ended with {done.returncode}:\n{done.stderr[-6000:]}"
        self.stderr = done.stderr
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert [row["act"] for row in said] == [name for name, _ in acts]
        print(f"{mode:5} {case}", *({name: value for name, value in row.items() if name not in ("digest", "together")}
                                    for row in said), sep="\n    ")
        if mode == "stock":
            self.stock[case, str(acts)] = said
        return said

    def path(self, model: str) -> Path:
        if not model.startswith("random "):
            return MODELS / f"{model}.gguf"
        path = self.folder / f"{model}.gguf"
        if not path.exists():
            arch = model.split()[1]
            path.write_bytes(random_model(arch, metadata={"context_length": 4096}, tied=arch == "gemma2"))
        return path

    def compare(self, mode: str, case: Case, acts: list, **how) -> list[tuple[dict, dict]]:
        """Assert that a hooked process gives stock's digests and leaves no memory of ours; returns both outputs of each
        act."""
        pairs = list(zip(self.run("stock", case, acts), self.run(mode, case, acts, **how), strict=True))
        for stock, ours in pairs:
            assert len(stock["digest"]) == len(ours["digest"]) > 0
            different = [i for i, pair in enumerate(zip(stock["digest"], ours["digest"], strict=True)) if
                         pair[0] != pair[1]]
            assert not different, f"{ours['act']}: other bits in {different} of {len(stock['digest'])}"
            assert ours["calls"] > 0 and ours["alive"] == 0 and ours["served"]["stock"] == 0
        return pairs


def adapter(model: Path, folder: Path) -> str | None:
    """An adapter of random numbers for a model's queries and what its layers put out; None if it has neither."""
    path, rng, tensors = folder / f"{model.stem}.lora", np.random.default_rng(1), {}
    with open_gguf(model) as file:
        arch = file.metadata["general.architecture"]
        for name, info in file.tensors.items():
            if name.endswith(("attn_q.weight", "ffn_down.weight")):
                into, out = info.ne
                tensors[f"{name}.lora_a"] = rng.normal(0, 0.1, (RANK, into)).astype(np.float32)
                tensors[f"{name}.lora_b"] = rng.normal(0, 0.1, (out, RANK)).astype(np.float32)
    if not tensors:
        return None
    if not path.exists():
        write_gguf(path, {"general.type": "adapter", "general.architecture": arch, "adapter.type": "lora",
                          "adapter.lora.alpha": float(RANK)}, tensors)
    return str(path)
