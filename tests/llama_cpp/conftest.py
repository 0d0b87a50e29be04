"""What tests of the hook on devices share."""

from __future__ import annotations

import pytest
from hooked import build


@pytest.fixture(scope="session")
def devices(tmp_path_factory) -> str:
    """A library of devices whose memory nobody else reads."""
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return build.build(tmp_path_factory.mktemp("libraries"))["devices"]
