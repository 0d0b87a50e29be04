"""What a driver asks a worker, and the checks of the answers.

An answer of a wrong shape, from a worker of another version or from a damaged message, is refused before anything uses
it, with an error that names the worker and the question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ggml_sched.remote.messages import MessageError, fields_of, natural, text
from ggml_sched.remote.session import NOTHING, Doing, Session, Take

__all__ = ["ask_ahead", "asked"]

YES_OR_NO = ("has_memory", "bounded", "host", "sizes", "work", "fuses", "offloads")


def asked(session: Session, worker: str, question: str, arguments: Sequence[Any], doing: Doing = NOTHING) -> Any:
    """A worker's answer to one of `worker.QUESTIONS`; waits for it.  MessageError for an answer of a wrong shape."""
    answers = session.call(worker, ["ask", "answer", question, [*arguments]], doing=doing)
    try:
        if "answer" not in answers:
            raise MessageError("there is none")
        CHECKS[question](answers["answer"], arguments)
    except MessageError as error:
        raise MessageError(f"worker {worker!r}: the answer to {question!r}: {error}") from error
    return answers["answer"]


def ask_ahead(session: Session, worker: str, question: str, arguments: Sequence[Any], take: Take) -> None:
    """Queue a question, which travels with the next commands for the worker, and call `take` with the answer.  It is
    not called for an answer of a wrong shape, nor where the worker raises: then `asked` says what is wrong."""

    def take_checked(answer: Any) -> None:
        with suppress(MessageError):
            CHECKS[question](answer, arguments)
            take(answer)

    key = f"answer {session.new_key()}"
    session.put_aside(worker, ["ask ahead", key, question, [*arguments]], key, take_checked)


def _truth(value: Any, what: str) -> None:
    if type(value) is not bool:
        raise MessageError(f"{what} is of type {type(value).__name__}, neither true nor false")


def _is_done(value: Any, arguments: Sequence[Any]) -> None:
    _truth(value, "it")


def _size(value: Any, arguments: Sequence[Any]) -> None:
    natural(value, "a size")


def _known_size(value: Any, arguments: Sequence[Any]) -> None:
    if value is not None:
        natural(value, "a size")


def _kinds(value: Any, arguments: Sequence[Any]) -> None:
    """Check, for each node that was asked for: [whether it is supported, whether the backend offers to compute it with
    weights of the host, its bytes]."""
    for kind in fields_of(value, "kinds", len(arguments[1])):
        supported, offloads, size = fields_of(kind, "a kind", 3)
        _truth(supported, "whether it is supported")
        _truth(offloads, "whether it is computed with weights of the host")
        natural(size, "a size")


def _groups(value: Any, arguments: Sequence[Any]) -> None:
    """Check fusion groups: lists of indices into the nodes that were asked for, the third argument."""
    for group in fields_of(value, "groups"):
        for k in fields_of(group, "a group"):
            natural(k, "a node", len(arguments[2]))


def _facts(value: Any, arguments: Sequence[Any]) -> None:
    """Check what `Worker.describe` says of each backend."""
    for facts in fields_of(value, "it"):
        if not isinstance(facts, dict):
            raise MessageError("a backend is no object")
        text(facts.get("name"), "the name of a backend")
        text(facts.get("machine"), "a machine")
        alignment = natural(facts.get("alignment"), "an alignment")
        if alignment < 1 or alignment & alignment - 1:
            raise MessageError(f"an alignment is {alignment}, no power of two")
        if natural(facts.get("kv_padding"), "the padding of a cache") < 1:
            raise MessageError("the padding of a cache is 0")
        if facts.get("max_buffer_size") is not None:
            natural(facts["max_buffer_size"], "the size of the largest buffer")
        for name in YES_OR_NO:
            _truth(facts.get(name), name)
        inplace = facts.get("inplace")
        if not isinstance(inplace, dict):
            raise MessageError("sources of ops that work in place are no object")
        for op, sources in inplace.items():
            natural(sources, f"sources of {op[:40]!r}", 1 << 31)


CHECKS: dict[str, Callable[[Any, Sequence[Any]], None]] = {
    "hello": _facts, "memory": _known_size, "system memory": _known_size, "work held": _size, "kinds": _kinds,
    "work": _size, "fusions": _groups, "file": _is_done,
}
