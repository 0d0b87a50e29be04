"""`ggml-sched run`: prints text while it is generated, on a terminal or not, until the end or an interrupt."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_llama import SHAPES, SMALL

import ggml_sched as gs
from ggml_sched import Device, cli
from ggml_sched.backends.cpu._kernels import interleaves
from ggml_sched.backends.store import has_slots
from ggml_sched.cli import run as run_command
from ggml_sched.llama import SMALL_PROMPT, load, open_gguf, random_llama, small_model
from ggml_sched.llama.gguf import GGUFFile
from ggml_sched.llama.kvcache import KV_TYPES
from ggml_sched.llama.text.tokenizer import Tokenizer
from ggml_sched.placement import measured
from ggml_sched.placement.specs import read_bytes

pytest.importorskip("tokenizers")
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "ggml_sched", "run", "--backend", "cpu", "--threads", "1"]
SECONDS = 60


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(SMALL)
    return path


def run(capsys, *argv: str) -> tuple[str, str]:
    code = cli.main(["run", *map(str, argv)])
    streams = capsys.readouterr()
    assert code == 0, streams.err
    return streams.out, streams.err


def continuation(prompt: str, n: int, **options) -> str:
    with load(small_model(), n_ctx=512, kv_type="f16") as model:
        return model.generate(prompt, n, **options).read()


def hosts(backends):
    """Each backend as a host of 16 GiB, as if it had been measured, and no link."""
    return tuple(Device(each.name, 1 << 34, 50e9, 1e12, host=True).on(each) for each in backends), {}


@pytest.fixture
def budget(monkeypatch):
    """A process that needs 70 MiB and 12,345 bytes besides its model."""
    def left(limit, n_vocab, n_nodes):
        found = (read_bytes(limit) - (70 << 20) - 12_345) >> 20 << 20
        if found <= 0:
            raise gs.OutOfMemory("the process holds much", None, read_bytes(limit) - found, read_bytes(limit))
        return found

    monkeypatch.setattr("ggml_sched.llama.process_budget", left)


def test_a_fit_names_a_context_that_is_longer_than_the_model_was_trained_with(model_file, capsys, monkeypatch):
    monkeypatch.setattr(measured, "measured_devices", hosts)
    with open_gguf(SMALL) as file:
        trained = file.metadata["llama.context_length"]
    for n_ctx, named in ((trained, False), (2 * trained, True)):
        _, err = run(capsys, model_file, "--fit", "--n-ctx", n_ctx, "--n-batch", 8, "--tokens", 1, "-n", 1)
        line = f"ggml-sched: {model_file} was trained with {trained} tokens: a context of {n_ctx} is longer\n"
        assert (line in err) is named


# -- text and ids ----------------------------------------------------------------------------


def test_without_a_model_there_is_text(capsys):
    out, err = run(capsys)
    assert out.startswith(SMALL_PROMPT) and len(out) > len(SMALL_PROMPT) + 100
    assert re.search(r"\bself\b|\breturn\b|\bdef\b", out[len(SMALL_PROMPT):])
    assert err.startswith("ggml-sched: a small model on ") and err.count("\n") == 1
    assert run(capsys)[0] == out        # the seed is fixed by default


def test_a_prompt_is_continued(capsys):
    out, err = run(capsys, "-p", "import os", "-n", 20, "--backend", "cpu")
    assert out == continuation("import os", 20) + "\n"
    assert "CpuBackend" in err
    assert run(capsys, small_model(), "-p", "import os", "-n", 20)[0] == out
    assert run(capsys, "-p", "import os", "-n", 20, "--echo")[0] == "import os" + out


def test_options_are_what_generate_takes(capsys):
    base = ("-p", "import os", "-n", 30)
    sampled = run(capsys, *base, "--temperature", 1, "--top-k", 5, "--top-p", 0.9, "--seed", 4)[0]
    assert sampled == continuation("import os", 30, temperature=1.0, top_k=5, top_p=0.9, seed=4) + "\n"
    whole = continuation("import os", 30)
    stop = whole[8:12]
    assert run(capsys, *base, "--stop", stop, "--stop", "never said")[0] == whole[: whole.find(stop)] + "\n"
    assert run(capsys, *base, "--no-flash", "--no-mmap", "--policy", "seed", "--n-batch", 1)[0]


def test_weights_stay_in_small_pages_where_told(capsys, monkeypatch):
    advised = []
    monkeypatch.setattr(GGUFFile, "prefer_huge_pages", lambda file: advised.append(file))
    out = run(capsys, "-p", "import os", "-n", 4, "--no-huge-pages")
    assert not advised
    assert run(capsys, "-p", "import os", "-n", 4)[0] == out[0] and advised


def test_rows_are_interleaved_where_told(capsys, tmp_path, monkeypatch):
    path, sizes, interleave = tmp_path / "m.gguf", [], gs.CpuBackend.interleave
    path.write_bytes(random_llama(3, dtype="q4_0", n_vocab=320, n_embd=256, n_ff=512, n_layer=2, n_ctx=64))
    monkeypatch.setattr(gs.CpuBackend, "interleave", lambda *given: sizes.append(interleave(*given)) or sizes[-1])
    base = ("run", path, "--tokens", "1,2,3", "-n", 5, "--backend", "cpu")
    assert cli.main([*map(str, base), "--interleave"]) == (0 if interleaves(int(gs.Type.Q4_0)) else 1)
    assert "no backend interleaves" in capsys.readouterr().err or sizes[0] > 0
    assert cli.main([*map(str, base)]) == 0 and len(sizes) == 1
    assert cli.main([*map(str, base), "--interleave", "--memory", "1GiB"]) == 1
    assert "--interleave keeps all weights in memory" in capsys.readouterr().err


def test_a_full_context_ends_the_text(capsys):
    out, err = run(capsys, "-p", "import os", "-n", 500, "--n-ctx", 32)
    assert err.endswith("ggml-sched: the context is full: --n-ctx makes room for more tokens\n")
    assert "full" not in run(capsys, "-p", "import os", "-n", 5, "--n-ctx", 32)[1]
    assert 32 < len(out) < 300


def test_any_number_of_backends_generates_the_same_ids(model_file, capsys):
    seen = set()
    for options in ([], ["--backend", "cpu"], ["--backend", "cpu", "cpu"], ["--backend", "cpu"] * 3,
                    ["--policy", "seed"], ["--n-batch", "2"]):
        n = max(options.count("cpu"), 1)
        out, err = run(capsys, model_file, "--tokens", "1,2,3", "-n", 5, "--stats", "--kv-type", "f32", *options)
        if options[:1] == ["--backend"]:
            assert re.findall(r"^(CPU\d*) ", err, re.M) == ([f"CPU{i}" for i in range(n)] if n > 1 else ["CPU"])
        seen.add(out)
    with load(model_file, n_ctx=32) as model:
        assert seen == {"generated: " + ",".join(map(str, model.generate([1, 2, 3], 5))) + "\n"}


def test_statistics_go_to_standard_error(model_file, capsys):
    out, err = run(capsys, model_file, "--tokens", "1,2,3", "-n", 5, "--stats")
    assert out.count("\n") == 1
    for word in ("small.gguf", "splits", "copies", "copied bytes", "time to plan", "work bytes", "tokens/s",
                 "KV cache"):
        assert word in err
    assert re.search(r"^prompt +3 .*\n^generation +4 ", err, re.M)
    assert re.search(r"; loaded in [\d.]+ m?s\n", err), "ids need no vocabulary"


def test_statistics_count_the_time_that_the_vocabulary_takes(capsys, monkeypatch):
    """A text needs the vocabulary, which is made when it is first used: a large one takes longer than the weights."""
    clock = [0.0]

    def made_slowly(metadata, make=Tokenizer.from_metadata):
        clock[0] += 2
        return make(metadata)

    monkeypatch.setattr(Tokenizer, "from_metadata", made_slowly)
    monkeypatch.setattr(run_command, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    err = run(capsys, "-p", "import", "-n", 2, "--stats")[1]
    assert re.search(r"; loaded in 0\S* \w+, its vocabulary in 2\.\S* s\n", err)


@pytest.mark.parametrize("option", ["--trace", "--record-experts"])
def test_a_recording_that_cannot_be_written_is_an_error_before_the_model_is_loaded(model_file, tmp_path, capsys,
                                                                                   monkeypatch, option):
    monkeypatch.setattr("ggml_sched.llama.load", lambda *arguments, **options: pytest.fail("loaded"))
    for path, why in ((tmp_path / "no" / "t.json", "No such file"), (tmp_path, "Is a directory")):
        assert cli.main(["run", str(model_file), "--tokens", "1", option, str(path)]) == 1
        said = capsys.readouterr()
        assert option in said.err and why in said.err and not said.out
    monkeypatch.undo()
    run(capsys, model_file, "--tokens", "1", "-n", 1, option, tmp_path / "written")
    assert {path.name for path in tmp_path.iterdir()} == {"small.gguf", "written"}


def test_a_limit_of_the_process_leaves_weights_in_the_file_and_says_what_that_costs(tmp_path, capsys, monkeypatch):
    path = tmp_path / "large.gguf"
    path.write_bytes(random_llama(2, n_vocab=64, n_embd=256, n_layer=8, n_head=4, n_ff=1024))
    free, _ = run(capsys, path, "--tokens", "1,2,3", "-n", 6, "--n-ctx", 64)
    left = {("12MiB", 0): 12 << 20}
    monkeypatch.setattr("ggml_sched.llama.process_budget", lambda limit, n_vocab, n_nodes: left[limit, n_vocab])
    out, err = run(capsys, path, "--tokens", "1,2,3", "-n", 6, "--n-ctx", 64, "--memory", "12MiB", "--stats")
    assert out == free
    assert re.search(r"of a limit of 12,582,912 bytes: [\d,]+ of weights that stay, [\d,]+ fetched for each token", err)
    heads = "store +weights fetched +bytes read +MB/s +stalled +bound of a token"
    assert re.search(rf"^{heads}\nfile +\d+ +[\d,]+ ", err, re.M)
    monkeypatch.undo()
    out, err = run(capsys, path, "--tokens", "1,2,3", "-n", 6, "--n-ctx", 64, "--memory", "100GiB", "--stats")
    assert out == free and "of weights that stay, which are all" in err
    assert cli.main(["run", str(path), "--tokens", "1", "--memory", "1MiB"]) == 1
    assert "the process holds" in capsys.readouterr().err
    assert cli.main(["run", str(path), "--tokens", "1", "--memory", "much"]) == 1
    assert "'much' is no size" in capsys.readouterr().err


def test_too_small_a_limit_is_refused_with_one_in_which_the_model_fits(tmp_path, capsys, budget):
    path = tmp_path / "large.gguf"
    path.write_bytes(random_llama(2, n_vocab=64, n_embd=256, n_layer=8, n_head=4, n_ff=1024))
    options = ["run", str(path), "--tokens", "1", "-n", "1", "--n-ctx", "64", "--memory"]
    for limit in "1MiB", "70MiB", "71.5MiB":
        assert cli.main([*options, limit]) == 1
        why = "the process holds much" if limit != "71.5MiB" else "the model needs .*"
        enough = re.search(rf"{why}; --memory (\d+)MiB is enough\n", capsys.readouterr().err)[1]
        assert cli.main([*options, f"{enough}MiB"]) == 0
        assert cli.main([*options, f"{int(enough) - 2}MiB"]) == 1
        capsys.readouterr()


def test_a_fit_in_too_small_a_limit_is_refused_with_one_in_which_the_model_fits(tmp_path, capsys, monkeypatch, budget):
    path = tmp_path / "large.gguf"
    path.write_bytes(random_llama(2, n_vocab=64, n_embd=256, n_layer=8, n_head=4, n_ff=1024))
    options = ["run", str(path), "--tokens", "1", "-n", "1", "--n-ctx", "64", "--n-batch", "8", "--fit", "--disk",
               "2GB/s", "--memory"]
    monkeypatch.setattr(measured, "measured_devices", hosts)
    for limit in "1MiB", "71.5MiB":
        assert cli.main([*options, limit]) == 1
        why = "the process holds much" if limit == "1MiB" else "nothing fits: .* would suffice.*"
        enough = re.search(rf"{why}; --memory (\d+)MiB is enough\n", capsys.readouterr().err)[1]
        assert cli.main([*options, f"{enough}MiB"]) == 0
        assert cli.main([*options, f"{int(enough) - 2}MiB"]) == 1
        capsys.readouterr()


@pytest.mark.parametrize(("backends", "n"), [(["cpu", "cpu"], "2"), (["processes:1"], "none")])
def test_a_limit_for_other_backends_than_one_is_refused_in_words_of_the_command_line(model_file, capsys, backends, n):
    assert cli.main(["run", str(model_file), "--tokens", "1", "--memory", "1GiB", "--backend", *backends]) == 1
    assert f"in the memory of this process, and --backend names {n} of those\n" in capsys.readouterr().err


@pytest.mark.parametrize("given", [(), ("CPU", 5000, 3000), ("CPU", None, 4000)])
def test_an_error_of_memory_that_is_not_of_the_limit_names_no_limit(model_file, capsys, monkeypatch, given):
    def load(*arguments, **options):
        raise gs.OutOfMemory("no memory", *given)

    monkeypatch.setattr("ggml_sched.llama.load", load)
    monkeypatch.setattr("ggml_sched.llama.process_budget", lambda limit, n_vocab, n_nodes: 4000)
    assert cli.main(["run", str(model_file), "--tokens", "1", "--memory", "100GiB"]) == 1
    err = capsys.readouterr().err
    assert "no memory" in err and "is enough" not in err


def test_a_fit_takes_no_limit_of_the_process_and_says_so_before_it_measures(model_file, capsys, monkeypatch):
    def measured_devices(backends):
        raise AssertionError("measured")

    monkeypatch.setattr(measured, "measured_devices", measured_devices)
    assert cli.main(["run", str(model_file), "--tokens", "1", "--fit", "--memory", "1GiB"]) == 1
    assert "it takes --memory only with --disk" in capsys.readouterr().err


def test_a_fit_with_a_disk_fetches_what_a_limit_does_not_hold(tmp_path, capsys, monkeypatch):
    path, trace = tmp_path / "large.gguf", tmp_path / "t.json"
    path.write_bytes(random_llama(2, n_vocab=64, n_embd=256, n_layer=8, n_head=4, n_ff=1024))
    options = [path, "--tokens", "1,2,3", "-n", 6, "--n-ctx", 64, "--n-batch", 8]
    free, _ = run(capsys, *options)
    monkeypatch.setattr(measured, "measured_devices", hosts)
    monkeypatch.setattr("ggml_sched.llama.process_budget", lambda limit, n_vocab, n_nodes: 12 << 20)
    out, err = run(capsys, *options, "--fit", "--memory", "12MiB", "--disk", "2GB/s", "--stats", "--trace", trace)
    assert out == free
    assert "ggml-sched: not without a disk: each evaluation fetches " in err
    assert re.search(r"of a limit of 12,582,912 bytes: [\d,]+ of weights that stay, [\d,]+ fetched for each token", err)
    assert "took / price" in err and '"price: fetch ' in trace.read_text(encoding="utf-8")
    assert cli.main(["run", str(path), "--tokens", "1", "--disk", "2GB/s"]) == 1
    assert "for --fit, which is not given" in capsys.readouterr().err


@pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")
def test_a_fit_with_a_disk_has_slots_for_experts(tmp_path, capsys, monkeypatch):
    path = tmp_path / "experts.gguf"
    path.write_bytes(random_llama(7, n_vocab=120, n_embd=64, n_layer=3, n_head=4, n_ff=192, n_expert=8))
    options = [path, "--tokens", "1,2,3", "-n", 6, "--n-ctx", 64, "--n-batch", 8]
    free, _ = run(capsys, *options)
    monkeypatch.setattr(measured, "measured_devices", hosts)
    monkeypatch.setattr("ggml_sched.llama.process_budget", lambda limit, n_vocab, n_nodes: 2_500_000)
    options += ["--fit", "--memory", "3MiB", "--disk", "2GB/s", "--stats"]
    out, err = run(capsys, *options)
    assert out == free
    assert "ggml-sched: not without a disk: each evaluation reads about " in err
    assert re.search(r"and \d+ slots of [\d,]+ for experts", err) and "hit rate" in err
    out, err = run(capsys, *options, "--experts", "whole")
    assert out == free and "slots of" not in err


def test_nothing_to_generate(model_file, capsys):
    out, err = run(capsys, model_file, "--tokens", "1,2", "-n", 0, "--stats")
    assert out == "generated: nothing\n" and "prompt" in err
    assert run(capsys, model_file, "--tokens", "1,2", "-n", 0, "--echo")[0] == "generated: 1,2\n"
    assert run(capsys, "-p", "import", "-n", 0)[0] == "\n"


def test_a_chat_reads_lines_from_a_pipe(capsys, monkeypatch):
    pytest.importorskip("jinja2")
    import io

    def chat(lines: str, *options) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return run(capsys, "--chat", "-n", 6, "--stop", "\n", *options)[0].splitlines()

    replies = chat("import\n\nreturn\n/exit\nclass\n")
    assert len(replies) == 2
    assert chat("import\nreturn\n") == replies
    assert chat("import\n") == replies[:1]
    assert len(chat("import\n", "--system", "def")) == 1
    assert chat("", "--stats") == []
    # A conversation that outgrows the context forgets its beginning.
    assert len(chat("import\nreturn\nclass\n" * 3, "--n-ctx", 96, "--system", "def")) == 9


@pytest.mark.parametrize("system", ["be brief", None])
def test_the_oldest_messages_are_forgotten_and_the_system_message_stays(system):
    class Model:
        n_ctx = 10

        def chat(self, messages, n, **options):
            return SimpleNamespace(stats=SimpleNamespace(n_prompt=4 * len(messages)))

    kept = [{"role": "system", "content": system}] if system else []
    messages = [*kept, *({"role": role, "content": str(i)} for i, role in enumerate(["user", "assistant"] * 3))][:-1]
    last = messages[-1]
    run_command._reply(SimpleNamespace(system=system, predict=4, stop=[]), Model(), messages, {})
    assert messages == [*kept, last]


def test_an_error_ends_a_chat_that_comes_from_a_pipe():
    pytest.importorskip("jinja2")
    done = subprocess.run([*COMMAND, "--chat", "-n", "4", "--n-ctx", "64"], cwd=ROOT, capture_output=True,
                          input=b"import os; " * 60 + b"\nimport os\n", timeout=SECONDS)
    assert done.returncode == 1 and done.stdout == b"" and b"do not fit a context of 64" in done.stderr


def test_a_reader_that_leaves_early_is_no_error():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*COMMAND, "-n", "40"], cwd=ROOT, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read().count(b"\n") <= 1      # where it runs
        assert process.wait() in (0, 1)


# -- a terminal -----------------------------------------------------------------------------------


class Terminal:
    """A process whose controlling terminal is a pseudo-terminal of ours."""

    def __init__(self, argv: list[str], **options) -> None:
        # The child makes the terminal its own: then control-C reaches it as from a keyboard.
        claim = ("import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
                 "os.execv(sys.argv[1], sys.argv[1:])")
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (24, 80))
        self.process = subprocess.Popen([sys.executable, "-c", claim, *argv], stdin=slave, cwd=ROOT,
                                        stdout=options.get("stdout", slave), stderr=slave, start_new_session=True)
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, start: int = 0) -> int:
        """Read until the text is there; where it ends."""
        deadline = time.monotonic() + SECONDS
        while text not in self.seen[start:]:
            assert time.monotonic() < deadline, f"{text!r} never came after {self.seen!r}"
            assert self._read(deadline) or text in self.seen[start:], f"{text!r} never came: {self.seen!r}"
        return self.seen.index(text, start) + len(text)

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(SECONDS)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"nothing came after {self.seen!r}"
        try:
            data = os.read(self.master, 4096)
        except OSError:         # the other side is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def test_control_c_stops_and_keeps_the_text():
    expected = continuation("import os", 2000)
    with Terminal([*COMMAND, "-p", "import os", "-n", "2000"]) as terminal:
        shown = expected[:12].replace("\n", "\r\n")
        terminal.wait_for(shown)
        terminal.type("\x03")
        assert terminal.end() == 130
        said = terminal.seen[terminal.seen.index(shown):].replace("\r\n", "\n").replace("^C", "").rstrip("\n")
        assert expected.startswith(said.rstrip()) and len(said) < len(expected)
        assert "Traceback" not in terminal.seen and "error" not in terminal.seen


def test_an_interrupt_before_any_text_is_quiet():
    with subprocess.Popen([*COMMAND, "--chat"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert process.stderr.readline().startswith(b"ggml-sched: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert process.stdout.read() == b"" and process.stderr.read() == b""


@pytest.fixture
def endless_file(tmp_path):
    """A model of random weights with the small one's vocabulary: its likeliest token is never the end."""
    with open_gguf(small_model()) as file:
        words = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    path = tmp_path / "endless.gguf"
    path.write_bytes(random_llama(3, **SHAPES | {"n_vocab": len(words["tokenizer.ggml.tokens"])}, extra=words))
    with load(path, n_ctx=64) as model:
        reply = model.chat([{"role": "user", "content": "import os"}], 2000, shift=True)
        assert reply.read() and reply.finish_reason == "length"
    return path


