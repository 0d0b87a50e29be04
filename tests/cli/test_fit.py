"""`ggml-sched fit`: whether it fits, as text and as JSON, for model files and graph files; and where it does not."""

from __future__ import annotations

import json
import re
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
from sparse_models import LLAMA_7B, LLAMA_70B, sparse_model

import ggml_sched as gs
from ggml_sched import cli
from ggml_sched.backends.store import has_slots
from ggml_sched.cli.devices import link_of
from ggml_sched.llama import random_llama
from ggml_sched.placement import measured

GRAPHS = Path(__file__).resolve().parents[1] / "data" / "graphs"
TINY = {**LLAMA_7B, "vocab_size": 512, "embedding_length": 256, "block_count": 4, "feed_forward_length": 704,
        "attention.head_count": 8, "attention.head_count_kv": 8, "rope.dimension_count": 32}
CPU = "CPU:64GiB:60GB/s:1TF"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(sparse_model(tmp_path_factory.mktemp("models") / "tiny.gguf", metadata=TINY))


def run(*arguments: str) -> int:
    return cli.main(["fit", *arguments])


def test_the_first_line_says_whether_it_fits(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "GPU0:24GiB:1000GB/s:80TF", "--device", CPU) == 0
    assert capsys.readouterr().out.startswith("yes: all of it fits GPU0 (")
    assert run(tiny, "--device", "GPU0:1MiB:1000GB/s:80TF", "--device", CPU, "--context", "64", "--batch", "8") == 0
    assert capsys.readouterr().out.startswith("in part: ")


def test_a_row_for_each_device_and_kind_and_graph(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "4090", "--device", "GPU1=3060", "--link", "25GB/s:8us", "--context", "128") == 0
    lines = capsys.readouterr().out.splitlines()
    for start in ("4090 ", "GPU1 ", "CPU ", "blk.*.ffn_up.weight ", "cache_k_l* ", "1 token ", "128 tokens ",
                  "assumed:"):
        assert any(line.startswith(start) for line in lines), start


@pytest.mark.parametrize("goal, others", [("64+16", "none at all"),
                                          ("decode", "none that does so in the graphs without a weight")])
def test_what_the_bounds_cover_is_printed(tiny: str, goal: str, others: str,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "4090", "--device", CPU, "--context", "64", "--batch", "64", "--goal", goal) == 0
    assert f"; {others} takes less than " in capsys.readouterr().out


def test_json_is_the_answer(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "4090", "--device", CPU, "--json", "--goal", "64+16", "--batch", "64") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["goal"] == [16.0, 1.0]
    assert {row["device"] for row in data["memory"]} == {"4090", "CPU"}
    assert data["bound"] <= data["seconds"]


@pytest.mark.parametrize(("text", "part"), [("2%", 0.02), ("12.5%", 0.125), ("0.03", 0.03)])
def test_a_gap_is_a_part_or_a_percentage(text: str, part: float, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "4090", "--device", CPU, "--context", "64", "--batch", "8", "--json",
               "--within", text) == 0
    assert json.loads(capsys.readouterr().out)["within"] == part


def test_json_says_that_nothing_fits(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "CPU:1MiB:60GB/s:1TF", "--json", "--context", "8192", "--batch", "16") == 1
    streams = capsys.readouterr()
    data = json.loads(streams.out)
    assert (data["fits"], data["device"], data["available"], streams.err) == (False, "CPU", 1 << 20, "")
    assert data["needed"] > data["available"]
    assert data["why"][0].startswith("it does not fit: the weights take ")
    assert run(tiny, "--device", CPU, "--json", "--context", "8192", "--batch", "16") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"]
    assert data["notes"] == [f"{tiny} was trained with 4096 tokens: a context of 8192 is longer"]


