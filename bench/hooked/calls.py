"""Time inside a graph allocator or a scheduler, stock and on our planner: the least of many calls.

    python calls.py alloc|sched [ROUNDS]

bench/hooking.py measures once for each context, so its times depend on the machine's other load; here a graph of
llama-2-7b's shape is made with ggml's own functions, and reserved and allocated again and again as llama.cpp does: a
prompt, a token, a prompt; then batches at other addresses, of other shapes (`first`), which come again.  Nothing is
computed.  A hook stays for the life of a process: stock and hooked run in separate processes, in turn.
"""

from __future__ import annotations

import ctypes as c
import json
import subprocess
import sys
import time
from importlib.util import find_spec

LAYERS, WIDTH, HEADS, HIDDEN, VOCAB, CTX = 32, 4096, 32, 11008, 32000, 4096
HEAD = WIDTH // HEADS
F32, F16, Q4_0, I32, I64 = 0, 1, 2, 26, 27
AT_BUFFER, AT_DATA = 8, 248
"""Offsets in bytes of `buffer` and `data` in ggml_tensor."""
ROOM = 3 << 20
TURNS = 4

P, L, Z, F, B, N = c.c_void_p, c.c_int64, c.c_size_t, c.c_float, c.c_bool, c.c_int
TYPES = {
    "new_tensor_1d": (P, P, N, L), "new_tensor_2d": (P, P, N, L, L), "mul_mat": (P, P, P, P), "mul": (P, P, P, P),
    "add": (P, P, P, P), "rms_norm": (P, P, P, F), "reshape_2d": (P, P, P, L, L), "reshape_3d": (P, P, P, L, L, L),
    "permute": (P, P, P, N, N, N, N), "cont_2d": (P, P, P, L, L), "set_rows": (P, P, P, P, P),
    "get_rows": (P, P, P, P), "view_2d": (P, P, P, L, L, Z, Z), "view_3d": (P, P, P, L, L, L, Z, Z, Z),
    "soft_max_ext": (P, P, P, P, F, F), "rope_ext": (P, P, P, P, P, N, N, N, F, F, F, F, F, F),
    "swiglu_split": (P, P, P, P), "new_graph_custom": (P, P, Z, B), "build_forward_expand": (None, P, P),
    "set_input": (None, P), "set_output": (None, P), "used_mem": (Z, P), "backend_cpu_buffer_type": (P,),
    "backend_buft_alloc_buffer": (P, P, Z), "backend_buffer_get_base": (P, P),
    "backend_buffer_set_usage": (None, P, N), "backend_cpu_init": (P,),
    "gallocr_new_n": (P, P, N), "gallocr_free": (None, P), "gallocr_reserve": (B, P, P),
    "gallocr_alloc_graph": (B, P, P), "backend_sched_new": (P, P, P, N, Z, B, B), "backend_sched_free": (None, P),
    "backend_sched_reserve": (B, P, P), "backend_sched_split_graph": (None, P, P), "backend_sched_reset": (None, P),
    "backend_sched_alloc_graph": (B, P, P),
}


class Init(c.Structure):
    _fields_ = [("size", c.c_size_t), ("memory", c.c_void_p), ("no_alloc", c.c_bool)]


class Ggml:
    """Functions by name, as the dynamic linker finds them: ours in a hooked process."""

    def __init__(self) -> None:
        folder = find_spec("llama_cpp").submodule_search_locations[0] + "/lib/"
        base = c.CDLL(folder + "libggml-base.so.0")
        self._found = (c.CDLL(None), base, c.CDLL(folder + "libggml-cpu.so.0"))
        self.init = base.ggml_init
        self.init.restype, self.init.argtypes = P, [Init]

    def __getattr__(self, name: str):
        for library in self._found:
            function = getattr(library, "ggml_" + name, None)
            if function is not None:
                function.restype, *function.argtypes = TYPES[name]
                setattr(self, name, function)
                return function
        raise AttributeError(name)


