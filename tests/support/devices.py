"""Test devices: one configurable backend, with any method recorded, changed, held up or failing; and a few more.

`device(base, ...)` makes a backend of a subclass of `base` that overrides the configured methods and no others, so that
the scheduler treats all other methods as those of `base` (it does not query methods that a class does not override).

    gpu = device(name="GPU", refuses={"SOFT_MAX"}, poison=POISON)        # a CpuBackend
    dry = device(gs.DryBackend, "A", records={"supports_op"})            # dry.calls == [Call("supports_op", (node,))]
    slow = device(before={"graph_plan_compute": lambda plan: gate.wait()})
    odd = device(gs.DryBackend, "B", answers={"alloc_size": lambda inherited, tensor: inherited(tensor) + 8})
    weak = device(fails={"graph_plan_create", "cpy_tensor_from"})
    weak.fail_next("cpy_tensor_from", gs.BackendError("lost"))
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

import ggml_sched as gs
from ggml_sched.backends.cpu import CpuBackend, run_nodes

PATIENCE = 20
"""Seconds after which a handshake has failed."""
POISON = 0xCD
"""The byte that fresh memory is full of where a test wants to see reads of memory that was never written: large as a
float (-4e8, and -23 as f16), so that no tolerance hides it, and below zero as an integer."""


DATA_WRITES = frozenset({"set_tensor_async", "cpy_tensor_from"})
"""The methods that bring data."""


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

    @property
    def ran(self) -> list[str]:
        """The names of the nodes of recorded calls of graph_compute and graph_plan_create."""
        return [node.name for call in self.calls if call.method in ("graph_compute", "graph_plan_create")
                for node in call.args[0].nodes]

    @property
    def received(self) -> list[tuple[str, int]]:
        """(tensor, bytes) of recorded writes into its memory, by set or copy; a copy has its tensor's name."""
        writes = [(call.args[0], len(call.args[1])) if call.method == "set_tensor_async" else
                  (call.args[1], call.args[1].nbytes) for call in self.calls if call.method in DATA_WRITES]
        return [(tensor.name.removeprefix(f"{self.name}#"), nbytes) for tensor, nbytes in writes]

    def take_received(self) -> list[tuple[str, int]]:
        """`received`; all recorded calls are then forgotten."""
        received = self.received
        self.take()
        return received

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


def poisoned(name: str = "CPU", refuses: Iterable[str] = (), offloads: Iterable[str] = (),
             reads: Iterable[gs.Backend | str] = (), base: type[gs.Backend] = CpuBackend, **options):
    """A device whose memory is its own and full of POISON."""
    return device(base, name, poison=POISON, refuses=refuses, offloads=offloads, reads=reads, **options)


def devices(n: int, records: Collection[str] = (), **options) -> tuple:
    """D0, D1, ... and the host, best first; `options` are those of the devices."""
    return *(poisoned(f"D{k}", records=records, **options) for k in range(n - 1)), poisoned("HOST", records=records)


# -- residents --------------------------------------------------------------------------------------------


def resident_tensor(backend: gs.Backend, ne: int | tuple[int, ...], name: str = "w", type: str = "f32",
                    usage: str = "weights") -> gs.Tensor:
    """A tensor with memory of its own on a backend."""
    home = gs.Context(name)
    t = home.tensor(type, ne, name)
    backend.alloc_tensors(home, usage)
    return t


def resident(backend: gs.Backend, name: str, values, usage: str = "weights") -> gs.Tensor:
    """A resident tensor with these values: f32, or i32 if the array holds integers."""
    values = np.asarray(values)
    t = resident_tensor(backend, values.shape[::-1], name, "i32" if values.dtype.kind == "i" else "f32", usage)
    t.set(values)
    return t


def weights_on(backend: gs.Backend, usage: str = "weights", **tensors: np.ndarray) -> dict[str, gs.Tensor]:
    """Resident tensors, by name."""
    return {name: resident(backend, name, array, usage) for name, array in tensors.items()}


# -- plans ---------------------------------------------------------------------------------------------------


def verified(plan):
    plan.verify()
    return plan


# -- queues and events ------------------------------------------------------------------------------------


