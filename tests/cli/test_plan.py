"""`ggml-sched plan`: on configurations of backends, and on devices, where the first line says whether it fits."""

import re
import subprocess
import sys

import pytest
from small_llama import SMALL

from ggml_sched import cli, save_graph
from ggml_sched.llama import load, open_gguf

GPU, HOST = ["--device", "GPU0:1GiB:1000GB/s:80TF"], ["--device", "CPU:1GiB:60GB/s:1TF"]


@pytest.fixture
def graph_files(tmp_path):
    paths = [str(tmp_path / "token.json.gz"), str(tmp_path / "prompt.json")]
    with load(SMALL, n_ctx=32) as model:
        for path, n in zip(paths, (1, 8), strict=True):
            save_graph(model.batch_graph(n, 32).graph, path)
    return paths


def printed(capsys, *argv, code=0):
    assert cli.main(["plan", *argv]) == code
    streams = capsys.readouterr()
    assert streams.err == ""
    return streams.out


def test_the_first_line_says_whether_it_fits(graph_files, capsys):
    out = printed(capsys, *graph_files, *GPU, *HOST, "--link", "25GB/s:8us")
    assert out.splitlines()[0].startswith("yes: all of it fits")
    assert re.search(r"^device +memory +weights +cache +arena +reserve +left$", out, re.M)
    assert re.findall(r"^(\d+ tokens?): \d+ nodes, \d+ splits, .* by the speeds of the devices$", out, re.M) == [
        "1 token", "8 tokens"]
    assert len(re.findall(r"^  GPU0 ", out, re.M)) == 2, "a row in the table of each plan"


def test_what_does_not_fit_is_no_error_and_the_exit_code_says_so(graph_files, capsys):
    small = ["--device", "GPU0:4KiB:1000GB/s:80TF", "--device", "CPU:4KiB:60GB/s:1TF"]
    out = printed(capsys, *graph_files, *small, code=1)
    assert out.startswith("it does not fit: ")


def test_a_part_on_the_host(graph_files, capsys):
    out = printed(capsys, *graph_files, "--device", "GPU0:48KiB:1000GB/s:80TF", *HOST)
    assert re.match(r"in part: \d+% fits GPU0|no: all of it is on CPU|yes: it fits GPU0", out)


