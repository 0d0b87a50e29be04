"""A backend in Python: memory of its own, four ops, and everything else left to the CPU."""

import numpy as np

import ggml_sched as gs


class ArrayBuffer(gs.Buffer):
    """Bytes in a NumPy array."""

    def __init__(self, backend, size):
        super().__init__(backend, size)
        self.memory = np.zeros(size, np.uint8)

    def write(self, offset, data):
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset, out):
        out[:] = self.memory[offset : offset + len(out)]


class ArrayBackend(gs.Backend):
    """Computes a few ops of contiguous f32 matrices; the scheduler sends the others elsewhere."""

    OPS = {"ADD": np.add, "MUL": np.multiply, "MUL_MAT": lambda w, x: x @ w.T,
           "UNARY:RELU": lambda x: np.maximum(x, 0)}

    def supports_op(self, node):
        return node.op in self.OPS and all(
            t.type == gs.Type.F32 and t.is_contiguous and t.ne[2:] == (1, 1) for t in (node, *node.src))

    def alloc_buffer(self, size):
        return ArrayBuffer(self, size)

    def compute_node(self, node):
        if not self.supports_op(node):  # never skip a node: its memory has other data
            raise gs.UnsupportedOp(f"backend {self.name!r} does not compute {node!r}")
        self.view(node)[...] = self.OPS[node.op](*map(self.view, node.src))

    def view(self, t):
        memory = t.buffer.memory[t.offset : t.offset + t.nbytes]
        return memory.view(np.float32).reshape(t.ne[1::-1])


array, cpu = ArrayBackend("arrays"), gs.CpuBackend(n_threads=1)
params = gs.Context("weights")
w = params.tensor("f32", (8, 4), "w")
array.alloc_tensors(params)
w.set(np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8))

ctx = gs.Context()
x = ctx.tensor("f32", (8, 2), "x", input=True)
y = ctx.set_output(ctx.soft_max(ctx.relu(ctx.mul_mat(w, x))))  # soft_max runs on the CPU

with gs.Scheduler([array, cpu]) as scheduler:
    graph = gs.Graph(y)
    print(scheduler.alloc(graph))
    x.set(np.ones((2, 8), np.float32))
    scheduler.compute(graph)
    print("\n", y.numpy(), sep="")
cpu.close()
