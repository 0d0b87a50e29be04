"""Ways of attention that tests of sequences are run with."""

from functools import partial

import pytest

import ggml_sched.llama


@pytest.fixture(params=[False, True], ids=["softmax", "flash"])
def load(request):
    """`ggml_sched.llama.load`, once with the explicit softmax and once with flash attention."""
    return partial(ggml_sched.llama.load, flash=request.param)
