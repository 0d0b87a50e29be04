"""Sizes and bounds that the benchmarks state for their sample problems are correct."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import lifetimes
import pytest
import samples

import ggml_sched as gs


def bound(rows) -> int:
    return gs.pack(*zip(*rows, strict=True), budget=0).bound


@pytest.mark.parametrize(("n", "seed"), lifetimes.TILINGS)
def test_a_tiling_fills_its_rectangle(n, seed):
    rows = lifetimes.guillotine(n, seed)
    assert len(rows) == n
    assert sum((upper - lower) * size for lower, upper, size in rows) == n * lifetimes.CAPACITY
    assert bound(rows) == lifetimes.CAPACITY


@pytest.mark.parametrize(("n", "seed"), lifetimes.LOOSE)
def test_a_loosened_tiling_is_part_of_one(n, seed):
    rows = lifetimes.loosened(n, seed)
    assert set(rows) < set(lifetimes.guillotine(n, seed))


@pytest.mark.parametrize("name", lifetimes.HARD)
def test_a_mirror_image_is_as_hard(name):
    assert bound(lifetimes.mirrored(name)) == bound(lifetimes.read(name)) <= lifetimes.CAPACITY


def test_the_deep_graph_is_the_same_each_time():
    graph, backends = samples.deep("c4", 1)
    twin, _ = samples.deep("c4", 1, backends)
    assert len(graph) >= 3_000
    assert graph.fingerprint == twin.fingerprint
    with gs.Scheduler(backends) as scheduler:
        assert scheduler.plan(graph).data is scheduler.plan(twin).data
        assert len(scheduler.plan(graph).splits) == 4


def test_benchmarks_are_shown_in_a_table_for_each_file():
    spec = importlib.util.spec_from_file_location("bench_conftest", Path(samples.__file__).with_name("conftest.py"))
    shown = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shown)
    rows = [{"fullname": name} for name in ("bench/b.py::test_1", "bench/a.py::test_1[x::y]", "bench/b.py::test_2")]
    assert shown.pytest_benchmark_group_stats(None, rows, "group") == [
        ("bench/a.py", [rows[1]]), ("bench/b.py", [rows[0], rows[2]])]
    assert shown.pytest_benchmark_group_stats(None, rows, "param") is None


def test_imports_are_those_of_the_installed_package_in_a_folder_with_its_sources(tmp_path):
    (tmp_path / "ggml_sched").mkdir()
    (tmp_path / "ggml_sched" / "__init__.py").write_text("raise ImportError('sources that are not compiled')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    program = Path(samples.__file__).with_name("importing.py")
    done = subprocess.run([sys.executable, program, "--runs", "1", "--limit", "1e9"], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "ms beyond NumPy" in done.stdout, done.stderr