def test_a_chat_returns_to_its_prompt(endless_file):
    pytest.importorskip("jinja2")
    with Terminal([*COMMAND, endless_file, "--chat", "-n", "500000", "--n-ctx", "64"]) as terminal:
        terminal.type("import os\r")
        at = terminal.wait_for("\r\n", terminal.wait_for("> "))
        terminal.wait_for("\n", at)         # it replies, and would not end
        terminal.type("\x03")
        at = terminal.wait_for("> ", at)
        terminal.type("/exit\r")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.seen and "error" not in terminal.seen


def test_a_message_that_does_not_fit_can_be_said_in_another_way():
    pytest.importorskip("jinja2")
    with Terminal([*COMMAND, "--chat", "-n", "4", "--n-ctx", "64"]) as terminal:
        terminal.type("import os; " * 60 + "\r")
        at = terminal.wait_for("do not fit a context of 64", terminal.wait_for("> "))
        terminal.type("import os\r")
        terminal.wait_for("> ", terminal.wait_for("import os\r\n", terminal.wait_for("> ", at)))
        terminal.type("/exit\r")
        assert terminal.end() == 0
        assert terminal.seen.count("do not fit") == 1


def test_characters_that_the_output_has_no_bytes_for_are_question_marks():
    done = subprocess.run([*COMMAND, "-p", "x = 'é'", "--echo", "-n", "3"], cwd=ROOT, capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=SECONDS)
    assert done.returncode == 0 and done.stdout.startswith(b"x = '?'")


