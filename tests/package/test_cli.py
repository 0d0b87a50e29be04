"""The command: what it prints, and how it fails."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ggml_sched import cli, save_graph
from ggml_sched.llama import load, random_llama

SHAPES = {"n_vocab": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_ff": 48}


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(random_llama(1, **SHAPES))
    return path


@pytest.fixture
def graph_file(tmp_path):
    path = tmp_path / "graph.json.gz"
    with load(random_llama(1, **SHAPES), n_ctx=32) as model:
        save_graph(model.batch_graph(4, 32).graph, path)
    return path


def ids_of(text: str) -> list[int]:
    return [int(i) for i in re.search(r"^generated: (.*)$", text, re.M)[1].split(",")]


def test_without_a_model_one_is_made(capsys):
    assert cli.main(["run", "-n", "3"]) == 0
    out = capsys.readouterr().out
    for word in ("a random model", "splits", "copies", "copied bytes", "time to plan", "arena bytes",
                 "tokens/s"):
        assert word in out
    assert len(ids_of(out)) == 3


def test_any_number_of_backends_generates_the_same(model_file, capsys):
    seen = set()
    for options in ([], ["--backend", "cpu"], ["--backend", "cpu", "cpu"], ["--backend", "cpu"] * 3,
                    ["--policy", "seed"], ["--n-batch", "2"]):
        assert cli.main(["run", str(model_file), "--tokens", "1,2,3", "-n", "5", *options]) == 0
        out = capsys.readouterr().out
        n = max(options.count("cpu"), 1)
        names = [f"CPU{i}" for i in range(n)] if n > 1 else ["CPU"]
        assert re.findall(r"^(CPU\d*) ", out, re.M) == names
        seen.add(tuple(ids_of(out)))
    with load(model_file, n_ctx=32) as model:
        assert seen == {tuple(model.generate([1, 2, 3], 5))}


def test_sampling_follows_the_seed(model_file, capsys):
    def draw(seed):
        assert cli.main(["run", str(model_file), "-n", "8", "--temperature", "3", "--seed", seed]) == 0
        return ids_of(capsys.readouterr().out)
    assert draw("1") == draw("1") != draw("2")


def test_nothing_to_generate(model_file, capsys):
    assert cli.main(["run", str(model_file), "-n", "0"]) == 0
    out = capsys.readouterr().out
    assert "generated: nothing" in out and "prompt" in out


@pytest.mark.parametrize("policy", ["default", "seed"])
def test_plans_of_a_graph_file(graph_file, capsys, policy):
    assert cli.main(["plan", str(graph_file), "--policy", policy, "--splits"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(c\w+):", out, re.M) == ["c1", "c2half", "c2full", "c4"]
    assert re.findall(r"^  (GPU2) ", out, re.M) == ["GPU2"]
    assert cli.main(["plan", str(graph_file), "--backends", "c4", "c4"]) == 0
    assert re.findall(r"^(c\w+):", capsys.readouterr().out, re.M) == ["c4"]


@pytest.mark.parametrize("argv", [
    ["run", "{tmp}/missing.gguf"],
    ["run", "{tmp}"],
    ["run", "{tmp}/broken.gguf"],
    ["run", "--tokens", "1,99999"],
    ["run", "--tokens", "-1"],
    ["run", "-n", "-1"],
    ["run", "-n", "20", "--n-ctx", "10"],
    ["run", "--n-ctx", "0"],
    ["run", "--threads", "-3"],
    ["run", "--temperature", "-1"],
    ["plan", "{tmp}/missing.json"],
    ["plan", "{tmp}/broken.json.gz"],
    ["plan", "{tmp}/broken.gguf"],
])
def test_errors_are_one_line(argv, tmp_path, capsys):
    (tmp_path / "broken.gguf").write_bytes(random_llama(1, **SHAPES)[:1000])
    (tmp_path / "broken.json.gz").write_bytes(b"not gzip")
    assert cli.main([arg.format(tmp=tmp_path) for arg in argv]) == 1
    streams = capsys.readouterr()
    assert streams.err.count("\n") == 1 and streams.err.startswith("ggml-sched: error: ")
    assert "Traceback" not in streams.err + streams.out


@pytest.mark.parametrize("argv", [
    [], ["fly"], ["run", "--tokens", "a,b"], ["run", "--tokens", ""], ["run", "--backend", "abacus"],
    ["plan"], ["plan", "x", "--backends", "c9"],
])
def test_wrong_arguments_exit_with_2(argv, capsys):
    assert cli.main(argv) == 2
    assert "usage:" in capsys.readouterr().err


def test_every_command_has_help(capsys):
    for argv in (["--help"], ["run", "--help"], ["plan", "--help"], ["--version"]):
        assert cli.main(argv) == 0
        assert "ggml-sched" in capsys.readouterr().out


def test_a_reader_that_leaves_early_is_no_error():
    command = f"import sys; from ggml_sched.cli import main; sys.exit(main({['run', '-n', '1']!r}))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", command], **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() in (0, 1)
