"""The command line: output, exit codes and error messages."""

import gzip
import os
import re
import subprocess
import sys

import pytest
from small_llama import SMALL

from ggml_sched import Context, Graph, cli, save_graph
from ggml_sched.llama import load


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(SMALL)
    return path


@pytest.fixture
def graph_file(tmp_path):
    path = tmp_path / "graph.json.gz"
    with load(SMALL, n_ctx=32) as model:
        save_graph(model.batch_graph(4, 32).graph, path)
    return path


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
    ["run", "--tokens", "1,2,3", "--n-ctx", "2"],
    ["run", "--n-ctx", "-1"],
    ["run", "--top-p", "2"],
    ["run", "--backend", "ggml:Abacus"],
    ["run", "--kv-type", "q8_0", "--no-flash"],
    ["run", "--threads", "-3"],
    ["run", "--temperature", "-1"],
    ["plan", "{tmp}/missing.json"],
    ["plan", "{tmp}/broken.json.gz"],
    ["plan", "{tmp}/broken.gguf"],
])
def test_errors_are_one_line(argv, tmp_path, capsys):
    (tmp_path / "broken.gguf").write_bytes(SMALL[:1000])
    (tmp_path / "broken.json.gz").write_bytes(b"not gzip")
    assert cli.main([arg.format(tmp=tmp_path) for arg in argv]) == 1
    streams = capsys.readouterr()
    assert streams.err.count("\n") == 1 and streams.err.startswith("ggml-sched: error: ")
    assert "Traceback" not in streams.err + streams.out


@pytest.mark.parametrize("argv", [
    [], ["fly"], ["run", "--tokens", "a,b"], ["run", "--tokens", ""], ["run", "--backend", "abacus"],
    ["run", "-p", "a", "--tokens", "1"], ["run", "--kv-type", "f64"],
    ["plan"], ["plan", "x", "--backends", "c9"],
])
def test_wrong_arguments_exit_with_2(argv, capsys):
    assert cli.main(argv) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "code", "message"), [
    (["fit", "{graph}", "--goal=--"], 1, "--goal --: not decode"),
    (["fit", "{graph}", "--pin=--"], 1, "--pin --: not NAME=DEVICE"),
    (["fit", "{graph}", "--context=--"], 2, "argument --context/--n-ctx: invalid int value: '--'"),
    (["plan", "{graph}", "--backends=--"], 2, "argument --backends: invalid choice: '--'"),
])
def test_two_dashes_can_be_a_value(argv, code, message, graph_file, capsys):
    assert cli.main([arg.format(graph=graph_file) for arg in argv]) == code
    assert message in capsys.readouterr().err


def test_every_command_has_help(capsys):
    for argv in (["--help"], ["run", "--help"], ["plan", "--help"], ["--version"]):
        assert cli.main(argv) == 0
        assert "ggml-sched" in capsys.readouterr().out


@pytest.mark.parametrize("command", [
    "plan {}.json --backends c1", "plan {}.json --backends c1 --html {}.html",
    "fit {}.json --device CPU:1GB:1GB/s:1TF --svg {}.svg", "pack {}.csv --out {}.out"])
def test_files_may_have_names_that_are_no_text(command, graph_file, tmp_path):
    """In a locale of UTF-8; Python prints such names as they are in a locale without an encoding."""
    if "--html" in command:
        pytest.importorskip("bokeh", reason="needs the extra view")
    name = os.fsencode(tmp_path) + b"/\xff"
    with gzip.open(graph_file) as graph, open(name + b".json", "wb") as file:
        file.write(graph.read())
    with open(name + b".csv", "w", encoding="utf-8") as file:
        file.write("lower,upper,size\n0,4,10\n")
    argv = [part.encode().replace(b"{}", name) for part in command.split()]
    done = subprocess.run([sys.executable, "-m", "ggml_sched", *argv], capture_output=True, timeout=300,
                          env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert (done.returncode, done.stderr) == (0, b"") and name in done.stdout
    with open(argv[-1] if argv[-1].startswith(name) else argv[1], encoding="utf-8") as file:
        assert file.read()


@pytest.mark.parametrize(("encoding", "shown"), [
    ("ascii:strict", rb"\xe9\u6f22\x1b[2J\n\x85"), ("ascii:surrogateescape", rb"\xe9\u6f22\x1b[2J\n\x85"),
    ("latin-1:strict", b"\xe9" + rb"\u6f22\x1b[2J\n\x85"), ("utf-8:strict", "\xe9\u6f22".encode() + rb"\x1b[2J\n\x85"),
])
def test_tensors_may_have_names_that_the_output_has_no_characters_for(encoding, shown, tmp_path):
    ctx = Context()
    node = ctx.set_name(ctx.relu(ctx.tensor("f32", 4, "x", input=True)), "n\xe9\u6f22\x1b[2J\n\x85")
    save_graph(Graph(ctx.set_output(node)), tmp_path / "graph.json")
    path = os.fsencode(tmp_path) + b"/\xff.json"
    os.rename(tmp_path / "graph.json", path)
    done = subprocess.run([sys.executable, "-m", "ggml_sched", "plan", path, "--backends", "c1", "--splits", "--steps",
                           "--peaks"], capture_output=True, timeout=300,
                          env={**os.environ, "PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, b"")
    assert path in done.stdout and done.stdout.count(b"n" + shown) >= 3 and b"\x1b" not in done.stdout


@pytest.mark.parametrize(("command", "closed", "code", "said"), [
    ("config --include", ">&-", 0, ""),
    ("run -n 1", ">&-", 0, "ggml-sched: a small model on CPU (CpuBackend)\n"),
    ("run --chat", "<&-", 0, "ggml-sched: a small model on CPU (CpuBackend)\n"),
    ("pack -", "<&-", 1, "ggml-sched: error: -: empty; expected a header with lower, upper, size\n"),
    ("run -n 1", "2>&-", 0, ""),
    ("plan missing.json", "2>&-", 1, ""),
])
def test_a_stream_that_is_closed_is_empty(command, closed, code, said):
    if command.startswith("run"):
        pytest.importorskip("tokenizers")
    done = subprocess.run(["sh", "-c", f'"$0" -m ggml_sched {command} {closed}', sys.executable], capture_output=True,
                          text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert (done.returncode, done.stderr) == (code, said)
    if closed == "2>&-":
        assert "error" not in done.stdout
