"""Configurable devices for ggml's scheduler: supported ops, alloc sizes, readable buffers, failures, late queues.

Backends and buffer types by ctypes, as ggml 0.15 and 0.25 lay them out; the CPU computes for them, a node at a time.
Work of a device stays in its queue until a caller waits for it.  Invariant: each access to memory that queued work
still reads or writes, and each read by a device of memory that it cannot read, is recorded in `wrong`; `log` has the
calls in order.
"""

from __future__ import annotations

import ctypes as c
import traceback

from ggml_schedulers import Ggml, InitParams, view

GPU = 1
TENSOR_BYTES = 336
"""Of a ggml_tensor."""
AT_SRC = 152

P, SIZE, BOOL, INT = c.c_void_p, c.c_size_t, c.c_bool, c.c_int


class _Type(c.Structure):
    _fields_ = [("get_name", P), ("alloc_buffer", P), ("get_alignment", P), ("get_max_size", P), ("get_alloc_size", P),
                ("is_host", P), ("device", P), ("context", P)]


class _BufferSlots(c.Structure):
    _fields_ = [(name, P) for name in ("free_buffer", "get_base", "init_tensor", "memset_tensor", "set_tensor",
                                       "get_tensor", "set_2d", "get_2d", "cpy_tensor", "clear", "reset")]


class _Backend(c.Structure):
    _fields_ = [(name, P) for name in ("guid", "get_name", "free", "set_async", "get_async", "set_2d", "get_2d",
                                       "cpy_async", "synchronize", "plan_create", "plan_free", "plan_update",
                                       "plan_compute", "graph_compute", "event_record", "event_wait",
                                       "graph_optimize", "device", "context")]


class _Device(c.Structure):
    _fields_ = [(name, P) for name in ("get_name", "get_description", "get_memory", "get_type", "get_props",
                                       "init_backend", "get_buffer_type", "host_buffer_type", "from_host_pointer",
                                       "supports_op", "supports_buft", "offload_op", "event_new", "event_free",
                                       "event_synchronize", "registry", "context")]


class _Event(c.Structure):
    _fields_ = [("device", P), ("context", P)]


def _overlap(a, b) -> bool:
    return any(x[0] < y[1] and y[0] < x[1] for x in a for y in b)


class _Work:
    """One queued operation: the ranges that it reads and writes, its function, and the work that it waits for."""

    def __init__(self, what: str, run, reads=(), writes=(), after: _Work | None = None) -> None:
        self.what, self.run, self.reads, self.writes, self.after = what, run, list(reads), list(writes), after
        self.done = False


class Bench:
    """The devices of a test, their calls (`log`), and wrong accesses (`wrong`)."""

    def __init__(self, g: Ggml) -> None:
        self.g, self.devices, self.log, self.wrong = g, [], [], []
        self.cpu = g.cpu_backend()
        for name, (result, arguments) in {
            "backend_buffer_init": (P, [P, _BufferSlots, P, SIZE]), "backend_buffer_get_type": (P, [P]),
            "op_name": (c.c_char_p, [INT]), "graph_nodes": (P, [P]),
            "backend_buft_name": (c.c_char_p, [P]),
        }.items():
            function = getattr(g, name)
            function.restype, function.argtypes = result, arguments
        # Since 2026, results of some ops alone may take more bytes than they have.
        self.may_expand = getattr(g.base, "ggml_op_alloc_size_may_expand", lambda op: True)
        self.may_expand.restype = BOOL

    def device(self, name: str, **how) -> Device:
        self.devices.append(Device(self, name, **how))
        return self.devices[-1]

    def guarded(self, answer):
        """A callback that records its exception, which ctypes would drop."""
        def call(*arguments):
            try:
                return answer(*arguments)
            except BaseException:
                self.wrong.append(traceback.format_exc())
                return 0
        return call

    def touch(self, what: str, reads=(), writes=(), by=None) -> None:
        """Check an access to ranges of bytes: now, or in the queue of `by`."""
        waited = [work.after for work in by.queue if work.after] if by else []
        for device in self.devices:
            done = max((k for k, work in enumerate(device.queue) if work in waited), default=-1)
            for work in device.queue[done + 1:] if device is not by else ():
                if _overlap(reads, work.writes) or _overlap(writes, work.reads) or _overlap(writes, work.writes):
                    self.wrong.append(f"{what} meets {work.what} of {device.name}, which has not run yet")

    def sound(self) -> None:
        assert not self.wrong, "\n".join(self.wrong)

    def named(self, kind: str) -> list:
        """The log's entries of one kind."""
        return [what for what in self.log if what[0] == kind]

    def op(self, node: int) -> str:
        return self.g.op_name(view(node).op).decode()

    def span(self, t: int) -> tuple[int, int]:
        return view(t).data, view(t).data + self.g.nbytes(t)


