"""One configurable backend for tests: any backend class with chosen methods recorded, changed, held up or failing.

`device(base, ...)` makes a backend of a subclass of `base` that overrides the configured methods and no others, so that
the scheduler treats all other methods as those of `base` (it does not query methods that a class does not override).

    gpu = device(name="GPU", refuses={"SOFT_MAX"}, poison=POISON)        # a CpuBackend
    dry = device(gs.DryBackend, "A", records={"supports_op"})            # dry.calls == [Call("supports_op", (node,))]
    slow = device(before={"graph_plan_compute": lambda plan: gate.wait()})
    odd = device(gs.DryBackend, "B", answers={"alloc_size": lambda inherited, tensor: inherited(tensor) + 8})
    weak = device(fails={"graph_plan_create", "cpy_tensor_from"})
    weak.fail_next("cpy_tensor_from", gs.BackendError("lost"))
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from typing import NamedTuple

import ggml_sched as gs

POISON = 0xCD
"""The byte that fresh memory is full of where a test wants to see reads of memory that was never written: large as a
float (-4e8, and -23 as f16), so that no tolerance hides it, and below zero as an integer."""


class Call(NamedTuple):
    """A recorded call: the method's name, its positional arguments, and the thread that made it."""

    method: str
    args: tuple
    thread: threading.Thread


class Instruments:
    """The mixin that overridden methods go through; `device` sets its fields.

    For each call of an overridden method, in this order: the call is recorded, an error due is raised, `before` runs,
    `answers` (else the inherited method) gives the result, `after` runs.  All fields may change at any time, for
    methods that were named when the device was made.
    """

    calls: list[Call]
    records: set[str]
    before: dict[str, Callable]
    answers: dict[str, Callable]
    after: dict[str, Callable]
    errors: dict[str, BaseException]
    refuses: set[str]
    offloads: set[str]
    reads: list

    def fail_next(self, method: str, error: BaseException) -> None:
        """Let the next call of an overridden method raise this error."""
        self._require(method)
        self.errors[method] = error

    def take(self) -> list[Call]:
        """The calls recorded so far, which are then forgotten."""
        calls, self.calls = self.calls, []
        return calls

    def count(self, method: str) -> int:
        """How many calls of a method are recorded."""
        self._require(method)
        return sum(call.method == method for call in self.calls)

    def _require(self, method: str) -> None:
        if method not in self.overridden:
            raise ValueError(f"{self!r} does not override {method!r}, only {sorted(self.overridden)}")


def _through(base: type, method: str) -> Callable:
    """A method that goes through the instruments."""
    inherited = getattr(base, method)

    def call(self, *args):
        if method in self.records:
            self.calls.append(Call(method, args, threading.current_thread()))
        error = self.errors.pop(method, None)
        if error is not None:
            raise error
        if method in self.before:
            self.before[method](*args)
        answer = self.answers.get(method)
        result = inherited(self, *args) if answer is None else answer(partial(inherited, self), *args)
        if method in self.after:
            self.after[method](*args)
        return result

    call.__name__ = method
    return call


@cache
def instrumented(base: type[gs.Backend], methods: frozenset[str]) -> type:
    """The subclass of a backend class that overrides these methods."""
    for method in methods:
        if not callable(getattr(base, method, None)):
            raise ValueError(f"{base.__name__} has no method {method!r}")
    body = {method: _through(base, method) for method in methods}
    return type(f"Instrumented{base.__name__}", (Instruments, base), {**body, "overridden": methods})


def device(base: type[gs.Backend] = gs.CpuBackend, name: str = "CPU",
           records: Collection[str] = (), fails: Collection[str] = (),
           before: Mapping[str, Callable] | None = None, answers: Mapping[str, Callable] | None = None,
           after: Mapping[str, Callable] | None = None, poison: int | None = None,
           refuses: Iterable[str] | None = None, offloads: Iterable[str] | None = None,
           reads: Iterable[gs.Backend | str] | None = None, attributes: Mapping[str, object] | None = None,
           **options):
    """A backend of class `base`; `options` go to its constructor (one thread for a CpuBackend).

    records   methods whose calls are appended to `.calls`
    fails     methods that `.fail_next(method, error)` may let fail
    before    by method, called with the call's arguments before it
    answers   by method, called in its place with the inherited method and the call's arguments
    after     by method, called with the call's arguments after it
    poison    the byte that fresh buffers are filled with
    refuses   ops that it does not support, beside those that `base` does not
    offloads  ops that it offloads
    reads     backends, or names of backends, whose buffers it reads without copies
    attributes  fields set on the device, such as `concurrent_copies` or `buffer_from_ptr=None`
    """
    given = dict(answers or {})
    builtin = {"alloc_buffer": poison is not None, "supports_op": refuses is not None,
               "offload_op": offloads is not None, "supports_buffer": reads is not None}
    for method, wanted in builtin.items():
        if wanted and method in given:
            raise ValueError(f"{method!r} has an answer already")
    methods = frozenset((*records, *fails, *(before or ()), *given, *(after or ()),
                         *(method for method, wanted in builtin.items() if wanted)))
    if issubclass(base, gs.CpuBackend) and base.__init__ is gs.CpuBackend.__init__:
        options.setdefault("n_threads", 1)
    made = instrumented(base, methods).__new__(instrumented(base, methods))
    made.calls, made.records, made.errors = [], set(records), {}
    made.before, made.answers, made.after = dict(before or {}), given, dict(after or {})
    made.refuses, made.offloads, made.reads = set(refuses or ()), set(offloads or ()), list(reads or ())
    if poison is not None:
        given["alloc_buffer"] = partial(_poisoned, poison)
    if refuses is not None:
        given["supports_op"] = lambda inherited, node: node.op not in made.refuses and inherited(node)
    if offloads is not None:
        given["offload_op"] = lambda inherited, node: node.op in made.offloads
    if reads is not None:
        given["supports_buffer"] = lambda inherited, buffer: (
            buffer.backend is made or buffer.backend in made.reads or buffer.backend.name in made.reads)
    made.__init__(name=name, **options)
    for field, value in (attributes or {}).items():
        setattr(made, field, value)
    return made


def _poisoned(poison: int, inherited: Callable, size: int) -> gs.Buffer:
    buffer = inherited(size)
    buffer.clear(poison)
    return buffer
