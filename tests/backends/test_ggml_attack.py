"""Nodes of every op, with odd types, extents, strides, parameters and data, never end the process: ggml would abort.

Nodes are restored as from a graph file, without an op method's checks.  Nodes that our table of supported ops admits
are computed in a forked child.  Layouts are mutations of valid ones, so that many are admitted.
"""

import os
import random
import signal

import ggml_here
import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched._graph import op_numbers

if not ggml_here.IS_HERE:
    pytest.skip(ggml_here.WHY_NOT, allow_module_level=True)

GRAPHS = 400 * int(os.environ.get("GGML_SCHED_EXAMPLES", "1"))
SIZE = 1 << 22
"""Bytes of the buffer in which every tensor lies."""
OPS = sorted(op_numbers())
COMPUTED = ("MUL_MAT", "MUL_MAT_ID", "GET_ROWS", "SET_ROWS", "ADD_ID", "FLASH_ATTN_EXT", "ROPE", "SOFT_MAX",
            "SSM_CONV", "SSM_SCAN", "CONCAT", "ARGSORT", "TOP_K", "SUM_ROWS", "MEAN", "ARGMAX", "SUM", "ADD", "MUL",
            "SCALE", "NORM", "RMS_NORM", "CPY", "CONT", "DUP", "REPEAT", "CLAMP", "SET", "DIAG_MASK_INF", "UNARY:SILU",
            "UNARY:TANH", "GLU:SWIGLU", "PAD", "GROUP_NORM", "L2_NORM", "SQR")
EXTENTS = (1, 1, 2, 3, 4, 5, 8, 31, 32, 33, 64, 128, 256)