class Device:
    """One of them, with its type of buffers and a backend.

    `reads`: devices whose memory it reads, too.  `refuses`, `offloads`: names of ops.  `extra`: bytes that it allocates
    behind every tensor, and writes to. `lazy`: work runs when a caller waits. `host`: its memory is the host's.
    `fails`: {node: the status of its compute}. `told`: the tensors that init_tensor received. `allocated`: the bytes
    of each buffer that was wanted. `shares`: another device, whose buffer type this one uses. `optimize`: reorders the
    nodes of a part in place and returns the pairs that must not share memory.
    """

    def __init__(self, bench: Bench, name: str, reads=(), refuses=(), offloads=(), extra: int = 0, lazy: bool = False,
                 host: bool = False, events: bool = False, shares: Device | None = None, kind: int = GPU,
                 room: int = 1 << 30, max_size: int = 0, alignment: int = 32,
                 optimize=None) -> None:
        self.bench, self.g, self.name = bench, bench.g, name
        self.reads, self.refuses, self.offloads, self.extra = list(reads), set(refuses), set(offloads), extra
        self.lazy, self.host, self.events, self.kind, self.room = lazy, host, events, kind, room
        self.max_size, self.alignment = max_size, alignment
        self.optimize = optimize
        self.queue: list[_Work] = []
        self.allocated: list[int] = []
        self.told: list[int] = []
        self.fails: dict[int, int] = {}
        self._kept: list = []
        self._events: dict[int, _Event] = {}
        self._recorded: dict[int, _Work] = {}
        self._guid = c.create_string_buffer(b"a fake backend  ")
        self._label = c.create_string_buffer(name.encode())
        self._device, self._backend = self._make_device(), None
        self.type = shares.type if shares is not None else self._make_type()
        self._backend = self._make_backend()
        self.handle, self.buft = c.addressof(self._backend), c.addressof(self.type)

    def _wanted(self, t: int) -> int:
        """The extra bytes behind a tensor of this layout."""
        return self.extra if self.bench.may_expand(view(t).op) else 0

    def _behind(self, t: int) -> int:
        """The extra bytes that are allocated behind the tensor."""
        return self._wanted(t) if not view(t).view_src else 0

    def _slot(self, result, answer, *arguments) -> int:
        made = c.CFUNCTYPE(result, *arguments)(self.bench.guarded(answer))
        self._kept.append(made)
        return c.cast(made, P).value

    # -- memory

    def _make_type(self) -> _Type:
        label = c.addressof(self._label)
        return _Type(
            get_name=self._slot(P, lambda t: label, P), alloc_buffer=self._slot(P, self._alloc, P, SIZE),
            get_alignment=self._slot(SIZE, lambda t: self.alignment, P),
            get_max_size=self._slot(SIZE, lambda t: self.max_size, P) if self.max_size else None,
            get_alloc_size=self._slot(SIZE, lambda buft, t: self.g.nbytes(t) + self._wanted(t), P, P),
            is_host=self._slot(BOOL, lambda t: self.host, P), device=c.addressof(self._device))

    def _alloc(self, buft, size):
        self.allocated.append(size)
        if size > self.room:
            return None
        memory = c.create_string_buffer(size + 64)
        base = c.addressof(memory) + 63 & ~63
        slots = _BufferSlots(
            free_buffer=self._slot(None, lambda b: None, P), get_base=self._slot(P, lambda b: base, P),
            init_tensor=self._slot(INT, lambda b, t: self.told.append(t) or 0, P, P),
            set_tensor=self._slot(None, self._set, P, P, P, SIZE, SIZE),
            get_tensor=self._slot(None, self._get, P, P, P, SIZE, SIZE),
            clear=self._slot(None, lambda b, value: c.memset(base, value, size), P, c.c_uint8))
        self._kept.append(memory)
        return self.g.backend_buffer_init(c.addressof(self.type), slots, None, size)

    def _set(self, buffer, t, data, at, size) -> None:
        lo = view(t).data + at
        self.bench.log.append(("set", self.name, view(t).name.decode(), at, size))
        self.bench.touch(f"writing {view(t).name.decode()}", writes=[(lo, lo + size)])
        c.memmove(lo, data, size)
        self._spill(t, at + size)

    def _get(self, buffer, t, data, at, size) -> None:
        lo = view(t).data + at
        self.bench.log.append(("get", self.name, view(t).name.decode(), at, size))
        self.bench.touch(f"reading {view(t).name.decode()}", reads=[(lo, lo + size)])
        c.memmove(data, lo, size)

    def _spill(self, t: int, stop: int) -> None:
        """Write the extra bytes behind a tensor whose end was written."""
        if stop == self.g.nbytes(t):
            c.memset(view(t).data + stop, 0xA5, self._behind(t))

    # -- work

    def _give(self, work: _Work) -> None:
        self.bench.touch(work.what, work.reads, work.writes, by=self)
        self.queue.append(work)
        if not self.lazy:
            self.drain()

    def drain(self, until: _Work | None = None) -> None:
        """Run the queue, or its part up to `last`."""
        while self.queue and (until is None or not until.done):
            work = self.queue.pop(0)
            work.run()
            work.done = True

    def _compute(self, backend, graph) -> int:
        nodes = [self.g.graph_node(graph, i) for i in range(self.g.graph_n_nodes(graph))]
        self.bench.log.append(("compute", self.name, tuple(view(t).name.decode() for t in nodes)))
        for t in nodes:
            if t in self.fails:
                return self.fails[t]
            if self.bench.op(t) not in ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"):
                self._compute_node(t)
        return 0

    def _compute_node(self, t: int) -> None:
        name, sources = view(t).name.decode(), [s for s in view(t).src if s]
        mine = [self.type, *(other.type for other in self.reads)]
        for s in (t, *sources):
            buft = self.g.backend_buffer_get_type(view(s).buffer)
            if buft not in [c.addressof(kind) for kind in mine]:
                self.bench.wrong.append(f"{self.name} cannot read {view(s).name.decode()}, a source of {name}")
        # A copy of its fields: a scheduler changes tensors while a device's work is queued.
        copies = [c.create_string_buffer(c.string_at(s, TENSOR_BYTES), TENSOR_BYTES) for s in (t, *view(t).src) if s]
        left = iter(copies[1:])
        for k, s in enumerate(view(t).src):
            where = c.c_void_p.from_buffer(copies[0], AT_SRC + 8 * k)
            where.value = c.addressof(next(left)) if s else None

        def run() -> None:
            ctx = self.g.init(InitParams(1 << 14, None, False))
            graph = self.g.new_graph_custom(ctx, 4, False)
            self.g.graph_add_node(graph, c.addressof(copies[0]))
            assert self.g.backend_graph_compute(self.bench.cpu, graph) == 0
            self.g.free(ctx)
            c.memset(stop, 0xA5, behind)

        start, stop = self.bench.span(t)
        behind = self._behind(t)
        self._give(_Work(name, run, [self.bench.span(s) for s in sources], [(start, stop + behind)]))

    def _set_async(self, backend, t, data, at, size) -> None:
        lo, values = view(t).data + at, c.string_at(data, size)
        self.bench.log.append(("set_async", self.name, view(t).name.decode(), at, size))
        self._give(_Work(f"setting {view(t).name.decode()}", lambda: c.memmove(lo, values, size),
                         writes=[(lo, lo + size)]))

    def _get_async(self, backend, t, data, at, size) -> None:
        lo = view(t).data + at
        self.bench.log.append(("get_async", self.name, view(t).name.decode(), at, size))
        self._give(_Work(f"getting {view(t).name.decode()}", lambda: c.memmove(data, lo, size), [(lo, lo + size)]))

    def _copy_async(self, b_from, b_to, source, to) -> bool:
        """Copy in the source device's queue; the destination's queue waits for the copy."""
        other = next((d for d in self.bench.devices if d.handle == b_from), None)
        if other is None:
            return False
        read, write = self.bench.span(source), self.bench.span(to)
        self.bench.log.append(("copy_async", self.name, view(to).name.decode()))
        what = f"copying {view(to).name.decode()}"
        behind = self._behind(to)

        def copy() -> None:
            c.memmove(write[0], read[0], read[1] - read[0])
            c.memset(write[1], 0xA5, behind)

        copying = _Work(what, copy, [read], [(write[0], write[1] + behind)])
        other._give(copying)
        if other is not self:
            self.queue.append(_Work(f"waiting for {other.name}", lambda: other.drain(copying), after=copying))
            if not self.lazy:
                self.drain()
        return True

    def _optimize(self, backend, part, params) -> None:
        nodes = (P * self.g.graph_n_nodes(part)).from_address(self.g.graph_nodes(part))
        add_alloc_dep, user = (P * 2).from_address(params)
        for pair in self.optimize(nodes):
            c.CFUNCTYPE(None, P, P, P)(add_alloc_dep)(user, *pair)

    def _synchronize(self, backend) -> None:
        self.bench.log.append(("synchronize", self.name))
        self.drain()

    def _record(self, backend, event) -> None:
        self.bench.log.append(("record", self.name, event))
        self._recorded[event] = _Work("an event", lambda: None)
        self._give(self._recorded[event])

    def _wait(self, backend, event) -> None:
        self.bench.log.append(("wait", self.name, event))

    def _synchronize_event(self, device, event) -> None:
        self.bench.log.append(("synchronize_event", self.name, event))
        if event in self._recorded:
            self.drain(self._recorded[event])

    # -- properties

    def _make_device(self) -> _Device:
        label = c.addressof(self._label)

        def new_event(device):
            event = _Event(device, None)
            self._events[c.addressof(event)] = event
            return c.addressof(event)

        return _Device(
            get_name=self._slot(P, lambda d: label, P), get_description=self._slot(P, lambda d: label, P),
            get_memory=self._slot(None, lambda d, a, b: None, P, P, P),
            get_type=self._slot(INT, lambda d: self.kind, P), get_props=self._slot(None, lambda d, p: None, P, P),
            get_buffer_type=self._slot(P, lambda d: self.buft, P),
            supports_op=self._slot(BOOL, lambda d, t: self.bench.op(t) not in self.refuses, P, P),
            supports_buft=self._slot(
                BOOL, lambda d, buft: buft in [c.addressof(x.type) for x in (self, *self.reads)], P, P),
            offload_op=self._slot(BOOL, lambda d, t: self.bench.op(t) in self.offloads, P, P),
            event_new=self._slot(P, new_event, P) if self.events else None,
            event_free=self._slot(None, lambda d, event: self._events.pop(event) and None, P, P),
            event_synchronize=self._slot(None, self._synchronize_event, P, P))

    def _make_backend(self) -> _Backend:
        label = c.addressof(self._label)
        return _Backend(
            guid=c.addressof(self._guid), get_name=self._slot(P, lambda b: label, P),
            free=self._slot(None, lambda b: None, P),
            set_async=self._slot(None, self._set_async, P, P, P, SIZE, SIZE),
            get_async=self._slot(None, self._get_async, P, P, P, SIZE, SIZE),
            cpy_async=self._slot(BOOL, self._copy_async, P, P, P, P),
            synchronize=self._slot(None, self._synchronize, P),
            graph_compute=self._slot(INT, self._compute, P, P),
            event_record=self._slot(None, self._record, P, P), event_wait=self._slot(None, self._wait, P, P),
            graph_optimize=self._slot(None, self._optimize, P, P, P) if self.optimize else None,
            device=c.addressof(self._device))


__all__ = ["Bench", "Device"]
