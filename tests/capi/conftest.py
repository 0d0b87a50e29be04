import pytest


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """toy_backends.c as a library."""
    from capi_toys import compiled

    return compiled(tmp_path_factory.mktemp("toys"))
