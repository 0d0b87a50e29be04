"""`ggml-sched fit --llama-cpp`: graphs of the installed llama.cpp, and the command for it unmodified."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path

import pytest

from ggml_sched import cli
from ggml_sched.cli import llama_cpp_graphs
from ggml_sched.errors import FileFormatError

TINY = str(Path(__file__).resolve().parents[1] / "data/models/tiny-llama-q4_0.gguf")
DEVICES = ("--device", "CUDA0:1000000B:1000GB/s:40TF", "--device", "CPU:16GiB:50GB/s:1TF")
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")


@needs_llama_cpp
def test_the_answer_ends_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", TINY, *DEVICES, "--context", "256", "--batch", "32", "--llama-cpp", "--no-flash"]) == 0
    printed = capsys.readouterr().out
    assert "graphs of llama-cpp-python" in printed
    assert f"\nllama-server -m {TINY} -c 256 -b 32 -ub 32 -ngl " in printed


@needs_llama_cpp
def test_the_environment_of_the_process_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    assert cli.main(["fit", TINY, *DEVICES, "--context", "256", "--batch", "32", "--llama-cpp", "--json"]) == 0
    assert dict(os.environ) == before


@needs_llama_cpp
def test_json_has_what_llama_cpp_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", TINY, *DEVICES, "--context", "256", "--batch", "32", "--llama-cpp", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["llama_cpp"]["fits"] and data["llama_cpp"]["arguments"]["flash_attn"]
    assert {row["device"] for row in data["llama_cpp"]["memory"]} == {"CUDA0", "CPU"}


@needs_llama_cpp
def test_each_of_several_models_has_its_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(Path(TINY).read_bytes())
    arguments = ["fit", TINY, str(other), *DEVICES, "--context", "256", "--batch", "32", "--llama-cpp"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert [printed.count(f"\nllama-server -m {name} -c 256 ") for name in (TINY, other)] == [1, 1]
    assert cli.main([*arguments, "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["llama_cpp"]
    for rows in zip(one["memory"], two["memory"], strict=True):
        own = [row["weights"] + row["cache"] + row["arena"] for row in rows]
        assert all(row["left"] >= 0 for row in rows)
        if rows[0]["device"] == "CUDA0":
            assert sum(own) <= 1_000_000


def test_architectures_that_only_llama_cpp_has_are_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*given: object, **more: object) -> None:
        raise FileFormatError("model.gguf: unknown architecture 'new'; known: llama")

    args = argparse.Namespace(llama_cpp=False, batch=8, kv_type="f16", sequences=1, no_flash=False)
    monkeypatch.setattr("ggml_sched.llama.model_graphs", unknown)
    monkeypatch.setattr(llama_cpp_graphs, "_llama_cpp_graphs", lambda *given: [given[0]])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert llama_cpp_graphs.graphs_of_file("model.gguf", args, 64) == ["model.gguf"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileFormatError, match="unknown architecture 'new'"):
        llama_cpp_graphs.graphs_of_file("model.gguf", args, 64)
