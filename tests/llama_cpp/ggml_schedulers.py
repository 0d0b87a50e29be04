"""ggml's libraries by ctypes, under the hook: graphs, backends, schedulers, ggml's own beside ours in one process.

Run by tests in a process of its own, which loads the hook first and the libraries then.
"""

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

import numpy as np

from ggml_sched.llama_cpp import install
from ggml_sched.llama_cpp.install import hook

F32, I32 = 0, 26
CALLBACK = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Tensor(ctypes.Structure):
    """The first fields of ggml_tensor, as far as tests read them."""

    _fields_ = [("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4), ("op", c_int),
                ("params", c_int * 16), ("flags", c_int), ("src", c_void_p * 10), ("view_src", c_void_p),
                ("view_offs", c_size_t), ("data", c_void_p), ("name", ctypes.c_char * 64)]


def folder() -> str:
    """Where the libraries are: GGML_SCHED_TEST_GGML, or those of the ggml package (which is not imported)."""
    from importlib.util import find_spec

    named = os.environ.get("GGML_SCHED_TEST_GGML")
    return named or find_spec("ggml").submodule_search_locations[0] + "/lib"


class Ggml:
    """The libraries.  Functions are named as ggml's, without the prefix; handles are integers."""

    def __init__(self, level: str = "sched") -> None:
        install(level=level)
        at = folder()
        mode = ctypes.RTLD_LOCAL | os.RTLD_LAZY
        name = "libggml-base.so.0" if os.path.exists(f"{at}/libggml-base.so.0") else "libggml-base.so"
        self.base_path = f"{at}/{name}"
        self.base = ctypes.CDLL(self.base_path, mode=mode)
        cpu = next(f for f in sorted(os.listdir(at)) if f.startswith("libggml-cpu"))
        self.cpu = ctypes.CDLL(f"{at}/{cpu}", mode=mode)
        self.ours = ctypes.CDLL(hook().__file__)

    def __getattr__(self, name: str):
        # By the dynamic linker, which finds the hook's functions first. Calls of ggml's own schedulers pass through
        # them, too.
        for library in (self.ours, self.base, self.cpu):
            try:
                function = getattr(library, f"ggml_{name}")
            except AttributeError:
                continue
            function.restype, function.argtypes = SIGNATURES.get(name, (c_void_p, None))
            setattr(self, name, function)
            return function
        raise AttributeError(name)

    def cpu_backend(self, threads: int = 1) -> int:
        backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(backend, threads)
        return backend

    def devices(self, library: str, count: int, events: bool = False) -> list[int]:
        """Backends of devices whose memory no other reads (bench/hooked/devices.cpp)."""
        device = self.backend_reg_dev_get(self.backend_cpu_reg(), 0)
        handles = (c_void_p * (count + 1))()
        hosts = ctypes.CDLL(library)
        assert hosts.devices_open(os.fsencode(self.base_path), c_void_p(device), count, 0, int(events), handles) == 0
        return [self.backend_dev_init(handles[i], None) for i in range(count)]

    def scheduler(self, backends: list[int], ours: bool, parallel: bool = False, bufts: list[int] | None = None,
                  offload: bool = True) -> int:
        hook().schedule(ours)
        hook().pass_through(not ours)
        found = self.backend_sched_new((c_void_p * len(backends))(*backends),
                                       (c_void_p * len(bufts))(*bufts) if bufts else None, len(backends), 4096,
                                       parallel, offload)
        assert found
        return found


def run(cases: dict) -> None:
    """Run the case that the command line names, and print "done"."""
    cases[sys.argv[1]](*sys.argv[2:])
    print("done")


class Graph:
    """Tensors in a context of their own, without memory, and a graph of them."""

    def __init__(self, g: Ggml, size: int = 512, memory=None) -> None:
        self.g = g
        self.memory = memory if memory is not None else ctypes.create_string_buffer(1 << 21)
        self.ctx = g.init(InitParams(len(self.memory), ctypes.addressof(self.memory), True))
        self.graph = g.new_graph_custom(self.ctx, size, False)
        self.names = 0

    def tensor(self, *ne: int, kind: int = F32, flags: str = "") -> int:
        ne = (*ne, *(1,) * (4 - len(ne)))
        t = self.g.new_tensor_4d(self.ctx, kind, *ne)
        if "i" in flags:
            self.g.set_input(t)
        return self.named(t)

    def named(self, t: int) -> int:
        self.names += 1
        self.g.set_name(t, b"t%d" % self.names)
        return t

    def op(self, name: str, *args) -> int:
        return self.named(getattr(self.g, name)(self.ctx, *args))

    def expand(self, *outputs: int) -> None:
        for t in outputs:
            self.g.set_output(t)
            self.g.build_forward_expand(self.graph, t)

    def allocate(self, scheduler: int, chosen: dict[int, int]) -> None:
        """Reset and allocate, with nodes assigned to backends: {node: backend}."""
        self.g.backend_sched_reset(scheduler)
        for node, backend in chosen.items():
            self.g.backend_sched_set_tensor_backend(scheduler, node, backend)
        assert self.g.backend_sched_alloc_graph(scheduler, self.graph)

    def nodes(self) -> list[int]:
        return [self.g.graph_node(self.graph, i) for i in range(self.g.graph_n_nodes(self.graph))]

    def put(self, t: int, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        assert values.nbytes == self.g.nbytes(t)
        self.g.backend_tensor_set(t, values.ctypes.data, 0, values.nbytes)

    def get(self, t: int) -> np.ndarray:
        out = np.empty(self.g.nbytes(t) // 4, np.float32)
        self.g.backend_tensor_get(t, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        self.g.free(self.ctx)


def view(t: int) -> Tensor:
    return Tensor.from_address(t)


P = c_void_p
SIGNATURES = {
    "init": (P, [InitParams]), "free": (None, [P]), "nbytes": (c_size_t, [P]), "set_name": (P, [P, c_char_p]),
    "new_tensor_4d": (P, [P, c_int, *[c_int64] * 4]), "new_graph_custom": (P, [P, c_size_t, c_bool]),
    "set_input": (None, [P]), "set_output": (None, [P]), "build_forward_expand": (None, [P, P]),
    "graph_node": (P, [P, c_int]), "graph_n_nodes": (c_int, [P]),
    "graph_add_node": (None, [P, P]), "backend_graph_compute": (c_int, [P, P]),
    "backend_buffer_get_usage": (c_int, [P]), "view_tensor": (P, [P, P]), "dup_tensor": (P, [P, P]),
    "sub": (P, [P, P, P]), "add": (P, [P, P, P]),
    "mul": (P, [P, P, P]), "mul_mat": (P, [P, P, P]), "scale": (P, [P, P, c_float]),
    "scale_inplace": (P, [P, P, c_float]), "backend_buft_alloc_buffer": (P, [P, c_size_t]),
    "backend_buffer_get_base": (P, [P]),
    "rms_norm": (P, [P, P, c_float]), "soft_max": (P, [P, P]), "silu": (P, [P, P]), "gelu": (P, [P, P]),
    "cont": (P, [P, P]), "transpose": (P, [P, P]), "cpy": (P, [P, P, P]), "reshape_2d": (P, [P, P, c_int64, c_int64]),
    "view_2d": (P, [P, P, c_int64, c_int64, c_size_t, c_size_t]), "norm": (P, [P, P, c_float]),
    "view_1d": (P, [P, P, c_int64, c_size_t]), "concat": (P, [P, P, P, c_int]), "sum_rows": (P, [P, P]),
    "get_rows": (P, [P, P, P]), "mul_mat_id": (P, [P, P, P, P]), "argsort": (P, [P, P, c_int]),
    "soft_max_add_sinks": (None, [P, P]), "swiglu_split": (P, [P, P, P]),
    "backend_tensor_alloc": (c_int, [P, P, P]),
    "set_rows": (P, [P, P, P, P]),
    "backend_cpu_init": (P, []), "backend_cpu_set_n_threads": (None, [P, c_int]), "backend_free": (None, [P]),
    "backend_cpu_reg": (P, []), "backend_reg_dev_get": (P, [P, c_size_t]), "backend_dev_init": (P, [P, c_char_p]),
    "backend_tensor_set": (None, [P, P, c_size_t, c_size_t]), "backend_tensor_get": (None, [P, P, c_size_t, c_size_t]),
    "backend_alloc_ctx_tensors": (P, [P, P]), "backend_buffer_free": (None, [P]),
    "backend_buffer_set_usage": (None, [P, c_int]), "backend_get_default_buffer_type": (P, [P]),
    "backend_sched_new": (P, [P, P, c_int, c_size_t, c_bool, c_bool]), "backend_sched_free": (None, [P]),
    "backend_sched_reserve": (c_bool, [P, P]), "backend_sched_alloc_graph": (c_bool, [P, P]),
    "backend_sched_reserve_size": (None, [P, P, POINTER(c_size_t)]), "backend_sched_split_graph": (None, [P, P]),
    "backend_sched_graph_compute": (c_int, [P, P]), "backend_sched_graph_compute_async": (c_int, [P, P]),
    "backend_sched_synchronize": (None, [P]), "backend_sched_reset": (None, [P]),
    "backend_sched_set_eval_callback": (None, [P, CALLBACK, P]),
    "backend_sched_get_n_backends": (c_int, [P]), "backend_sched_get_n_splits": (c_int, [P]),
    "backend_sched_get_n_copies": (c_int, [P]), "backend_sched_get_backend": (P, [P, c_int]),
    "backend_sched_get_buffer_type": (P, [P, P]), "backend_sched_get_buffer_size": (c_size_t, [P, P]),
    "backend_sched_set_tensor_backend": (None, [P, P, P]), "backend_sched_get_tensor_backend": (P, [P, P]),
}

__all__ = ["CALLBACK", "F32", "I32", "Ggml", "Graph", "Tensor", "byref", "c_size_t", "hook", "run", "view"]
