"""The `tokenizers` library, looked for when a tokenizer is built and not before.

Owns the message that says what to install.
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
