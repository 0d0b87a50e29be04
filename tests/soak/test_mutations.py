"""Every guard on the list of guards.py is held by a test.

By hand, for some words of paths or guards: `PYTHONPATH=. python tests/soak/mutations.py request usage`.
"""

from __future__ import annotations

import pytest
from guards import EDITS
from mutations import Copy


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    return Copy(tmp_path_factory.mktemp("mutations") / "project")


@pytest.mark.soak
@pytest.mark.parametrize("path", list(dict.fromkeys(edit.path for edit in EDITS)))
def test_no_guard_can_be_removed_without_a_test_that_fails(path, copy):
    survivors = []
    for edit in (edit for edit in EDITS if edit.path == path):
        said = copy.survives(edit)
        if said is not None:
            survivors.append(f"{path}: {edit.guard}: {said}")
            print(survivors[-1])
    assert not survivors, "\n".join(survivors)
