"""Parts of a fit's report: which kinds of tensors share a row, and for which devices more memory has a line."""

import dataclasses
import random

import pytest
from small_models import layered

import ggml_sched as gs
from ggml_sched.placement.answer import Placed
from ggml_sched.placement.report import kinds_table, more_memory


@pytest.fixture(scope="module")
def fit() -> gs.Fit:
    devices = [gs.Device("GPU", 1 << 30, 1e12, 1e13), gs.Device("CPU", 1 << 30, 5e10, 1e12, host=True)]
    return gs.fit([layered(random.Random(1), 1)], devices)


def rows(fit: gs.Fit, *placed: tuple[str, int, int]) -> list[list[str]]:
    """The words of the rows for residents of a name, bytes and a device."""
    entries = tuple(Placed(name, "weight", nbytes, device) for name, nbytes, device in placed)
    _, *found = kinds_table(dataclasses.replace(fit, placed=entries)).splitlines()
    return [row.split() for row in found if not set(row) <= set("- ─")]


def test_names_that_differ_in_numbers_share_a_row(fit):
    assert rows(fit, ("l0.up", 1 << 20, 0), ("l1.up", 1 << 20, 1), ("l12.up", 1 << 20, 1)) == [
        ["l*.up", "1.00", "MiB", "(1)", "2.00", "MiB", "(2)"]]


def test_two_kinds_of_less_than_a_thousandth_share_a_row_and_one_has_its_own(fit):
    large, a, b = ("up", 1000 << 10, 0), ("norm", 512, 0), ("bias", 1024, 1)
    assert rows(fit, large, a) == [["up", "1000.00", "KiB", "(1)"], ["norm", "512", "B", "(1)"]]
    assert rows(fit, large, a, b) == [["up", "1000.00", "KiB", "(1)"],
                                      ["smaller", "ones", "512", "B", "(1)", "1.00", "KiB", "(1)"]]
    twice = ("bias", 2048, 1)       # a thousandth
    assert rows(fit, large, a, twice) == [["up", "1000.00", "KiB", "(1)"], ["norm", "512", "B", "(1)"],
                                          ["bias", "2.00", "KiB", "(1)"]]


def test_only_devices_on_which_memory_is_worth_something_have_a_line(fit):
    assert more_memory(dataclasses.replace(fit, worth=(0.0, 0.0))) == []
    line, = more_memory(dataclasses.replace(fit, worth=(0.0, 1e-15)))
    assert " more on CPU is worth about " in line
