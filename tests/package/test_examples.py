"""Every example runs with warnings as errors."""

import io
import itertools
import re
import runpy
from pathlib import Path

import pytest
from processes import run_python

from ggml_sched import llama

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAID = {
    "batch_server": "tokens of 5 requests in",
    "chat": "tokens were there]",
    "generate_text": "ended by 'stop'",
    "openai_shapes": "streamed the same: True",
    "python_backend": "2 splits",
    "run_model": "generated: [",
    "two_backends": "alive at the peak",
}
"""A part of each example's expected output."""
NEEDS = {"batch_server": ("tokenizers",), "chat": ("tokenizers", "jinja2"), "generate_text": ("tokenizers",),
         "openai_shapes": ("tokenizers", "jinja2")}
"""Modules that each example needs beside numpy."""


def run(*argv) -> str:
    done = run_python("-X", "dev", "-W", "error", *argv)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    for name in NEEDS.get(path.stem, ()):
        pytest.importorskip(name)
    assert SAID[path.stem] in run(str(path))


def test_example_with_a_model_file():
    model = ROOT / "tests" / "data" / "models" / "tiny-llama-q4_0.gguf"
    assert "vocabulary" in run(str(ROOT / "examples" / "run_model.py"), str(model))


def test_a_chat_goes_on_when_its_context_is_full(monkeypatch, capsys):
    pytest.importorskip("jinja2")
    lines = "".join("x = [" + ", ".join(str(k * n) for n in range(60)) + "]\n" for k in range(1, 16))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    monkeypatch.setattr("sys.argv", ["chat.py", str(llama.small_model())])
    runpy.run_path(str(ROOT / "examples" / "chat.py"))
    counts = [int(n) for n in re.findall(r"of (\d+) tokens were there", capsys.readouterr().out)]
    assert len(counts) == 15 and max(counts) <= 2048 - 40
    assert any(after < before for before, after in itertools.pairwise(counts)), "the oldest turns are forgotten"


def test_requests_that_share_a_batch_have_the_texts_that_they_have_alone():
    pytest.importorskip("tokenizers")
    server = runpy.run_path(str(ROOT / "examples" / "batch_server.py"))["Server"]
    prompts = ["import os", "def area(self):", "class Point:", "x ="]
    with llama.load(llama.small_model(), n_ctx=64, n_seq=3) as model:
        alone = []
        for prompt in prompts:
            model.reset()
            alone.append(model.generate(prompt, 10).read())
        model.reset()
        served = server(model, 3)
        texts = [[] for _ in prompts]
        requests = [served.submit(prompt, 10, text.append) for prompt, text in zip(prompts, texts, strict=True)]
        stopped = served.submit("import sys", 30, [].append)
        with pytest.raises(ValueError, match="do not fit a context of 64"):
            served.submit("import os", 64, print)
        while served.step():
            assert sum(len(request.pending) for request in served.running.values()) <= 3    # one token each
            if stopped not in served.waiting:
                served.cancel(stopped)
        assert ["".join(text) for text in texts] == alone
        assert [request.finish_reason for request in requests] == ["length"] * 4
        assert stopped.finish_reason == "cancelled" and model.n_free == model.n_ctx


def test_a_client_that_fails_or_has_nothing_to_do_leaves_the_texts_of_others():
    pytest.importorskip("tokenizers")
    make = runpy.run_path(str(ROOT / "examples" / "batch_server.py"))["Server"]
    with llama.load(llama.small_model(), n_ctx=256, n_seq=3, n_threads=1) as model:
        alone, last = model.generate("class Point:", 20).read(), []
        model.reset()
        server, text, failed = make(model, 3), [], 0
        for prompt, n in (("", 5), ("import", 0), ("import", -1)):
            with pytest.raises(ValueError, match="needs one token or more"):
                server.submit(prompt, n, print)
        gone = server.submit("import os", 8, lambda piece: 1 / 0)
        last.append(server.submit("x = 1", 1, lambda piece: server.cancel(last[0])))
        good = server.submit("class Point:", 20, text.append)
        while server.running or server.waiting:
            try:
                server.step()
            except ZeroDivisionError:
                failed += 1
        assert "".join(text) == alone and failed == 1
        assert [request.finish_reason for request in (gone, *last, good)] == ["failed", "cancelled", "length"]
        assert model.n_free == model.n_ctx


def test_what_openai_calls_by_other_names_and_what_is_not_served():
    pytest.importorskip("jinja2")
    complete = runpy.run_path(str(ROOT / "examples" / "openai_shapes.py"))["complete"]
    messages = [{"role": "user", "content": "class Point:"}]
    with llama.load(llama.small_model(), n_ctx=128) as model:
        answer = complete(model, {"messages": messages, "max_completion_tokens": 4, "temperature": 0})
        assert answer["object"] == "chat.completion" and answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 4
        assert "on CPU (CpuBackend)" in repr(model)
        nulls = {"max_completion_tokens": None, "max_tokens": 4, "n": None, "temperature": 0}
        assert complete(model, {"messages": messages, **nulls})["usage"]["completion_tokens"] == 4
        with pytest.raises(ValueError, match="needs messages"):
            complete(model, {"max_tokens": 4})
        for wrong in ({"tools": []}, {"n": 2}):
            with pytest.raises(ValueError, match="not served"):
                complete(model, {"messages": messages, **wrong})
