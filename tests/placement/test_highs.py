"""What HiGHS, the extra `fit`, adds to placements of seeded instances: proofs, and no words on standard output."""

from __future__ import annotations

import placement_instances as instances
import pytest

pytestmark = pytest.mark.soak
pytest.importorskip("scipy")


def test_counts_prove_what_labels_do_not() -> None:
    assert instances.instance(65).fit().gap <= 0.005        # 0.013 with a tenth of the nodes


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """HiGHS prints lines of its own for this one if it may presolve."""
    instances.instance(256).fit()
    assert capfd.readouterr() == ("", "")
