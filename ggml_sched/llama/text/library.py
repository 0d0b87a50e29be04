"""Imports the `tokenizers` library when a tokenizer is built, not earlier.

Owns the error message for a missing library.
"""

from __future__ import annotations

from ggml_sched.llama.errors import TokenizerError

__all__ = ["import_tokenizers"]


def import_tokenizers():
    """The library; TokenizerError where it is not installed."""
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            f"tokenizers are built on the 'tokenizers' library, which is not there ({error}): "
            "pip install 'ggml-sched[llama]'") from error
    return tokenizers
