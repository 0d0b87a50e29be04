"""What can go wrong with a running model, beside what files, graphs and backends raise."""

from __future__ import annotations

from ggml_sched.errors import Error, FileFormatError

__all__ = ["ChatTemplateError", "ContextFull", "ModelBusy", "ModelClosed", "SamplingError", "SequenceError",
           "StateFormatError", "TokenizerError"]


class ContextFull(Error, ValueError):
    """More tokens than the model's context has room for; `n_past`, `n_tokens` and `n_ctx` say how many."""

    def __init__(self, message: str, n_past: int = 0, n_tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message)
        self.n_past, self.n_tokens, self.n_ctx = n_past, n_tokens, n_ctx

    def __reduce__(self):
        return type(self), (self.args[0], self.n_past, self.n_tokens, self.n_ctx)


class ModelClosed(Error, ValueError):
    """A model was used after `close()`."""


class ModelBusy(Error):
    """A model was used by a second thread, or from inside its own evaluation."""


class SequenceError(Error, ValueError):
    """What was asked of a sequence cannot be done to its state: a recurrent one cut short, shared positions moved."""


class StateFormatError(FileFormatError):
    """A saved sequence that is damaged, or that another model or cache layout saved."""


class TokenizerError(Error, ValueError):
    """A vocabulary that cannot be used, or text and ids that it cannot hold.

    `field` names the file's metadata field that is wrong, or is None where the file is not to blame.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self):
        return type(self), (self.args[0], self.field)


class ChatTemplateError(Error, ValueError):
    """A chat template that is wrong, that refuses the messages, or that asks for too much time or memory."""


class SamplingError(Error, ValueError):
    """Logits from which no token can be chosen: NaN, or a row of another width than before."""
