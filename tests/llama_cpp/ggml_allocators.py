"""ggml-python's libraries with our allocator in front of them, by ctypes: graphs, both allocators, fake buffer types.

To be imported in processes of their own (allocator_cases.py), since a loaded hook cannot be unloaded.
"""

import ctypes as c
import importlib.util
import os
import random
from pathlib import Path

import numpy as np

import ggml_sched.llama_cpp as hooked
from ggml_sched.llama_cpp.install import hook

F32, I32 = 0, 26
INPUT, OUTPUT = 1, 2


class Tensor(c.Structure):
    pass


Pointer = c.POINTER(Tensor)
Tensor._fields_ = [
    ("type", c.c_int32), ("buffer", c.c_void_p), ("ne", c.c_int64 * 4), ("nb", c.c_size_t * 4), ("op", c.c_int32),
    ("op_params", c.c_int32 * 16), ("flags", c.c_int32), ("src", Pointer * 10), ("view_src", Pointer),
    ("view_offs", c.c_size_t), ("data", c.c_void_p), ("name", c.c_char * 64), ("extra", c.c_void_p),
    ("padding", c.c_char * 8),
]


class InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


def _library(name: str) -> c.CDLL:
    spec = importlib.util.find_spec("ggml")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    return c.CDLL(str(folder / name), mode=os.RTLD_LOCAL | os.RTLD_NOW)


hooked.install(level="sched")
base, cpu = _library("libggml-base.so"), _library("libggml-cpu.so")
ours = c.CDLL(hook().__file__)


def bind(library: c.CDLL, name: str, result, *arguments):
    return c.CFUNCTYPE(result, *arguments)(c.cast(getattr(library, f"ggml_{name}"), c.c_void_p).value)


def _maker(name: str, *arguments):
    return bind(base, name, Pointer, c.c_void_p, *arguments)


init = bind(base, "init", c.c_void_p, InitParams)
free = bind(base, "free", None, c.c_void_p)
new_tensor = _maker("new_tensor_2d", c.c_int, c.c_int64, c.c_int64)
add, mul, mul_mat, sub = (_maker(name, Pointer, Pointer) for name in ("add", "mul", "mul_mat", "sub"))
scale = _maker("scale", Pointer, c.c_float)
rms_norm = _maker("rms_norm", Pointer, c.c_float)
silu, soft_max, cont, transpose = (_maker(name, Pointer) for name in ("silu", "soft_max", "cont", "transpose"))
view_2d = _maker("view_2d", Pointer, c.c_int64, c.c_int64, c.c_size_t, c.c_size_t)
view_tensor = _maker("view_tensor", Pointer)
reshape = _maker("reshape_2d", Pointer, c.c_int64, c.c_int64)
cpy = _maker("cpy", Pointer, Pointer)
add_inplace = _maker("add_inplace", Pointer, Pointer)
dup_tensor = _maker("dup_tensor", Pointer)
set_name = bind(base, "set_name", Pointer, Pointer, c.c_char_p)
new_graph = bind(base, "new_graph_custom", c.c_void_p, c.c_void_p, c.c_size_t, c.c_bool)
expand = bind(base, "build_forward_expand", None, c.c_void_p, Pointer)
add_node = bind(base, "graph_add_node", None, c.c_void_p, Pointer)
n_nodes = bind(base, "graph_n_nodes", c.c_int, c.c_void_p)
node_at = bind(base, "graph_node", Pointer, c.c_void_p, c.c_int)
nbytes = bind(base, "nbytes", c.c_size_t, Pointer)
cpu_buft = bind(base, "backend_cpu_buffer_type", c.c_void_p)
alloc_buffer = bind(base, "backend_buft_alloc_buffer", c.c_void_p, c.c_void_p, c.c_size_t)
free_buffer = bind(base, "backend_buffer_free", None, c.c_void_p)
buffer_base = bind(base, "backend_buffer_get_base", c.c_void_p, c.c_void_p)
buffer_usage = bind(base, "backend_buffer_get_usage", c.c_int, c.c_void_p)
tensor_alloc = bind(base, "backend_tensor_alloc", c.c_int, c.c_void_p, Pointer, c.c_void_p)
tensor_set = bind(base, "backend_tensor_set", None, Pointer, c.c_void_p, c.c_size_t, c.c_size_t)
tensor_get = bind(base, "backend_tensor_get", None, Pointer, c.c_void_p, c.c_size_t, c.c_size_t)
cpu_init = bind(cpu, "backend_cpu_init", c.c_void_p)
set_threads = bind(cpu, "backend_cpu_set_n_threads", None, c.c_void_p, c.c_int)
backend_free = bind(base, "backend_free", None, c.c_void_p)
compute = bind(base, "backend_graph_compute", c.c_int, c.c_void_p, c.c_void_p)