class Attack:
    """Random nodes, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.ctx = gs.Context()

    def shape(self) -> list[int]:
        few = (1, 1, 2, 3)
        return [self.pick.choice(EXTENTS), self.pick.choice((1, 2, 3, 5, 70)),
                self.pick.choice(few), self.pick.choice(few)]

    def strides(self, kind: gs.Type, ne: list[int]) -> list[int]:
        nb = [kind.type_size, ne[0] // kind.block_size * kind.type_size]
        nb += [nb[1] * ne[1], nb[1] * ne[1] * ne[2]]
        match self.pick.randrange(12):
            case 0:
                i, k = self.pick.sample(range(4), 2)
                nb[i], nb[k] = nb[k], nb[i]
            case 1:
                nb[self.pick.randrange(4)] = self.pick.choice((0, 1, 2, 3, 4, 6, 8, 100, 1000))
        return nb

    def leaf(self, kind: gs.Type, ne: list[int]) -> gs.Tensor:
        ne = list(ne)
        if self.pick.random() < 0.06:
            ne[self.pick.randrange(4)] = self.pick.choice((0, *EXTENTS))
        ne[0] = ne[0] // kind.block_size * kind.block_size or kind.block_size
        return self.ctx.restore("NONE", str(kind), ne, self.strides(kind, ne))

    def kind(self, usual: str = "f32") -> gs.Type:
        return self.pick.choice(list(gs.Type)) if self.pick.random() < 0.12 else gs.Type[usual.upper()]

    def node(self, op: str) -> gs.Tensor:
        a = self.shape()
        n, m, p, q = a
        k = self.pick.choice((1, 2, 32, 65))
        usual = self.pick.choice(("f32", "f32", "f16", "bf16", "q4_0", "q8_0", "q4_K"))
        match op:
            case "MUL_MAT":
                out, src = [m, k, p, q], [(usual, a), ("f32", [n, k, p, q])]
            case "MUL_MAT_ID":
                out, src = [m, 2, k, 1], [(usual, [n, m, p, 1]), ("f32", [n, 1, k, 1]), ("i32", [2, k, 1, 1])]
            case "GET_ROWS":
                out, src = [n, k, p, q], [(usual, a), ("i32", [k, p, q, 1])]
            case "SET_ROWS":
                out, src = a, [("f32", [n, k, p, q]), ("i64", [k, 1, 1, 1]), (usual, a)]
            case "ADD_ID":
                out, src = [n, m, p, 1], [("f32", [n, m, p, 1]), ("f32", [n, k, 1, 1]), ("i32", [m, p, 1, 1])]
            case "FLASH_ATTN_EXT":
                n = self.pick.choice((32, 64, 80))
                out, src = [n, p, m, q], [("f32", [n, m, p, q]), (usual, [n, k, 1, q]), (usual, [n, k, 1, q]),
                                          ("f16", [k, m, 1, 1]), ("f32", [p, 1, 1, 1])]
            case "ROPE":
                out, src = a, [("f32", a), ("i32", [p, 1, 1, 1]), ("f32", [n, 1, 1, 1])]
            case "SOFT_MAX":
                out, src = a, [("f32", a), ("f16", [n, m, 1, 1]), ("f32", [p, 1, 1, 1])]
            case "SSM_CONV":
                out, src = [m, n, p, 1], [("f32", [n + 3, m, p, 1]), ("f32", [4, m, 1, 1])]
            case "SSM_SCAN":
                out = [n * m * k * 2 + 16 * n * m * 2, 1, 1, 1]
                src = [("f32", [16, n, m, 2]), ("f32", [n, m, k, 2]), ("f32", [m, k, 2, 1]), ("f32", [16, m, 1, 1]),
                       ("f32", [16, 1, k, 2]), ("f32", [16, 1, k, 2]), ("i32", [2, 1, 1, 1])]
            case "CONCAT":
                out, src = [n, 2 * m, p, q], [(usual, a), (usual, a)]
            case "ARGSORT" | "TOP_K" | "SUM_ROWS" | "MEAN" | "ARGMAX" | "SUM":
                given = {"ARGSORT": a, "ARGMAX": [m, 1, 1, 1], "SUM": [1, 1, 1, 1]}
                out = list(given.get(op, [1, m, p, q]))
                src = [("f32", a)]
            case _:
                out, src = a, [(usual, a), (usual, a)][: 1 if op.startswith("UNARY") else self.pick.choice((1, 1, 2))]
        result = {"GET_ROWS": "f32", "ARGSORT": "i32", "TOP_K": "i32", "ARGMAX": "i32", "SET_ROWS": usual}.get(
            op, "f32" if len(src) != 2 or op.startswith("MUL") else usual)
        sources = [self.leaf(self.kind(kind), ne) for kind, ne in src]
        for _ in range(self.pick.choice((0,) * 7 + (1,))):
            sources[self.pick.randrange(len(sources))] = None
        kind, out = self.kind(result), list(out)
        out[0] = out[0] // kind.block_size * kind.block_size or kind.block_size
        return self.ctx.restore(op, str(kind), out, self.strides(kind, out), sources, op_params=self.parameters(op, n))

    def parameters(self, op: str, n: int) -> list[int]:
        one = 0x3F800000
        if op == "ROPE" and self.pick.random() < 0.8:
            return [0, self.pick.choice((n, n // 2, 2, 0)), self.pick.choice((0, 2)), 0, 128, 0x461C4000, one, 0, one,
                    one, one]
        if op == "SSM_SCAN":
            return [1]
        if op == "CONCAT":
            return [self.pick.choice((1, 1, 1, 0, 7, -1))]
        return [self.pick.choice((0, 1, one, -1, 3, 1 << 31 - 1, self.pick.getrandbits(31))) for _ in range(
            self.pick.choice((0, 0, 1, 2, 3, 12)))]

    def place(self, buffer: gs.Buffer) -> bool:
        """Place each tensor at a random offset of the buffer, sometimes over another one."""
        at = 0
        for t in self.ctx.tensors:
            size = -(-t.nbytes // 64) * 64
            if size > SIZE - at:
                return False
            gs.bind_resident(t, buffer, 0 if self.pick.random() < 0.03 else at)
            at += size
        return True


def run(seed: int, backend: gs.Backend, buffer: gs.Buffer) -> bool:
    """Whether a node was admitted and computed."""
    attack = Attack(seed)
    op = attack.pick.choice(COMPUTED if seed % 4 else OPS)
    try:
        node = attack.node(op)
        if not backend.supports_op(node) or not attack.place(buffer):
            return False
        data = np.random.default_rng(seed)
        buffer.memory[:] = data.integers(0, 255 if seed % 3 else 3, SIZE).astype(np.uint8)
        backend.graph_compute(gs.GraphView([node]))
        return True
    except gs.Error:
        return False


def compute_in_child(first: int, n: int) -> tuple[int, int, int]:
    """(status of the child, the last seed it began, how many nodes it has computed)."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with ggml_here.backend() as backend, backend.alloc_buffer(SIZE) as buffer:
            for seed in range(first, first + n):
                os.write(writes, b"%d " % seed)
                if run(seed, backend, buffer):
                    os.write(writes, b"+ ")
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        told = pipe.read().split()
    return os.waitpid(pid, 0)[1], int([word for word in told if word != b"+"][-1]), told.count(b"+")


def test_no_node_ends_the_process():
    status, seed, computed = compute_in_child(0, GRAPHS)
    assert status == 0, f"seed {seed}: signal {status & 127}"
    assert computed > GRAPHS // 20