class Gated(CpuBackend):
    """Each compute first calls `self.before(number)`, numbered from 0, and records its thread."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name=name)
        self.before = lambda number: None
        self.after = lambda number: None
        self.count = 0
        self.threads: set[threading.Thread] = set()

    def graph_plan_compute(self, plan):
        number, self.count = self.count, self.count + 1
        self.threads.add(threading.current_thread())
        self.before(number)
        super().graph_plan_compute(plan)
        self.after(number)


def wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE), "the event was not set"


class StreamBuffer(gs.Buffer):
    def __init__(self, backend, size):
        super().__init__(backend, size)
        self.bytes = np.full(size, 0xEE, np.uint8)

    def write(self, offset, data):
        self.backend.synchronize()
        self.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


class StreamEvent(gs.Event):
    def __init__(self, backend):
        super().__init__(backend)
        self.passed = threading.Event()


class Stream(gs.Backend):
    """A device whose queue is a thread: calls return at once, and work runs in queue order."""

    concurrent_copies = True

    def __init__(self, name: str) -> None:
        super().__init__(name, 64)
        self.calls: list[str] = []
        self.error: BaseException | None = None
        self.queue: SimpleQueue = SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True, name=f"stream {name}")
        self.thread.start()

    def _work(self):
        while (call := self.queue.get()) is not None:
            try:
                call()
            except Exception as error:
                self.error = self.error or error

    def _put(self, name, call):
        self.calls.append(name)
        self.queue.put(call)

    def alloc_buffer(self, size):
        return StreamBuffer(self, size)

    def set_tensor_async(self, tensor, data, offset=0):
        place = tensor.buffer.bytes[tensor.offset + offset :][: len(data)]
        self._put("set", lambda: np.copyto(place, np.frombuffer(data, np.uint8)))

    def get_tensor_async(self, tensor, out, offset=0):
        place = tensor.buffer.bytes[tensor.offset + offset :][: len(out)]
        self._put("get", lambda: np.copyto(np.frombuffer(out, np.uint8), place))

    def cpy_tensor_async(self, src, dst):
        if not isinstance(dst.backend, Stream):
            return False
        a, b = (t.buffer.bytes[t.offset :][: t.nbytes] for t in (src, dst))
        self._put("push", lambda: np.copyto(b, a))
        return True

    def graph_compute(self, graph):
        nodes = tuple(graph.nodes)
        self._put("compute", lambda: run_nodes(nodes, lambda buffer: buffer.bytes, name=self.name))

    def synchronize(self):
        done = threading.Event()
        self.queue.put(done.set)
        wait(done)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def event_new(self):
        return StreamEvent(self)

    def event_record(self, event):
        self._put("record", event.passed.set)

    def event_wait(self, event):
        if isinstance(event, StreamEvent):
            self._put("wait", lambda: wait(event.passed))
        else:
            super().event_wait(event)

    def event_synchronize(self, event):
        wait(event.passed)

    def close(self):
        self.queue.put(None)
        self.thread.join()


class Chain:
    """x -> w0 -> w1 -> ... over backends in turn; each compute also writes its first row to a log."""

    def __init__(self, backends, n: int = 8, rows: int = 4, log: int = 0) -> None:
        rng = np.random.default_rng(3)
        self.backends = tuple(backends)
        self.values = [rng.integers(-2, 3, (n, n)).astype(np.float32) for _ in self.backends]
        self.weights = [weights_on(b, **{f"w{k}": v})[f"w{k}"]
                        for k, (b, v) in enumerate(zip(self.backends, self.values, strict=True))]
        ctx = self.ctx = gs.Context("chain")
        self.x = ctx.tensor("f32", (n, rows), "x", input=True)
        value = self.x
        for k, w in enumerate(self.weights):
            value = ctx.set_name(ctx.add(ctx.mul_mat(w, value), self.x), f"h{k}")
        self.out = ctx.set_output(value)
        ends = [self.out]
        if log:
            self.log = weights_on(self.backends[-1], "any", log=np.zeros((log, n), np.float32))["log"]
            self.row = ctx.tensor("i64", (1,), "row", input=True)
            first = ctx.view_2d(self.out, n, 1, self.out.nb[1], 0)
            ends.append(ctx.set_rows(self.log, first, self.row))
        self.graph = gs.Graph(*ends)

    def pin(self, scheduler: gs.Scheduler) -> None:
        """Assign each link to the backend of its weight."""
        for node in self.graph.nodes:
            if node.name.startswith("h"):
                scheduler.set_tensor_backend(node, self.backends[int(node.name[1:])])

    def input(self, k: int) -> np.ndarray:
        rows, n = self.x.ne[1], self.x.ne[0]
        return np.full((rows, n), k % 7, np.float32) + np.eye(rows, n, dtype=np.float32)

    def expected(self, k: int) -> np.ndarray:
        x = value = self.input(k)
        for w in self.values:
            value = value @ w.T + x
        return value

    def scheduler(self, backends, **options) -> gs.Scheduler:
        """A scheduler over these backends, for which the graph is allocated by a verified plan."""
        made = gs.Scheduler(backends, **options)
        made.alloc(self.graph).verify()
        return made

    def set(self, k: int) -> None:
        """Set the inputs of compute k."""
        self.x.set(self.input(k))
        if hasattr(self, "row"):
            self.row.set(np.int64([k % self.log.ne[1]]))

    def queue(self, scheduler: gs.Scheduler, k: int) -> None:
        """Set the inputs of compute k, and queue it."""
        self.set(k)
        scheduler.compute_async(self.graph)

    def queue_all(self, scheduler: gs.Scheduler, n: int) -> None:
        """Queue computes 0 .. n - 1."""
        for k in range(n):
            self.queue(scheduler, k)

    def check_queued(self, scheduler: gs.Scheduler, n: int) -> None:
        """Queue computes 0 .. n - 1, wait for them, and assert that each result is right."""
        self.queue_all(scheduler, n)
        scheduler.synchronize()
        self.check_log(n)

    def compute(self, scheduler: gs.Scheduler, k: int) -> None:
        """Run compute k and assert that its result is right."""
        self.set(k)
        assert scheduler.compute(self.graph) is True
        self.check(k)

    def check(self, k: int) -> None:
        """Assert that the result is that of compute k."""
        assert np.array_equal(self.out.numpy(), self.expected(k))

    def check_log(self, n: int) -> None:
        """Assert that the log has the results of computes 0 .. n - 1."""
        assert np.array_equal(self.log.numpy(), [self.expected(k)[0] for k in range(n)])