def test_the_command_knows_all_types_of_the_cache():
    assert run_command.KV_TYPES == KV_TYPES


SLOW = """
import sys, time
import ggml_sched.llama as llama
load = llama.load
def slow(*args, progress=None, **options):
    for done in range(0, 101, 10):
        if progress is not None:
            progress(done << 20, 100 << 20)
        time.sleep({pause})
    return load(*args, **options)
llama.load = slow
from ggml_sched.cli import main
sys.exit(main(["run", "-p", "import", "-n", "3", "--backend", "cpu"]))
"""


@pytest.mark.parametrize("pause", [0.1, 0.0])
def test_loading_shows_progress_when_it_takes_a_while(pause):
    pytest.importorskip("tqdm")
    with Terminal([sys.executable, "-c", SLOW.format(pause=pause)]) as terminal:
        assert terminal.end() == 0
        assert ("loading small.gguf" in terminal.seen) == (pause > 0)
        assert "ggml-sched: a small model on CPU" in terminal.seen


def test_progress_is_for_terminals():
    done = subprocess.run([sys.executable, "-c", SLOW.format(pause=0.08)], cwd=ROOT, capture_output=True, check=True)
    assert done.stderr.startswith(b"ggml-sched: ") and done.stderr.count(b"\n") == 1


# -- workers ---------------------------------------------------------------------------------


