"""Fixtures of several soaks: the package built with sanitizers, once."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sanitized_tree(tmp_path_factory) -> Path:
    """A copy of the sources, built with sanitizers."""
    from sanitizers import build_sanitized

    return build_sanitized(tmp_path_factory.mktemp("sanitized"))
