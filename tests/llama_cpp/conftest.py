"""Fixtures of the tests of the hook on devices."""

import pytest
from hooked import build


@pytest.fixture(scope="session")
def devices(tmp_path_factory) -> str:
    """A library of devices whose memory no other backend reads."""
    if build.compiler() is None:
        pytest.skip("needs a C++ compiler")
    return build.build(tmp_path_factory.mktemp("libraries"))["devices"]