class Weights:
    """Resident tensors, which all share one buffer."""

    def __init__(self, g: Ggml) -> None:
        self.memory = c.create_string_buffer(ROOM)
        self.ctx = g.init(Init(ROOM, c.addressof(self.memory), True))
        self.buffer = g.backend_buft_alloc_buffer(g.backend_cpu_buffer_type(), 4096)
        g.backend_buffer_set_usage(self.buffer, 1)
        start = g.backend_buffer_get_base(self.buffer)

        def made(kind: int, *ne: int):
            t = (g.new_tensor_1d, g.new_tensor_2d)[len(ne) - 1](self.ctx, kind, *ne)
            P.from_address(t + AT_BUFFER).value, P.from_address(t + AT_DATA).value = self.buffer, start
            return t

        self.layers = [{"norm": made(F32, WIDTH), "norm2": made(F32, WIDTH),
                        **{name: made(Q4_0, WIDTH, WIDTH) for name in "qkvo"},
                        "gate": made(Q4_0, WIDTH, HIDDEN), "up": made(Q4_0, WIDTH, HIDDEN),
                        "down": made(Q4_0, HIDDEN, WIDTH), "keys": made(F16, WIDTH, CTX),
                        "values": made(F16, WIDTH, CTX)} for _ in range(LAYERS)]
        self.embedding, self.norm = made(Q4_0, WIDTH, VOCAB), made(F32, WIDTH)
        self.output = made(Q4_0, WIDTH, VOCAB)


class Graph:
    """The graph of a batch of `tokens` tokens over `cells` cells of the cache, with the logits of one token."""

    def __init__(self, g: Ggml, w: Weights, tokens: int, cells: int, memory=None) -> None:
        self.memory = memory or c.create_string_buffer(ROOM)
        ctx = g.init(Init(ROOM, c.addressof(self.memory), True))
        self.graph = g.new_graph_custom(ctx, 4096, False)

        def given(kind: int, *ne: int):
            t = (g.new_tensor_1d, g.new_tensor_2d)[len(ne) - 1](ctx, kind, *ne)
            g.set_input(t)
            return t

        x = g.get_rows(ctx, w.embedding, given(I32, tokens))
        at, rows, value_rows = given(I32, tokens), given(I64, tokens), given(I64, tokens * WIDTH)
        mask, wanted = given(F32, cells, tokens), given(I32, 1)
        for i, layer in enumerate(w.layers):
            attended = self._attention(g, ctx, layer, x, at, (rows, value_rows), mask, tokens, cells)
            if i == LAYERS - 1:
                attended, x = g.get_rows(ctx, attended, wanted), g.get_rows(ctx, x, wanted)
            x = g.add(ctx, attended, x)
            normed = g.mul(ctx, g.rms_norm(ctx, x, 1e-5), layer["norm2"])
            gated = g.swiglu_split(ctx, g.mul_mat(ctx, layer["gate"], normed), g.mul_mat(ctx, layer["up"], normed))
            x = g.add(ctx, g.mul_mat(ctx, layer["down"], gated), x)
        logits = g.mul_mat(ctx, w.output, g.mul(ctx, g.rms_norm(ctx, x, 1e-5), w.norm))
        g.set_output(logits)
        g.build_forward_expand(self.graph, logits)
        self.size = g.used_mem(ctx)
        self.fresh = self.memory.raw[:self.size]

    def _attention(self, g: Ggml, ctx, layer: dict, x, at, rows: tuple, mask, tokens: int, cells: int):
        normed = g.mul(ctx, g.rms_norm(ctx, x, 1e-5), layer["norm"])
        q, k, v = (g.reshape_3d(ctx, g.mul_mat(ctx, layer[name], normed), HEAD, HEADS, tokens) for name in "qkv")
        q, k = (g.rope_ext(ctx, t, at, None, HEAD, 0, CTX, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0) for t in (q, k))
        for t in (q, v, k):
            g.build_forward_expand(self.graph, t)
        k = g.view_2d(ctx, k, WIDTH, tokens, WIDTH * 4, 0)
        g.build_forward_expand(self.graph, g.set_rows(ctx, layer["keys"], k, rows[0]))
        v, turned = g.reshape_2d(ctx, v, 1, WIDTH * tokens), g.reshape_2d(ctx, layer["values"], 1, WIDTH * CTX)
        g.build_forward_expand(self.graph, g.set_rows(ctx, turned, v, rows[1]))
        keys = g.view_3d(ctx, layer["keys"], HEAD, HEADS, cells, HEAD * 2, WIDTH * 2, 0)
        values = g.view_3d(ctx, layer["values"], cells, HEAD, HEADS, CTX * 2, CTX * 2 * HEAD, 0)
        scores = g.mul_mat(ctx, g.permute(ctx, keys, 0, 2, 1, 3), g.permute(ctx, q, 0, 2, 1, 3))
        mixed = g.mul_mat(ctx, values, g.soft_max_ext(ctx, scores, mask, HEAD ** -0.5, 0.0))
        return g.mul_mat(ctx, layer["o"], g.cont_2d(ctx, g.permute(ctx, mixed, 0, 2, 1, 3), WIDTH, tokens))

    def restore(self) -> None:
        """Put the tensors back into their state before allocation."""
        c.memmove(self.memory, self.fresh, self.size)