class Allocator:
    """ggml's own (`library` is base) or ours."""

    def __init__(self, library: c.CDLL, *bufts: int) -> None:
        def of(name, result, *arguments):
            return bind(library, f"gallocr_{name}", result, *arguments)

        self._free = of("free", None, c.c_void_p)
        ids = c.POINTER(c.c_int)
        self._reserve_n = of("reserve_n", c.c_bool, c.c_void_p, c.c_void_p, ids, ids)
        self._reserve_n_size = of("reserve_n_size", None, c.c_void_p, c.c_void_p, ids, ids, c.POINTER(c.c_size_t))
        self._alloc = of("alloc_graph", c.c_bool, c.c_void_p, c.c_void_p)
        self._size = of("get_buffer_size", c.c_size_t, c.c_void_p, c.c_int)
        self.bufts = bufts or (cpu_buft(),)
        self.handle = of("new_n", c.c_void_p, c.POINTER(c.c_void_p), c.c_int)(
            (c.c_void_p * len(self.bufts))(*self.bufts), len(self.bufts))
        assert self.handle

    def reserve(self, graph, nodes=None, leafs=None) -> bool:
        return self._reserve_n(self.handle, graph, nodes and (c.c_int * len(nodes))(*nodes),
                               leafs and (c.c_int * len(leafs))(*leafs))

    def sizes(self, graph, nodes=None, leafs=None) -> list[int]:
        """The bytes that a reservation would need."""
        found = (c.c_size_t * len(self.bufts))()
        self._reserve_n_size(self.handle, graph, nodes and (c.c_int * len(nodes))(*nodes),
                             leafs and (c.c_int * len(leafs))(*leafs), found)
        return list(found)

    def alloc(self, graph) -> bool:
        return self._alloc(self.handle, graph)

    def size(self, i: int = 0) -> int:
        return self._size(self.handle, i)

    def close(self) -> None:
        self._free(self.handle)


