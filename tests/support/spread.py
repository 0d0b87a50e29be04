"""A spread of a test's parameters: cases in which each combination of values of the parameters named together occurs.

    @pytest.mark.spread("type isa", "n isa")

runs each type with each instruction set, and each `n` with each; the rest of the product is a soak.  Names that a test
has not where it is loaded into another file count for nothing there.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from zlib import crc32

import pytest


def chosen(cases: Mapping[str, Mapping[str, int]], groups: Iterable[Sequence[str]]) -> set[str]:
    """Names of cases, few of them, that have every combination of the groups that some case has.

    A case: a number for the value of each of its parameters.  The order in which cases are examined depends on their
    names alone.
    """
    combinations = {name: {(group, tuple(numbers[key] for key in group)) for group in map(tuple, groups)}
                    for name, numbers in cases.items()}
    order = sorted(cases, key=lambda name: crc32(name.encode()))
    missing, found = set().union(*combinations.values()), set()
    for least in range(len(next(iter(combinations.values()), ())), 0, -1):
        for name in order:
            if len(combinations[name] & missing) >= least:
                missing -= combinations[name]
                found.add(name)
    return found


def mark_soaks(items: Iterable[pytest.Item]) -> None:
    """Mark as soaks the cases that the spreads of their tests leave out."""
    spread = [item for item in items if item.get_closest_marker("spread") and not item.get_closest_marker("soak")]
    for _, cases in groupby(spread, key=lambda item: item.nodeid.partition("[")[0]):
        of_one = {item.nodeid: item for item in cases}
        first = next(iter(of_one.values()))
        groups = [[name for name in group.split() if name in first.callspec.params]
                  for group in first.get_closest_marker("spread").args]
        if not groups or not all(groups):
            raise pytest.UsageError(f"{first.nodeid}: spread over parameters that the test has not")
        kept = chosen({name: {key: id(value) for key, value in item.callspec.params.items()}
                       for name, item in of_one.items()}, groups)
        for name, item in of_one.items():
            if name not in kept:
                item.add_marker(pytest.mark.soak)
