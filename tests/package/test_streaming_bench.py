"""Parts of bench/streaming.py: control groups that hold processes to a limit, and the bound of a token; and
bench/shared_arenas.py."""

import sys
from pathlib import Path
from subprocess import run
from types import SimpleNamespace

import memory_group
import pytest
import shared_arenas
import streaming

TAKE = "import sys, memory_group; memory_group.join(sys.argv[1]); x = bytearray(int(sys.argv[2])); print(len(x))"


def taking(group, nbytes):
    """The exit code of a process that joins the group and takes memory."""
    return run([sys.executable, "-c", TAKE, str(group), str(nbytes)], cwd=Path(memory_group.__file__).parent,
               env={"PYTHONPATH": "."}, capture_output=True, timeout=60, check=False).returncode


def test_a_group_holds_its_processes_to_its_limit():
    with memory_group.memory_group(64 << 20) as group:
        if group is None:
            pytest.skip("this process may make no control groups")
        assert taking(group, 1 << 20) == 0
        assert taking(group, 256 << 20) != 0
    assert not group.exists()


def test_without_control_groups_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_group, "ROOT", tmp_path / "nothing")
    with memory_group.memory_group(64 << 20) as group:
        assert group is None


def test_the_bound_of_a_token_is_the_longer_of_computing_and_reading():
    assert streaming.Case.bound(SimpleNamespace(missing=1, reading=2.5), 1.0) == 2.5
    assert streaming.Case.bound(SimpleNamespace(missing=1, reading=2.5), 4.0) == 4.0
    assert streaming.Case.bound(SimpleNamespace(missing=0, reading=float("inf")), 1.0) == 1.0


def test_a_process_that_was_killed_has_no_times():
    assert streaming.beside({"decode": 0.5}, None, "decode", 1000) == ["-", "-"]
    assert streaming.beside({"decode": 0.5}, {}, "decode", 1000) == ["killed", "-"]
    assert streaming.beside({"decode": 0.5}, {"decode": 2.0}, "decode", 1000) == ["2000", "4.0"]


def test_a_process_that_ends_with_an_error_is_not_taken_for_killed():
    with pytest.raises(RuntimeError, match="ended, with 1"):
        streaming.Worker("cpu", Path("no such file"), 1, 0, None)


def test_reading_together_reads_as_many_bytes(tmp_path, monkeypatch):
    path, read = tmp_path / "file", []
    path.write_bytes(bytes(3 * streaming.CHUNK + 4096))
    monkeypatch.setattr(streaming.os, "preadv", lambda fd, out, place: read.append(place))
    for together in (1, 2):
        read.clear()
        try:
            assert streaming.reading(path, 3 * streaming.CHUNK + 1, together, 2 * streaming.CHUNK) > 0
        except OSError:
            pytest.skip("no direct reads here")
        assert sorted(read) == [k * streaming.CHUNK for k in range(4)]


def test_models_that_take_turns_reach_the_targets_of_shared_memory():
    for n in (2, 4):
        _, own, shared, part, target = shared_arenas.measured(n, 64)
        assert float(part) <= float(target) == shared_arenas.TARGETS[n] and float(shared) < float(own)
