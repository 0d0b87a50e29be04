"""An envelope: work for one worker or several, one after the other, that travels from each to the next.

The driver sends it to the worker of its first segment.  A worker executes its segment and sends the rest on to the
worker of the next one, with the blocks of bytes that are still needed; the last worker sends what is left, the bytes
that were read, to the driver.  So a compute over W workers takes W + 1 messages, and what one worker computes for
another does not pass through the driver.

The segments for one worker are numbered.  A worker executes them in the order of their numbers, each once, whatever
the network loses, repeats or reorders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ggml_sched import errors
from ggml_sched.errors import BackendError, OutOfMemory
from ggml_sched.remote.messages import MessageError, fields_of, natural, packed, text, unpacked

__all__ = ["DRIVER", "FREES", "KINDS", "Envelope", "Segment", "error_of", "error_values"]

DRIVER = "driver"
"""The name of the driver among those of the workers."""
KINDS = ("run", "call", "status", "close")
"""What an envelope is for. run: queued work; call: commands whose answers the driver waits for; status: a question how
many segments were executed; close: freeing all that the session holds."""
FREES = ("free", "drop")
"""Commands that free what the driver has closed.  Freeing something a second time is no error."""
MAX_SEGMENTS = 1 << 12
Command = list[Any]


@dataclass(slots=True)
class Segment:
    """Commands for one worker.  `acked`: the driver has, or no longer wants, the results of all segments of this worker
    with a lower number."""

    worker: str
    number: int
    commands: list[Command]
    acked: int = 0


@dataclass(slots=True)
class Envelope:
    """Segments that were not executed yet; `blocks` is {number: bytes}, of which commands name the numbers.

    `epoch` counts the failures that the driver has seen: work of an epoch in which something has failed is not
    executed.
    """

    kind: str
    session: str
    number: int
    epoch: int
    segments: list[Segment]
    blocks: dict[int, bytes | bytearray | memoryview] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def packed(self) -> bytes:
        header = {"kind": self.kind, "session": self.session, "number": self.number, "epoch": self.epoch,
                  "segments": [[s.worker, s.number, s.acked, s.commands] for s in self.segments],
                  "keys": list(self.blocks)}
        if self.answers:
            header["answers"] = self.answers
        if self.error is not None:
            header["error"] = self.error
        return packed(header, [*self.blocks.values()])

    @classmethod
    def read(cls, message: bytes | bytearray | memoryview) -> Envelope:
        """The envelope in a message; MessageError if there is none."""
        header, blocks = unpacked(message)
        kind = text(header.get("kind"), "the kind of an envelope")
        if kind not in KINDS:
            raise MessageError(f"{kind!r} is no kind of envelope")
        segments = []
        for values in fields_of(header.get("segments"), "segments"):
            worker, number, acked, commands = fields_of(values, "a segment", 4)
            segments.append(Segment(text(worker, "a worker"), natural(number, "the number of a segment"),
                                    fields_of(commands, "commands"), natural(acked, "an acknowledged number")))
        if len(segments) > MAX_SEGMENTS:
            raise MessageError(f"{len(segments)} segments, at most {MAX_SEGMENTS}")
        keys = [natural(key, "the number of a block") for key in fields_of(header.get("keys"), "keys", len(blocks))]
        if len(set(keys)) != len(keys):
            raise MessageError("two blocks have one number")
        answers, error = header.get("answers", {}), header.get("error")
        if not isinstance(answers, dict) or not isinstance(error, dict | None):
            raise MessageError("answers and errors are objects")
        session, number = text(header.get("session"), "a session"), natural(header.get("number"), "a number")
        return cls(kind, session, number, natural(header.get("epoch"), "an epoch"), segments,
                   dict(zip(keys, blocks, strict=True)), answers, error)


# -- errors as values -------------------------------------------------------------------------------

RAISED = {name: getattr(errors, name) for name in errors.__all__ if name not in ("BuildError",)}
RAISED["MessageError"] = MessageError
RAISED |= {kind.__name__: kind for kind in (TypeError, ValueError, KeyError, IndexError, ArithmeticError,
                                            ZeroDivisionError, OverflowError, NotImplementedError, RuntimeError)}


def error_values(error: BaseException, worker: str) -> dict[str, Any]:
    """An exception as values of a message: its type's name, its text and notes, and the backend and the
    numbers of OutOfMemory."""
    kind = next((c.__name__ for c in type(error).__mro__ if RAISED.get(c.__name__) is c), "BackendError")
    said = str(error) if kind == type(error).__name__ else f"{type(error).__name__}: {error}"
    values = {"type": kind, "text": said[:1 << 14], "notes": [str(note)[:1 << 12] for note in
                                                    getattr(error, "__notes__", ())][:16], "worker": worker}
    if isinstance(error, OutOfMemory):
        values["bytes"] = [error.needed, error.available]
        if isinstance(error.backend, str):
            values["backend"] = error.backend[:1 << 10]
    return values


def error_of(values: dict[str, Any], names: Mapping[tuple[str, str], str]) -> Exception:
    """The exception of `error_values`, with a note that names the worker; BackendError for a type that is not known.
    `names`: {(worker, name of its backend): the name that the driver has for that backend}."""
    said, worker = str(values.get("text", "")), str(values.get("worker", ""))
    kind = RAISED.get(str(values.get("type")), BackendError)
    error: Exception
    backend = None
    if kind is OutOfMemory:
        pair = values.get("bytes")
        needed, available = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        backend = names.get((worker, str(values.get("backend"))))
        error = OutOfMemory(said, backend, *(n if isinstance(n, int) else None for n in (needed, available)))
    else:
        error = kind(said)
    notes = values.get("notes")
    for note in notes if isinstance(notes, list) else ():
        error.add_note(str(note))
    error.add_note(f"worker {worker!r} raised this" + (f" for backend {backend!r}" if backend else ""))
    return error
