"""Backends for tests of computing: counting, gated by events, and with a queue on a thread of their own."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import numpy as np

import ggml_sched as gs
from ggml_sched.backends.cpu import CpuBackend, run_nodes

PATIENCE = 20
"""Seconds after which a handshake has failed."""


def weights_on(backend: gs.Backend, usage: str = "weights", **tensors: np.ndarray) -> dict[str, gs.Tensor]:
    """Resident f32 tensors, by name."""
    ctx = gs.Context("residents")
    made = {name: ctx.tensor("f32", array.shape[::-1], name) for name, array in tensors.items()}
    backend.alloc_tensors(ctx, usage)
    for name, array in tensors.items():
        made[name].set(array)
    return made


class Counting(CpuBackend):
    """Records each write into its memory, by copy or set, as (tensor name, bytes)."""

    def __init__(self, name: str) -> None:
        super().__init__(1, name=name)
        self.came: list[tuple[str, int]] = []

    def set_tensor_async(self, tensor, data, offset=0):
        self.came.append((tensor.name, len(data)))
        super().set_tensor_async(tensor, data, offset)

    def cpy_tensor_from(self, src, dst):
        self.came.append((dst.name, dst.nbytes))
        return super().cpy_tensor_from(src, dst)

    def take(self) -> list[tuple[str, int]]:
        came, self.came = self.came, []
        return came


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
    assert event.wait(PATIENCE), "nobody came"


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

    def queue(self, scheduler: gs.Scheduler, k: int) -> None:
        """Set the inputs of compute k, and queue it."""
        self.x.set(self.input(k))
        if hasattr(self, "row"):
            self.row.set(np.int64([k]))
        scheduler.compute_async(self.graph)
