"""How `pytest bench` shows its times: a table for each file, with the minimum and the median of each benchmark.

The minimum is what a change is judged by, because other work on the machine only adds time.  Options on the command
line, such as `--benchmark-columns=min,max,rounds`, replace these.
"""

from __future__ import annotations

from itertools import groupby

import pytest

COLUMNS = ["min", "median", "rounds"]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the columns, unless the command line does; pytest-benchmark reads them when it is configured, later."""
    chosen = any(argument.startswith("--benchmark-columns") for argument in config.invocation_params.args)
    if config.pluginmanager.hasplugin("benchmark") and not chosen:
        config.option.benchmark_columns = COLUMNS


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: list[dict], group_by: str):
    """A group for each file, unless the command line chooses another grouping."""
    if group_by != "group":
        return None

    def file(benchmark: dict) -> str:
        return benchmark["fullname"].partition("::")[0]

    return [(name, list(rows)) for name, rows in groupby(sorted(benchmarks, key=file), file)]
