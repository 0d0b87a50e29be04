"""Both allocators of ggml's libraries, ours in front of its own, by ctypes: graphs of pointers, and buffer types.

To be imported in processes of their own (allocator_cases.py), since a loaded hook cannot be unloaded.
"""

import ctypes as c
import random

import numpy as np
from ggml_devices import Bench, Device
from ggml_schedulers import F32, Ggml, InitParams
from ggml_schedulers import Tensor as Fields

import ggml_sched.llama_cpp as hooked

INPUT, OUTPUT = 1, 2
g = Ggml()
base, ours, bench = g.base, g.ours, Bench(g)


class Tensor(c.Structure):
    """The fields of ggml_schedulers.Tensor, with pointers to tensors in place of their addresses."""


Pointer = c.POINTER(Tensor)
Tensor._fields_ = [(name, {"src": Pointer * 10, "view_src": Pointer}.get(name, kind))
                   for name, kind in Fields._fields_]


def bind(library: c.CDLL, name: str, result, *arguments):
    return c.CFUNCTYPE(result, *arguments)(c.cast(getattr(library, f"ggml_{name}"), c.c_void_p).value)


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
        self.bufts = bufts or (g.backend_cpu_buffer_type(),)
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
        self.ctx = g.init(InitParams(4 << 20, None, True))
        self.graph = g.new_graph_custom(self.ctx, 2048, False)
        self.leafs: list = []
        self.outputs: list = []

    def __getattr__(self, name: str):
        make = getattr(g, name)
        return lambda *arguments: c.cast(make(self.ctx, *arguments), Pointer)

    def leaf(self, ne0: int, ne1: int = 1, flags: int = INPUT, name: str = ""):
        t = self.new_tensor_4d(F32, ne0, ne1, 1, 1)
        t.contents.flags |= flags
        g.set_name(t, (name or f"leaf {len(self.leafs)}").encode())
        self.leafs.append(t)
        return t

    def output(self, t):
        t.contents.flags |= OUTPUT
        g.build_forward_expand(self.graph, t)
        self.outputs.append(t)
        return t

    def nodes(self) -> list:
        return [c.cast(g.graph_node(self.graph, i), Pointer) for i in range(g.graph_n_nodes(self.graph))]

    def forget(self, *more) -> None:
        """Take the memory from all tensors, as those of a graph that is built again."""
        for t in (*self.leafs, *self.nodes(), *more):
            t.contents.data = t.contents.buffer = None

    def run(self, backend, seed: int = 0) -> list[bytes]:
        """The outputs' bytes, of leafs filled by a seed."""
        rng = np.random.default_rng(seed)
        for t in self.leafs:
            if t.contents.data:
                values = rng.standard_normal(g.nbytes(t) // 4, dtype=np.float32)
                g.backend_tensor_set(t, values.ctypes.data_as(c.c_void_p), 0, values.nbytes)
        assert g.backend_graph_compute(backend, self.graph) == 0
        return [read(t) for t in self.outputs]

    def close(self) -> None:
        g.free(self.ctx)


def read(t) -> bytes:
    values = c.create_string_buffer(g.nbytes(t))
    g.backend_tensor_get(t, values, 0, len(values))
    return values.raw


def span(t) -> tuple[int, int]:
    return t.contents.data, t.contents.data + g.nbytes(t)


def apart(a, b) -> bool:
    return span(a)[1] <= span(b)[0] or span(b)[1] <= span(a)[0]


def fake_device(**how) -> Device:
    """A device whose type of buffers an allocator uses."""
    return bench.device("fake", **how)


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
            t = made.reshape_2d(made.scale(b, 0.75), width, rows)
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
