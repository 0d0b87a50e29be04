"""The list of guards in tests/soak/guards.py keeps up with the code: an edit that fits nothing proves nothing."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from guards import EDITS, Edit
from mutations import ROOT, misplaced


def test_every_edit_stands_just_once_in_its_file():
    assert misplaced(EDITS) == []
    text = "import argparse\n"
    for before, n in (("argparse", 6), ("no such text", 0)):
        wrong = misplaced([Edit("tests/soak/mutations.py", "", "guard", before, text)])
        assert len(wrong) == 1 and "guard: stands there" in wrong[0] and (n > 0) == (" 0 times" not in wrong[0])


def test_every_edit_changes_something_and_has_a_name_of_its_own():
    assert len(EDITS) >= 60
    assert all(edit.before != edit.after for edit in EDITS)
    twice = [key for key, n in Counter((edit.path, edit.guard) for edit in EDITS).items() if n > 1]
    assert not twice


@pytest.mark.parametrize("tests", list(dict.fromkeys(edit.tests for edit in EDITS)), ids=lambda tests: tests[:40])
def test_the_tests_of_an_edit_are_there(tests):
    for name in tests.split():
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not function or re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE), name