def measure(level: str, mode: str, rounds: int) -> dict[str, list[int]]:
    """Nanoseconds of each call, by its purpose."""
    if mode == "hooked":
        import ggml_sched.llama_cpp as ours

        ours.install(level=level)
    g = Ggml()
    w, shared, found = Weights(g), c.create_string_buffer(ROOM), {}
    prompt, token = Graph(g, w, 512, 512), Graph(g, w, 1, 512)
    batches = [("prompt", Graph(g, w, 512, 512, shared)), ("token", Graph(g, w, 1, 256, shared))]
    types = (P * 1)(g.backend_cpu_buffer_type())
    backends = (P * 1)(g.backend_cpu_init()) if level == "sched" else None
    family = "gallocr_" if level == "alloc" else "backend_sched_"

    def timed(what: str, name: str, graph: Graph) -> None:
        function = getattr(g, family + name)
        graph.restore()
        if backends:
            g.backend_sched_reset(made)
        began = time.perf_counter_ns()
        done = function(made, graph.graph)
        found.setdefault(what, []).append(time.perf_counter_ns() - began)
        if done is False:
            raise SystemExit(f"{what}: refused")

    for _ in range(rounds):
        made = g.backend_sched_new(backends, types, 1, 8192, False, True) if backends else g.gallocr_new_n(types, 1)
        for turn in range(3 if backends else 0):
            timed("split, again" if turn else "split", "split_graph", prompt)
        timed("reserve prompt", "reserve", prompt)
        timed("reserve token", "reserve", token)
        timed("reserve prompt, again", "reserve", prompt)
        for turn in range(3):
            for name, batch in batches:
                timed(f"allocate {name}{', again' if turn else ''}", "alloc_graph", batch)
        getattr(g, family + "free")(made)
    return found


def main() -> None:
    level, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 200
    if len(sys.argv) > 3:
        print(json.dumps(measure(level, sys.argv[3], rounds)))
        return
    least: dict[str, dict[str, float]] = {"stock": {}, "hooked": {}}
    for _ in range(TURNS):
        for mode, times in least.items():
            done = subprocess.run([sys.executable, __file__, level, str(max(rounds // TURNS, 1)), mode],
                                  capture_output=True, text=True, check=True)
            for what, spent in json.loads(done.stdout.splitlines()[-1]).items():
                times[what] = min(times.get(what, float("inf")), min(spent) / 1e3)
    print(f"| {level}, µs | stock | hooked | ratio |", "|---|---|---|---|", sep="\n")
    for what, stock in least["stock"].items():
        ours = least["hooked"][what]
        print(f"| {what} | {stock:.1f} | {ours:.1f} | {ours / stock:.2f} |")


if __name__ == "__main__":
    main()
