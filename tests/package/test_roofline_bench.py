"""Parts of bench/roofline.py: what a token reads from memory, and where its time goes."""

import stat
import sys

import pytest
import roofline
from llama_bench import Program

import ggml_sched as gs
from ggml_sched import llama

SIZES = {"n_vocab": 96, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_head_kv": 1, "n_ff": 96}


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(llama.random_llama(3, **SIZES))
    with gs.CpuBackend(2) as cpu, llama.load(path, [cpu], n_ctx=128, kv_type="f16") as model:
        yield cpu, model


def weights_of_a_token():
    """Bytes of the f32 weights that a token of SIZES reads, its row of the embedding among them."""
    n, ff, kv = SIZES["n_embd"], SIZES["n_ff"], SIZES["n_embd"] // 2
    layer = 2 * n * n + 2 * n * kv + 3 * n * ff + 2 * n
    return 4 * (n + SIZES["n_layer"] * layer + n + n * SIZES["n_vocab"])


def test_a_token_reads_each_weight_once_and_the_used_rows_of_the_cache(model):
    _, model = model
    rows = SIZES["n_layer"] * 2 * 2 * (SIZES["n_embd"] // 2)        # bytes of one row of all caches, in f16
    for depth in (31, 47):
        assert roofline.needs(model, 1, depth, 1).nbytes == weights_of_a_token() + (depth + 1) * rows


def test_the_parts_of_a_token_add_up_to_its_time(model):
    cpu, model = model
    model.eval([*range(20)])
    parts = roofline.split(cpu, lambda: model.eval([7], last_only=True), 3)
    assert set(parts) == set(roofline.PARTS) and all(seconds >= 0 for seconds in parts.values())
    assert parts["products"] > 0 and parts["attention"] > 0 and parts["small nodes"] > 0 and parts["host"] > 0


@pytest.mark.parametrize(("n_tokens", "operations", "seconds"), [(2, 100, 5), (2, 1000, 10), (1, 1000, 5)])
def test_the_limit_of_a_batch_is_the_slower_of_reading_and_computing_and_that_of_a_token_is_reading(
        n_tokens, operations, seconds):
    row = roofline.Row(n_tokens, 50, operations, measured=[roofline.Limits(10.0, 1.0)], seconds=[20.0])
    assert row.least_seconds(100.0) == [seconds] and row.share(100.0) == seconds / 20


def test_each_turn_is_compared_with_the_bandwidth_of_its_own():
    row = roofline.Row(1, 60, 0, [*(roofline.Limits(speed, 1.0) for speed in (10, 20, 30))], [12.0, 4.0, 2.5])
    assert row.least_seconds(1.0) == [6, 3, 2] and row.share(1.0) == 0.75


def test_the_limits_of_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(roofline, "READ", 1 << 20)
    monkeypatch.setattr(roofline, "ROUNDS_OF_PRODUCTS", 1000)
    with roofline.compiled_limits() as library:
        limits = roofline.Loops(library, 2).measure()
        assert limits.bandwidth > 0 and limits.operations > 0


FAKE = """#!{python}
import json, sys
after = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--help" in sys.argv:
    print("{help}")
elif after["-t"] == "9":
    sys.exit("no such model")
else:
    tokens = after["-gp"].split(",")[1] if "-gp" in after else after["-n"] if "-d" in after else after["-p"]
    print(json.dumps([{{"samples_ns": [int(tokens) * {ns}], "arguments": sys.argv[1:]}}]))
"""


@pytest.fixture
def program(tmp_path):
    def made(name, ns, options="", help_text="-gp"):
        path = tmp_path / f"{name}-{ns}"
        path.write_text(FAKE.format(python=sys.executable, help=help_text, ns=ns))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return Program.parsed(f"{name}={path} {options}")

    return made


@pytest.mark.parametrize("help_text", ["-gp <pp,tg>", "-d, --n-depth <n>"])
def test_a_program_measures_tokens_after_others_and_prompts(program, help_text, tmp_path):
    found = program("other", 1000, "-rtr 1", help_text)
    assert found.decode(tmp_path, 2, 16, 32) == 1e-6 and found.prompt(tmp_path, 2, 512) == 512e-6
    assert found.command[1:] == ("-rtr", "1")


def test_a_program_that_fails_ends_the_benchmark_with_its_message(program, tmp_path):
    with pytest.raises(SystemExit, match="no such model"):
        program("other", 1000).prompt(tmp_path, 9, 512)


@pytest.mark.parametrize("text", ["name", "=command", "name=", "name= "])
def test_a_program_is_a_name_and_a_command(text):
    with pytest.raises(ValueError, match="NAME=COMMAND"):
        Program.parsed(text)


def test_the_best_settings_of_an_engine_count_in_each_turn(program):
    bench = roofline.Bench("file", type("Loops", (), {"threads": 1}), 1, False,
                           [program("a", 3000), program("a", 1000), program("b", 2000)])
    row = roofline.Row(1, 1, 1, seconds=[0.0005])
    bench._time_programs(row, lambda each: each.prompt("file", 1, 1000))
    assert row.others == {"a": [0.001], "b": [0.002]}
    assert row.ratio("a") == "2.00" and row.ratio("llama.cpp") == "-"


def test_the_page_has_a_column_for_each_engine():
    measured, parts = [roofline.Limits(10.0, 100.0)], dict.fromkeys(roofline.PARTS, 1.0)
    row = roofline.Row(1, 50, 100, measured, [8.0], {"llama.cpp": [16.0], "other": [12.0]}, parts)
    batch = roofline.Row(2, 50, 100, [roofline.Limits(4e9, 100.0)], [8.0], {}, parts)
    text = roofline.page({("m", 1, 2): row}, {}, {("m", 1, 2): batch}, 1)
    assert "| llama.cpp / ours | other / ours |" in text and "| 2.00 | 1.50 |" in text
    assert "| 1 | 0.0 / 2.0 / 4.0 |" in text            # both rows count, though they have one key
