"""llama.cpp itself on our planner under load: every bit as with llama.cpp as it is, nothing leaks, nothing crashes.

Each case is processes of their own that do the same (llama_cpp_load.py): stock, either level, and one whose level
changes with each context.  GGML_SCHED_SOAK=5 makes them five times as long.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hooked import build

from ggml_sched.llama.gguf import open_gguf
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.synthetic_models import random_model

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "tests" / "data" / "models"
TIMES = int(os.environ.get("GGML_SCHED_SOAK", "1"))
RANK = 4
LEVELS = ("alloc", "sched", "turns")
GROWTH = 1 << 20
"""Bytes of resident memory that may come while 180 contexts come and go."""
KEPT = 64 << 10
"""Bytes of those that malloc may still have given away, less what llama.cpp as it is keeps."""

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python"),
    pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler"),
]


@dataclass(frozen=True)
class Case:
    """A model (a file's name, or "random" and an architecture) and the devices that it is on."""

    model: str
    devices: int = 0
    pipeline: bool = False
    layers: int = 0

    def __str__(self) -> str:
        where = f"-{self.devices} devices-{self.layers} layers" if self.devices else ""
        return self.model.replace(" ", "-") + where + ("-pipeline" if self.pipeline else "")


CASES = (Case("tiny-llama-q4_0"), Case("tiny-qwen3-f32", 1, layers=2), Case("random gpt-oss", 2, True, 999),
         Case("random gemma3", 3, layers=4), Case("random mamba"))
MANY = (Case("tiny-llama-q4_0"), Case("tiny-qwen3-f32", 3, layers=999), Case("random gpt-oss", 1, layers=2))


class Runner:
    """Runs llama_cpp_load.py; what a stock process said is asked for once."""

    def __init__(self, folder: Path, package: Path = ROOT, **environment: str) -> None:
        self.folder, self.package, self.environment = folder, package, environment
        self.libraries, self.jobs, self.stock = build.build(), 0, {}

    def run(self, mode: str, case: Case, acts: list, *, reuse: bool = True) -> list[dict]:
        """What the acts said, in a process that is stock, has a level, or takes turns."""
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
            path.write_bytes(random_model(model.split()[1], metadata={"context_length": 4096}))
        return path

    def compare(self, mode: str, case: Case, acts: list, **how) -> list[tuple[dict, dict]]:
        """What stock and a hooked process said of each act, which have the same digests; nothing of ours is left."""
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


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Runner:
    return Runner(tmp_path_factory.mktemp("llama_cpp"))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reuse", [True, False], ids=["graphs reused", "every token planned"])
@pytest.mark.parametrize("case", MANY, ids=str)
def test_ten_thousand_tokens_have_the_bits_of_stock(runner, case, reuse, level):
    (pair,) = runner.compare(level, case, [["generated", {"count": 10_000 * TIMES,
                                                          "sizes": [256, 1024, 512, 256, 768]}]], reuse=reuse)
    assert pair[1]["tokens"] >= 10_000 and pair[1]["shifting"] == 5
    if not reuse:
        assert pair[1]["calls"] > 10_000


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_hundred_contexts_leave_nothing_behind(runner, case, level):
    ((stock, ours),) = runner.compare(level, case, [["opened", {"count": 200 * TIMES}]])
    (resident, given), usual = ours["growth"], stock["growth"][1]
    assert ours["contexts"] >= 200
    assert resident <= GROWTH * TIMES
    assert given - max(usual, 0) <= KEPT


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contexts_in_two_threads_compute_what_each_computes_alone(runner, case, level):
    ((_, ours),) = runner.compare(level, case, [["in_threads", {"count": 900 * TIMES}]])
    assert ours["failed"] == []
    assert ours["together"] == ours["digest"]
    assert ours["looked"] > 0 and ours["plans"] > 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_and_switches_go_on_with_the_bits_of_stock(runner, case, level):
    """States saved and restored, adapters, embeddings, attention that is not causal, callbacks that look and cancel."""
    pairs = runner.compare(level, case, [["restored", {"rounds": 12 * TIMES}], ["switched", {"rounds": 12 * TIMES}],
                                         ["interrupted", {"rounds": 24 * TIMES}]])
    (_, restored), (_, switched), (_, interrupted) = pairs
    assert all(restored["equal"])
    assert all(switched["differs"]) or case.model == "random mamba"
    assert interrupted["cancelled"] > 0 and min(interrupted["looked"]) > 0
    for stock, ours in pairs:
        assert stock.items() <= ours.items()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", [case for case in CASES if case.devices], ids=str)
def test_devices_that_refuse_leave_the_others_working(runner, case, level):
    ((stock, ours),) = runner.compare(level, case, [["refused", {"most": 12}]])
    assert ours["words"] == stock["words"]
    assert ours["named"] == sum("compute pp buffers" in words for words in ours["words"]) > 0