def test_workers_of_other_processes_give_the_same_text(capsys):
    local = run(capsys, "--backend", "cpu", "cpu", "--threads", "1", "-n", "12")[0]
    out, err = run(capsys, "--backend", "processes:2", "--threads", "1", "-n", "12")
    assert out == local
    assert "w0:CPU (RemoteBackend), w1:CPU (RemoteBackend)" in err


def test_workers_that_are_named_one_by_one_have_names_of_their_own(capsys):
    out, err = run(capsys, "--backend", "processes:1", "processes:1", "--threads", "1", "-n", "12")
    assert out == run(capsys, "--backend", "processes:2", "--threads", "1", "-n", "12")[0]
    assert "w0:CPU (RemoteBackend), w1:CPU (RemoteBackend)" in err


def test_a_fit_over_workers_alone_has_this_process_as_host(capsys, tmp_path, monkeypatch):
    """Workers are measured, and nothing of them is kept: a name stands for another machine tomorrow."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    out, err = run(capsys, "--backend", "processes:2", "--fit", "--threads", "1", "-n", "12")
    assert out == run(capsys, "--backend", "cpu", "--threads", "1", "-n", "12")[0]
    assert re.search(r"ggml-sched: yes: .*fits w[01]:CPU", err)
    assert not [*tmp_path.iterdir()]


def test_a_limit_of_the_process_is_not_spent_on_measuring(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(measured, "measure", lambda *arguments, **options: pytest.fail("measured in this process"))
    monkeypatch.setattr("ggml_sched.llama.process_budget", lambda limit, n_vocab, n_nodes: 64 << 20)
    options = ["--backend", "cpu", "--fit", "--memory", "64MiB", "--disk", "2GB/s", "--threads", "1", "-n", "4"]
    first = run(capsys, *options)
    kept, _ = measured.load_devices(measured.default_path())
    assert [device.name for device in kept] == ["CPU"]
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: pytest.fail("measured again"))
    assert run(capsys, *options)[0] == first[0]


@pytest.mark.parametrize("name, options", [
    ("ray:2", None), ("ray:2:cuda", {"num_gpus": 1}), ("ray:2:cuda:1", None), ("processes:2:cuda", None)])
def test_a_worker_of_ray_has_a_gpu_of_its_own(monkeypatch, name, options):
    """Ray hides the other ones from it."""
    from ggml_sched import remote

    class Asked(Exception):
        pass

    def connect(address, workers, backends, threads, transport, options):
        raise Asked(address, workers, backends, options)

    monkeypatch.setattr(remote, "connect", connect)
    with pytest.raises(Asked) as asked:
        cli.main(["run", "--backend", name, "--ray", "here:1"])
    address = "here:1" if name.startswith("ray") else None
    assert asked.value.args == (address, ["w0", "w1"], name.split(":", 2)[2:] or ["cpu"], options)


@pytest.mark.parametrize("name, said", [
    ("processes:0", "names no number of workers: processes:2"), ("ray", "names no number of workers: ray:2"),
    ("ray:2:tpu", "'tpu' is no backend"), ("rays:2", "known: .*ray:N, processes:N")])
def test_names_of_workers_that_are_none(capsys, name, said):
    assert cli.main(["run", "--backend", name]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("nodes", [False, True])
def test_a_trace_is_a_timeline_of_all_computes(model_file, capsys, tmp_path, nodes):
    path = tmp_path / "t.json"
    options = ["--tokens", "1,2,3", "-n", 4, "--stats", "--trace", path, *(["--trace-nodes"] if nodes else [])]
    out, err = run(capsys, model_file, *options)
    assert out == run(capsys, model_file, "--tokens", "1,2,3", "-n", 4)[0]
    assert f"ggml-sched: 4 computes are in {path}: open it in https://ui.perfetto.dev" in err
    assert re.search(r"^step +backend +what +took$", err, re.M) and "run " in err
    found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["name"] for event in found if event.get("cat") == "compute"]
    assert len(names) == 4 and names[0].endswith(", 3 tokens") and names[1].endswith(", 1 token")
    assert any("op" in event["args"] for event in found) == nodes


def test_a_trace_of_a_fit_has_the_prices_too(model_file, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "measured_devices", hosts)
    path = tmp_path / "t.json"
    _, err = run(capsys, model_file, "--fit", "--n-ctx", 64, "--n-batch", 8, "--tokens", 1, "-n", 2, "--stats",
                 "--trace", path)
    assert "took / price" in err and '"price: run ' in path.read_text(encoding="utf-8")


def test_a_trace_is_written_when_the_text_ends_early(model_file, tmp_path, capsys):
    path = tmp_path / "t.json"
    assert cli.main(["run", str(model_file), "--tokens", "1,99999", "--trace", str(path)]) == 1
    assert json.loads(path.read_text())["traceEvents"] == [] and "99999" in capsys.readouterr().err
    assert cli.main(["run", str(model_file), "--tokens", "1", "--trace-nodes"]) == 1
    assert "there is no --trace FILE" in capsys.readouterr().err