class Context:
    """Tensors without memory, a graph of them, and what its leafs hold."""

    def __init__(self) -> None:
        self.ctx = init(InitParams(4 << 20, None, True))
        self.graph = new_graph(self.ctx, 2048, False)
        self.leafs: list = []
        self.outputs: list = []

    def __getattr__(self, name: str):
        make = globals()[name]
        return lambda *arguments: make(self.ctx, *arguments)

    def leaf(self, ne0: int, ne1: int = 1, flags: int = INPUT, name: str = ""):
        t = new_tensor(self.ctx, F32, ne0, ne1)
        t.contents.flags |= flags
        set_name(t, (name or f"leaf {len(self.leafs)}").encode())
        self.leafs.append(t)
        return t

    def output(self, t):
        t.contents.flags |= OUTPUT
        expand(self.graph, t)
        self.outputs.append(t)
        return t

    def nodes(self) -> list:
        return [node_at(self.graph, i) for i in range(n_nodes(self.graph))]

    def forget(self, *more) -> None:
        """Take the memory from all tensors, as those of a graph that is built again."""
        for t in (*self.leafs, *self.nodes(), *more):
            t.contents.data = t.contents.buffer = None

    def run(self, backend, seed: int = 0) -> list[bytes]:
        """The outputs' bytes, of leafs filled by a seed."""
        rng = np.random.default_rng(seed)
        for t in self.leafs:
            if t.contents.data:
                values = rng.standard_normal(nbytes(t) // 4, dtype=np.float32)
                tensor_set(t, values.ctypes.data_as(c.c_void_p), 0, values.nbytes)
        assert compute(backend, self.graph) == 0
        return [read(t) for t in self.outputs]

    def close(self) -> None:
        free(self.ctx)


def read(t) -> bytes:
    values = c.create_string_buffer(nbytes(t))
    tensor_get(t, values, 0, len(values))
    return values.raw


def span(t) -> tuple[int, int]:
    return t.contents.data, t.contents.data + nbytes(t)


def apart(a, b) -> bool:
    return span(a)[1] <= span(b)[0] or span(b)[1] <= span(a)[0]


class FakeType:
    """A type of buffers of the CPU's memory: its alignment, bounds and extra bytes are the test's.

    `listens`: its buffers have an init_tensor of their own, which appends each tensor to `told`.
    """

    class _Type(c.Structure):
        _fields_ = [("functions", c.c_void_p * 6), ("device", c.c_void_p), ("context", c.c_void_p)]

    class _Buffer(c.Structure):
        _fields_ = [("free_buffer", c.c_void_p), ("get_base", c.c_void_p), ("init_tensor", c.c_void_p),
                    ("others", c.c_void_p * 8)]

    def __init__(self, alignment: int = 32, max_size: int = 2**64 - 1, extra: int = 0, room: int = 1 << 40,
                 listens: bool = False) -> None:
        self.room, self.extra, self.asked, self.name = room, extra, [], c.create_string_buffer(b"fake")
        self.listens, self.told = listens, []
        size = c.c_size_t
        self._kept = [
            c.CFUNCTYPE(c.c_void_p, c.c_void_p)(lambda buft: c.addressof(self.name)),
            c.CFUNCTYPE(c.c_void_p, c.c_void_p, size)(self._alloc),
            c.CFUNCTYPE(size, c.c_void_p)(lambda buft: alignment),
            c.CFUNCTYPE(size, c.c_void_p)(lambda buft: max_size),
            c.CFUNCTYPE(size, c.c_void_p, Pointer)(lambda buft, t: nbytes(t) + self.extra),
        ]
        self._type = self._Type((c.c_void_p * 6)(*(c.cast(f, c.c_void_p).value for f in self._kept), None), None, None)
        self.handle = c.addressof(self._type)

    def _alloc(self, buft, size):
        self.asked.append(size)
        if size > self.room:
            return None
        return self._listener(size) if self.listens else alloc_buffer(cpu_buft(), size)

    def _listener(self, size: int) -> int:
        memory = c.create_string_buffer(size + 64)
        start = c.addressof(memory) + 63 & ~63
        made = [c.CFUNCTYPE(None, c.c_void_p)(lambda buffer: None),
                c.CFUNCTYPE(c.c_void_p, c.c_void_p)(lambda buffer: start),
                c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)(lambda buffer, t: self.told.append(t) or 0)]
        self._kept += [memory, *made]
        slots = self._Buffer(*(c.cast(f, c.c_void_p).value for f in made), (c.c_void_p * 8)())
        new = bind(base, "backend_buffer_init", c.c_void_p, c.c_void_p, self._Buffer, c.c_void_p, c.c_size_t)
        return new(self.handle, slots, None, size)


def random_graph(seed: int, width: int = 16, rows: int = 6, size: int = 40, inputs: int = 3) -> Context:
    """Operations at random over tensors of one shape, some seen through views; several outputs."""
    rng = random.Random(seed)
    made = Context()
    big = made.leaf(width, rows * 2)
    pool = [made.leaf(width, rows) for _ in range(inputs)]
    pool += [made.view_2d(big, width, rows, 4 * width, 4 * width * rows * k) for k in range(2)]
    square = made.leaf(width, width)
    for _ in range(size):
        kind, a, b = rng.randrange(11), rng.choice(pool), rng.choice(pool[-6:])
        if kind < 3:
            t = (made.add, made.mul, made.sub)[kind](a, b)
        elif kind == 3:
            t = made.mul(made.rms_norm(b, 1e-5), a)
        elif kind == 4:
            t = made.scale(b, 0.5)
        elif kind == 5:
            t = made.silu(b)
        elif kind == 6:
            t = made.soft_max(b)
        elif kind == 7:
            t = made.mul_mat(square, b)
        elif kind == 8:
            t = made.reshape(made.scale(b, 0.75), width, rows)
        elif kind == 9:
            both = made.mul_mat(square, big)
            t = made.silu(made.view_2d(both, width, rows, 4 * width, 4 * width * rng.randrange(rows)))
        else:
            t = made.rms_norm(a, 1e-5)
        pool.append(t)
        # ggml's own allocator gives an output away that is a view.
        if rng.random() < 0.1 and not t.contents.view_src:
            made.output(t)
    made.output(made.silu(pool[-1]))
    return made


def verified() -> int:
    """Assert that all plans of the process's allocators verify; returns their number."""
    found = hooked.plans()
    for plan in found:
        plan.verify()
    return len(found)