def test_a_model_file_needs_its_metadata_alone(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    out = printed(capsys, str(path), *GPU, *HOST, "--context", "32", "--batch", "8", "--splits")
    assert out.startswith("yes: ") and re.search(r"^  split +backend", out, re.M)


def test_a_context_that_is_longer_than_the_model_was_trained_with_is_named(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    with open_gguf(SMALL) as file:
        trained = file.metadata["llama.context_length"]
    for context, named in ((trained, False), (2 * trained, True)):
        out = printed(capsys, str(path), *GPU, *HOST, "--context", str(context), "--batch", "8")
        line = f"{path} was trained with {trained} tokens: a context of {context} is longer"
        assert (out.splitlines()[-1] == line) is named


def test_peaks_are_listed_on_demand(graph_files, capsys):
    for where in (["--backends", "c2half"], [*GPU, *HOST]):
        plain = printed(capsys, graph_files[0], *where)
        out = printed(capsys, graph_files[0], *where, "--peaks")
        assert "peak at" not in plain
        assert re.search(r"^GPU0: arena [\d,]+ bytes, live [\d,]+$", out, re.M) and "alone saves" in out


def test_a_model_file_without_devices_is_an_error_that_says_so(tmp_path, capsys):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    assert cli.main(["plan", str(path)]) == 1
    assert f"{path}: a model file is planned for devices, such as --device 4090" in capsys.readouterr().err


def test_without_devices_each_file_is_planned_by_itself(graph_files, capsys):
    out = printed(capsys, *graph_files, "--backends", "c1", "--steps")
    assert [line.partition(":")[0] for line in out.splitlines() if "policy default" in line] == graph_files
    assert len(re.findall(r"^c1: ", out, re.M)) == 2


@pytest.mark.parametrize(("argv", "said"), [
    (["--device", "4095"], "device '4095': no well-known device"),
    (["--device", "4090", "--link", "fast"], "link 'fast'"),
    (["--device", "GPU0:1GiB:0GB/s:1TF"], "device 'GPU0': bandwidth is 0 "),
    ([*GPU, *HOST, "--pin", "nothing=CPU"], "nothing"),
])
def test_devices_that_cannot_be_read_are_an_error_of_one_line(graph_files, capsys, argv, said):
    assert cli.main(["plan", *graph_files, *argv]) == 1
    streams = capsys.readouterr()
    assert streams.err.count("\n") == 1 and said in streams.err and streams.out == ""


def test_a_plan_and_another_policy_s_are_drawn_side_by_side(graph_files, capsys, tmp_path):
    drawing = tmp_path / "plan.svg"
    out = printed(capsys, graph_files[1], "--backends", "c2half", "--other", "seed", "--svg", str(drawing))
    assert out.endswith(f"\ndrawn in {drawing}\n")
    text = drawing.read_text(encoding="utf-8")
    assert text.startswith("<svg") and ">policy default: " in text and ">policy seed: " in text


def test_two_configurations_are_drawn_side_by_side_and_one_alone(graph_files, capsys, tmp_path):
    drawing = tmp_path / "plan.svg"
    printed(capsys, graph_files[0], "--backends", "c1", "c2half", "--svg", str(drawing))
    text = drawing.read_text(encoding="utf-8")
    assert ">token c1: " in text and ">token c2half: " in text
    printed(capsys, graph_files[0], graph_files[0], "--backends", "c1", "--svg", str(drawing))
    text = drawing.read_text(encoding="utf-8")
    assert ">token c1: " in text and ">token c1 (2): " in text, "files of one name"
    printed(capsys, graph_files[0], "--backends", "c1", "--svg", str(drawing))
    assert ">token c1: " in drawing.read_text(encoding="utf-8")


def test_the_page_of_a_placement_has_the_plan_that_llama_cpp_can_have_beside_it(graph_files, capsys, tmp_path):
    pytest.importorskip("bokeh", reason="needs the extra view")
    page = tmp_path / "plan.html"
    out = printed(capsys, graph_files[0], *GPU, *HOST, "--other", "stock", "--html", str(page))
    assert f"{page} shows it in a browser" in out
    assert re.findall(r'<h2 class="plan-name">([^<]*)<', page.read_text(encoding="utf-8")) == ["ours, 1 token",
                                                                                              "stock llama.cpp"]


def test_a_page_has_a_tab_for_each_graph_with_the_other_plan_of_it(graph_files, capsys, tmp_path):
    pytest.importorskip("bokeh", reason="needs the extra view")
    page = tmp_path / "plan.html"
    printed(capsys, *graph_files, *GPU, *HOST, "--other", "stock", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r'<button data-tab="\d">([^<]*)<', text)
    assert len(titles) == 2 and titles[0] == "1 token"
    assert re.findall(r'<h2 class="plan-name">([^<]*)<', text) == [
        name for title in titles for name in (f"ours, {title}", "stock llama.cpp")]
    printed(capsys, graph_files[0], "--html", str(page))
    titles = re.findall(r'<button data-tab="\d">([^<]*)<', page.read_text(encoding="utf-8"))
    assert titles == [f"token {config}" for config in ("c1", "c2half", "c2full", "c4")]


@pytest.mark.parametrize("options, why", [
    (["--svg", "x.svg"], "--svg draws one plan or two, and there are 4: name one graph, and one of"),
    (["--backends", "c1", "c2half", "--other", "seed", "--svg", "x.svg"], "there are 2, each by two policies"),
    (["--other", "seed"], "--other names a plan to draw: give --svg or --html, too"),
    (["--backends", "c1", "--other", "stock", "--svg", "x.svg"], "--other stock is for a placement"),
])
def test_what_cannot_be_drawn_is_refused_before_planning(graph_files, capsys, options, why):
    assert cli.main(["plan", graph_files[0], *options]) == 1
    streams = capsys.readouterr()
    assert why in streams.err and not streams.out


@pytest.mark.parametrize("placed", [[], [*GPU, *HOST]], ids=["configuration", "placement"])
def test_files_that_cannot_be_drawn_are_refused_before_planning(graph_files, capsys, tmp_path, placed):
    pytest.importorskip("bokeh", reason="needs the extra view")
    graph, *_ = graph_files
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for options, why in (
            (["--html", f"{tmp_path}/none/x.html"], "--html: No such file or directory"),
            (["--svg", str(tmp_path)], "--svg: Is a directory"),
            (["--svg", f"{tmp_path}/x", "--html", f"{tmp_path}/./x"], "/./x would replace the file of --svg"),
            (["--svg", graph], f"--svg {graph} would replace {graph}")):
        assert cli.main(["plan", graph, *(placed or ["--backends", "c1"]), *options]) == 1
        streams = capsys.readouterr()
        assert why in streams.err and not streams.out
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    printed(capsys, graph, *(placed or ["--backends", "c1"]), "--svg", "/dev/null", "--html", "/dev/null")


@pytest.mark.parametrize("options, words", [
    (["--device", "4090", "--policy", "seed"], "--policy is not for plans with --device or --measure"),
    (["--device", "4090", "--alignment", "256"], "--alignment is not for plans with --device or --measure"),
    (["--device", "4090", "--backends", "c1"], "--backends is not for plans with --device or --measure"),
    (["--pin", "*=CPU"], "--pin is not for plans without --device or --measure"),
    (["--link", "1GB/s"], "--link is not for plans without --device or --measure"),
    (["--goal", "512+1"], "--goal is not for plans without --device or --measure"),
    *(([option, *value], f"{option} is not for plans without --device or --measure") for option, *value in (
        ("--context", "7"), ("--batch", "3"), ("--sequences", "9"), ("--kv-type", "q4_0"), ("--no-flash",),
        ("--fill", "0.1"), ("--within", "7"))),
    (["--device", "4090", "--context", "7"], "--context is for model files"),
])
def test_options_that_would_change_nothing_are_errors(graph_files, capsys, options, words):
    assert cli.main(["plan", graph_files[0], *options]) == 1
    said = capsys.readouterr()
    assert words in said.err and said.out == ""


def test_a_drawing_goes_to_a_pipe(graph_files):
    done = subprocess.run(["bash", "-c", 'exec "$0" -m ggml_sched plan "$1" --backends c1 --svg >(cat >&2)',
                           sys.executable, graph_files[0]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr.startswith("<svg") and "drawn in /dev/fd/" in done.stdout
