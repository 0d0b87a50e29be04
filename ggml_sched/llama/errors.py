"""Errors of running models; ggml_sched.errors has those of files, graphs and backends."""

from __future__ import annotations

from ggml_sched.errors import Error, FileFormatError

__all__ = ["ChatTemplateError", "ContextFull", "ModelBusy", "ModelClosed", "ModelNotInstalled", "SamplingError",
           "SequenceError", "StateFormatError", "TokenizerError"]


class ContextFull(Error, ValueError):
    """Tokens do not fit into the model's context: `n_tokens` after the first `n_past`, in a context of `n_ctx`."""

    def __init__(self, message: str, n_past: int = 0, n_tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message)
        self.n_past = n_past
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class ModelClosed(Error, ValueError):
    """A model was used after `close()`."""


class ModelNotInstalled(Error, LookupError):
    """The package that carries a model is not installed; the message has the command that installs it."""


class ModelBusy(Error):
    """A model was used by a second thread, or from inside its own evaluation."""


class SequenceError(Error, ValueError):
    """An operation that a sequence's state does not allow: truncating a recurrent one, moving shared positions."""


class StateFormatError(FileFormatError):
    """A saved sequence that is damaged, or was saved from another model or cache layout."""


class TokenizerError(Error, ValueError):
    """A vocabulary that cannot be used, or text and ids that cannot be encoded or decoded with it.

    `field` names the file's metadata field that is wrong; None where the fault is not in the file.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ChatTemplateError(Error, ValueError):
    """A chat template that is wrong, that refuses the messages, or that exceeds its limits of time or memory."""


class SamplingError(Error, ValueError):
    """No token can be chosen from the logits, as they have NaN or none is finite; or a token id has no logit."""
