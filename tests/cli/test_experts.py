"""`ggml-sched experts`, and `run` with slots for experts: tables, recordings, and errors for wrong files."""

import pytest

from ggml_sched.backends.store import has_slots
from ggml_sched.cli import main
from ggml_sched.cli.run_report import _fetched
from ggml_sched.experts import PREDICTIONS, LeastRecentlyUsed, Routing, bound, replay, replay_ahead
from ggml_sched.llama import load, random_llama

pytestmark = pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")


@pytest.fixture
def recording(tmp_path, capsys):
    """The path of a recording of a run, and what it has said."""
    (tmp_path / "m").write_bytes(random_llama(7, n_vocab=120, n_embd=64, n_layer=3, n_head=4, n_ff=192, n_expert=8))
    path = str(tmp_path / "r")
    assert main(["run", str(tmp_path / "m"), "--tokens", "5,6,7", "-n", "12", "--n-ctx", "64", "--threads", "1",
                 "--record-experts", path]) == 0
    capsys.readouterr()
    return path


def test_a_recording_is_replayed_over_policies_and_slots(recording, capsys):
    assert main(["experts", recording, "--slots", "6", "12", "--policy", "lru"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    made = Routing.load(recording)
    for n_slots in (6, 12):
        best, found = bound(made, n_slots), replay(made, LeastRecentlyUsed(), n_slots)
        assert [str(n_slots), "bound", f"{best.rate:.1%}", str(best.misses), f"{best.nbytes:,}", "1.00"] in rows
        assert ["lru", f"{found.rate:.1%}", str(found.misses), f"{found.nbytes:,}",
                f"{found.nbytes / best.nbytes:.2f}"] in rows


def test_by_default_all_policies_are_replayed_in_a_quarter_half_and_three_quarters(recording, capsys):
    assert main(["experts", recording, "--profile", recording]) == 0
    said = capsys.readouterr().out
    assert [said.count(f" {name} ") for name in ("bound", "lru", "lfu", "mixture", "static")] == [3] * 5
    assert "3 layers with 24 experts together" in said


def test_reading_ahead_is_replayed_for_each_prediction_and_length_of_computing(recording, capsys):
    assert main(["experts", recording, "--slots", "6", "--policy", "lru", "--ahead", "0.5", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    made = Routing.load(recording)
    for computing in (0.5, 2):
        without = replay_ahead(made, LeastRecentlyUsed(), 6, None, computing)
        for name, prediction in PREDICTIONS.items():
            found = replay_ahead(made, LeastRecentlyUsed(), 6, prediction, computing)
            assert ["6", "lru", f"{computing:g}", name, f"{found.reads:,}", f"{found.precision:.0%}",
                    f"{found.nbytes / without.nbytes:.2f}", f"{found.time / without.time:.2f}"] in rows
    for wrong in "0", "nan", "inf":
        assert main(["experts", recording, "--ahead", "2", wrong]) == 1
        assert f"--ahead {wrong}: computing takes time" in capsys.readouterr().err


def test_too_few_slots_and_other_files_are_errors_of_one_line(recording, tmp_path, capsys):
    assert main(["experts", recording, "--slots", "1"]) == 1
    assert "are used together, and there are 1 slots" in capsys.readouterr().err
    (tmp_path / "x").write_text("nothing")
    assert main(["experts", str(tmp_path / "x")]) == 1
    assert "not a recording" in capsys.readouterr().err


def test_a_model_without_experts_records_no_layers(tmp_path, capsys):
    (tmp_path / "m").write_bytes(random_llama(7))
    path = str(tmp_path / "r")
    assert main(["run", str(tmp_path / "m"), "--tokens", "5", "-n", "1", "--threads", "1",
                 "--record-experts", path]) == 0
    capsys.readouterr()
    assert main(["experts", path]) == 0
    assert capsys.readouterr().out == f"{path}: the model has no experts\n"
    for n_slots in ("-5", "0"):
        assert main(["experts", path, "--slots", "4", n_slots]) == 1
        assert f"--slots {n_slots}: not a number of slots" in capsys.readouterr().err


def test_the_report_of_a_run_counts_hits_of_slots(tmp_path):
    (tmp_path / "m").write_bytes(random_llama(7, n_vocab=120, n_embd=64, n_layer=3, n_head=4, n_ff=192, n_expert=8))
    with load(tmp_path / "m", n_ctx=64, n_batch=16, n_threads=1, memory=2_500_000) as model:
        model.eval([1, 2, 3])
        said = "\n".join(_fetched(model))
        counted = model.slots.traffic
        assert f"{model.slots.n_slots:,} slots of {model.slots.slot_nbytes:,} for experts" in said
        assert [str(model.slots.n_slots), str(counted.hits), str(counted.misses), f"{counted.rate:.1%}",
                f"{counted.nbytes:,}"] in [line.split() for line in said.splitlines()]
