"""Ways of attention that tests of sequences are run with, and small tokenizers."""

from functools import partial

import pytest
from vocabularies import SAMPLES

import ggml_sched.llama


@pytest.fixture(params=[False, True], ids=["softmax", "flash"])
def load(request):
    """`ggml_sched.llama.load`, once with the explicit softmax and once with flash attention."""
    return partial(ggml_sched.llama.load, flash=request.param)


@pytest.fixture(scope="module", params=["spm", "bpe"])
def tokenizer(request) -> ggml_sched.llama.Tokenizer:
    pytest.importorskip("tokenizers")
    return ggml_sched.llama.Tokenizer.from_metadata(SAMPLES[request.param])