def test_a_disk_is_fetched_from_where_the_weights_do_not_fit(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [tiny, "--device", "CPU:2MiB:60GB/s:1TF", "--context", "64", "--batch", "8"]
    assert run(*options) == 1
    assert capsys.readouterr().out.startswith("it does not fit: ")
    assert run(*options, "--disk", "2GB/s:100us", "--explain", "blk.0.ffn_up.weight") == 0
    out = capsys.readouterr().out
    assert out.startswith("not without a disk: each evaluation fetches ") and "from file at 2 GB/s" in out
    assert "\nblk.0.ffn_up.weight: " in out and "with 1 GiB more on CPU" in out
    assert run(*options, "--disk", "2GB/s:100us", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] and data["devices"][0]["fetch"] == {"bandwidth": 2e9, "latency": 1e-4}
    assert data["fetching"]["nbytes"] > 0 and data["memory"][0]["left"] >= 0
    assert data["graphs"][0]["fetches"] >= data["fetching"]["nbytes"] / 2e9
    assert run(*options, "--disk", "2GB/s:100us", "--json", "--context", "4096") == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["fits"] and data["needed"] > data["available"] == 2 << 20
    assert any("a window of the weights" in line for line in data["why"])


@pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")
def test_experts_that_do_not_fit_have_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "experts.gguf"
    path.write_bytes(random_llama(7, n_vocab=120, n_embd=64, n_layer=3, n_head=4, n_ff=192, n_expert=8))
    options = [str(path), "--device", "CPU:2400KiB:60GB/s:1TF", "--disk", "2GB/s:100us", "--context", "64",
               "--batch", "8"]
    assert run(*options, "--explain", "blk.0.ffn_up_exps.weight") == 0
    out = capsys.readouterr().out
    assert out.startswith("not without a disk: each evaluation reads about ") and " of experts; all else fits" in out
    assert "\nassumed: each token chooses its experts at random" in out and "\nblk.0.ffn_up_exps.weight: " in out
    assert run(*options, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    found, host = data["fetching"]["experts"], data["memory"][0]
    assert 8 <= found["slots"] < found["experts"] == 24 and len(found["weights"]) == 9
    assert host["slots"] == found["slots"] * found["slot_nbytes"] and host["left"] >= 0
    assert data["graphs"][0]["fetches"] >= found["nbytes"][0] / 2e9 > 0


def test_links_that_are_assumed_are_named(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    for options, named in (((), True), (("--link", "25GB/s:8us"), False)):
        assert run(tiny, "--device", "4090", "--device", CPU, "--context", "64", *options) == 0
        assert ("assumed: links of 25 GB/s and 8 us\n" in capsys.readouterr().out) is named


def test_pins_and_explanations(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "4090", "--device", CPU, "--pin", "blk.1.*=CPU", "--explain", "blk.1.ffn_up.weight",
               "--context", "64", "--json") == 0
    residents = json.loads(capsys.readouterr().out)["residents"]
    assert {device for name, device in residents.items() if name.startswith("blk.1.")} == {"CPU"}
    assert run(tiny, "--device", "4090", "--device", CPU, "--explain", "blk.1.ffn_up.weight", "--context", "64") == 0
    assert "blk.1.ffn_up.weight: " in capsys.readouterr().out


def test_a_70b_model_is_fitted_from_its_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sparse_model(tmp_path / "70b.gguf", metadata=LLAMA_70B)
    assert path.stat().st_size > 36 << 30
    assert run(str(path), "--device", "24=4090", "--device", CPU, "--context", "2048", "--within", "2%") == 0
    assert capsys.readouterr().out.startswith("in part: ")


def test_what_does_not_fit_says_so_with_the_context_that_does(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "CPU:8MiB:60GB/s:1TF", "--context", "16384", "--batch", "16") == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert third.endswith(" was trained with 4096 tokens: a context of 16384 is longer")
    assert first.startswith("it does not fit: the weights take ")
    largest = int(second.split()[3])
    assert second == f"a context of {largest} tokens fits"
    assert run(tiny, "--device", "CPU:8MiB:60GB/s:1TF", "--context", str(largest), "--batch", "16") == 0


@pytest.mark.parametrize(("kib", "context", "said"), [
    (2120, 63, "a context of 32 tokens fits"), (2340, 120, "a context of 96 tokens fits"),
    (1980, 63, "no context fits, not even of 32 tokens: ")])
def test_the_context_that_fits_is_just_below_one_that_is_no_multiple(tiny: str, kib: int, context: int, said: str,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    device = f"CPU:{kib}KiB:60GB/s:1TF"
    assert run(tiny, "--device", device, "--context", str(context), "--batch", "1") == 1
    assert capsys.readouterr().out.splitlines()[1].startswith(said)


def test_pins_that_leave_no_room_are_what_does_not_fit(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "GPU0:1MiB:1TB/s:80TF", "--device", CPU, "--context", "64", "--pin", "*=GPU0") == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("it does not fit: the weights take ") and " of its 1.00 MiB" in first
    assert last == "without the pins it fits"


def test_pins_that_contradict_each_other_are_errors(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    for pins in (("blk.0.*=4090", "blk.0.ffn*=CPU"), ("output.weight=4090", "output.weight=CPU")):
        assert run(tiny, "--device", "4090", "--device", CPU, *(f"--pin={pin}" for pin in pins)) == 1
        assert re.search(r"pins 'blk.0.\*' and 'blk.0.ffn\*' put 'blk.0.ffn_\w+.weight' on 4090 and on CPU"
                         r"|output.weight is pinned to 4090, too", capsys.readouterr().err)


def test_a_pinned_name_counts_more_than_a_pattern(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    for pins in (("blk.0.*=4090", "blk.0.ffn_up.weight=CPU"), ("blk.0.ffn_up.weight=CPU", "blk.0.*=4090")):
        assert run(tiny, "--device", "4090", "--device", CPU, "--json", *(f"--pin={pin}" for pin in pins)) == 0
        residents = json.loads(capsys.readouterr().out)["residents"]
        assert {name for name, device in residents.items() if device == "CPU" and name.startswith("blk.0.")} == {
            "blk.0.ffn_up.weight"}


def test_what_is_pinned_to_the_host_is_not_said_to_cost_little(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "4090", "--device", CPU, "--pin", "blk.0.ffn*=CPU", "--context", "64") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "cost as little" not in first
    assert re.match(r"(yes: all but the [\d.]+ \w+ pinned to CPU fits 4090|in part: )", first)


def test_a_context_that_is_longer_than_the_model_was_trained_with_is_named(tiny: str,
                                                                           capsys: pytest.CaptureFixture[str]) -> None:
    longer = f"{tiny} was trained with 4096 tokens: a context of 8192 is longer"
    assert run(tiny, "--device", "4090", "--context", "8192") == 0
    assert capsys.readouterr().out.splitlines()[-1] == longer
    assert run(tiny, "--device", "GPU0:1MiB:1TB/s:80TF", "--device", "CPU:1MiB:1GB/s:1TF", "--context", "8192") == 1
    assert capsys.readouterr().out.splitlines()[-1] == longer
    assert run(tiny, "--device", "4090", "--n-ctx", "4096") == 0
    assert "trained" not in capsys.readouterr().out


def test_json_has_explanations(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", "4090", "--json", "--explain", "output.weight", "--context", "64") == 0
    assert json.loads(capsys.readouterr().out)["explain"]["output.weight"].startswith("output.weight: ")


def test_graph_files_are_the_graphs_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(GRAPHS / f"llama-160m-{kind}.json.gz") for kind in ("decode", "prefill512")]
    assert run(*files, "--device", "GPU0:24GiB:1000GB/s:80TF", "--device", CPU, "--goal", "512+256") == 0
    assert "256 times 1 token and 512 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--context", "7"], ["--batch", "3"], ["--sequences", "2"], ["--kv-type", "q4_0"],
                                     ["--no-flash"]])
def test_options_of_model_files_are_errors_for_graph_files(options: list[str],
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(next(GRAPHS.glob("*.json.gz"))), "--device", "4090", *options) == 1
    said = capsys.readouterr()
    assert f"{options[0]} is for model files" in said.err and not said.out


def test_a_name_that_cannot_be_explained_is_an_error_before_anything_is_printed(
        tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "fit.svg"
    assert run(tiny, "--device", CPU, "--context", "64", "--explain", "nosuch", "--svg", str(drawing)) == 1
    said = capsys.readouterr()
    assert "nosuch" in said.err and not said.out and not drawing.exists()


def test_several_model_files_share_the_devices(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, tiny, "--device", "4090", "--device", CPU, "--context", "64", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["graphs"]) == 4


def test_prompts_of_several_models_count_whatever_their_lengths(tiny: str, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    short = str(sparse_model(tmp_path / "short.gguf", metadata={**TINY, "context_length": 256}))
    assert run(tiny, short, "--device", "4090", "--device", CPU, "--context", "0", "--batch", "1024", "--json",
               "--goal", "512+256") == 0
    assert json.loads(capsys.readouterr().out)["goal"] == [256.0, 0.5, 256.0, 2.0]


def test_backends_of_this_machine_are_measured(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run(tiny, "--measure", "--context", "64", "--batch", "8") == 0
    assert "measured: the speeds of CPU" in capsys.readouterr().out


def test_measured_links_count_unless_the_command_line_has_one(tiny: str, capsys: pytest.CaptureFixture[str],
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = gs.Device("CUDA0", 1 << 30, 1e12, 1e14), gs.Device("CPU", 1 << 36, 6e10, 1e12, host=True)
    slow = gs.Link(1.0, 10.0)
    monkeypatch.setattr(measured, "measured_devices", lambda backends: (
        (gpu, cpu), {("CUDA0", "CPU"): slow, ("CPU", "CUDA0"): slow, ("driver", "CPU"): slow}))

    def homes(*arguments: str) -> set[str]:
        assert run(tiny, "--measure", "--context", "64", "--batch", "8", "--json", *arguments) == 0
        return set(json.loads(capsys.readouterr().out)["residents"].values())

    assert homes() == {"CPU"}
    assert "CUDA0" in homes("--link", "25GB/s:8us")
    assert "CUDA0" in homes("--link", "CPU,CUDA0=25GB/s:8us")
    other = "--device", "GPU1:1MiB:1GB/s:1TF", "--link", "CPU,GPU1=25GB/s:8us"
    assert homes(*other) == {"CPU"}
    assert "CUDA0" in homes(*other, "--link", "25GB/s:8us")


def test_a_link_of_the_command_line_is_that_of_both_directions() -> None:
    slow, fast = gs.Link(1.0, 10.0), gs.Link(25e9, 8e-6)
    measured_links = {("CUDA0", "CPU"): slow, ("CPU", "CUDA0"): slow, ("CUDA1", "CPU"): slow}
    for pair in ("CPU", "CUDA0"), ("CUDA0", "CPU"):
        args = Namespace(link=[f"{pair[0]},{pair[1]}=25GB/s:8us"], measured_links=measured_links)
        assert link_of(args) == {pair: fast, ("CUDA1", "CPU"): slow}


@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_measured_speeds_count_where_they_cannot_be_kept(tiny: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(backend, types):
        warnings.warn("overflow encountered in divide", RuntimeWarning, stacklevel=1)      # no message of this package
        return gs.measure(backend, types)

    (tmp_path / "config").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(measured, "measure", measure)
    assert run(tiny, "--measure", "--context", "64", "--batch", "8") == 0
    out, err = capsys.readouterr()
    assert "measured: the speeds of CPU" in out
    [line] = err.splitlines()
    assert line.startswith(f"ggml-sched: {tmp_path}/config/ggml-sched/devices.json cannot be written: ")
    assert line.endswith(": what was measured is not kept")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--goal", "much"], "--goal much"),
    (["--goal", f"1+1{400 * '0'}"], "--goal 1+1000"),
    (["--goal", f"1{308 * '0'}+1"], "from 1e-30 to 1e+30"),
    (["--within", "near"], "--within near"),
    (["--pin", "output"], "--pin output"),
    (["--pin", "output=TPU"], "TPU"),
    (["--device", "what"], "what"),
    (["--link", "fast"], "fast"),
    (["--disk", "fast"], "--disk fast"),
    (["--context", "-1"], "--context -1: at least 0"),
    (["--batch", "0"], "--batch 0: at least 1"),
    (["--sequences", "0"], "--sequences 0: at least 1"),
])
def test_wrong_options_are_errors(tiny: str, arguments: list[str], message: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny, "--device", CPU, "--context", "64", *arguments) == 1
    assert message in capsys.readouterr().err


def test_an_answer_is_drawn_above_another(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [tiny, "--device", "GPU0:1MiB:1000GB/s:80TF", "--device", CPU, "--context", "64", "--batch", "8"]
    large = [tiny, "--device", "GPU0:2MiB:1000GB/s:80TF", "--device", CPU, "--context", "64", "--batch", "8"]
    drawing, before = tmp_path / "fit.svg", tmp_path / "before.json"
    assert run(*small, "--json", "--svg", str(drawing)) == 0
    out = capsys.readouterr().out
    before.write_text(out, encoding="utf-8")
    assert json.loads(out)["fits"] and ">before<" not in drawing.read_text(encoding="utf-8")
    assert run(*large, "--svg", str(drawing), "--before", str(before)) == 0
    assert capsys.readouterr().out.endswith(f"\ndrawn in {drawing}\n")
    text = drawing.read_text(encoding="utf-8")
    assert text.startswith("<svg") and text.count(">before<") == text.count(">after<") == 3
    assert run(*large, "--svg", str(drawing), "--before", "stock") == 0
    assert ">stock llama.cpp<" in drawing.read_text(encoding="utf-8")


@pytest.mark.parametrize("text, why", [
    ("{", "no JSON"), ("[]", "no answer that `ggml-sched fit --json` has printed"),
    ('{"fits": false}', "the answer is that it does not fit: there is nothing to draw"),
    ('{"devices": [], "memory": [{}], "graphs": [], "seconds": 1}', "not what Fit.to_dict returns: KeyError: 'device'"),
    ('{"devices": [], "memory": [], "graphs": [], "seconds": NaN}', "nan is no number from 0 on")])
def test_a_file_without_an_answer_is_refused(tiny: str, tmp_path: Path, text: str, why: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(text)
    assert run(tiny, "--device", CPU, "--svg", str(tmp_path / "x.svg"), "--before", str(tmp_path / "x.json")) == 1
    assert why in capsys.readouterr().err and not (tmp_path / "x.svg").exists()
    assert run(tiny, "--device", CPU, "--before", str(tmp_path / "x.json")) == 1
    assert "--before names an answer to draw: give --svg, too" in capsys.readouterr().err
