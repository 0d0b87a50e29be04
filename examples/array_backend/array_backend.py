"""A backend over NumPy arrays, in four steps: kernels, a bound on memory, a queue with events, and a fused kernel.

docs/backends.md leads through it.
"""

import queue  # queue and threading are for step 3
import threading

import numpy as np

import ggml_sched as gs
from ggml_sched.graph.hostdata import array_over


class ArrayBuffer(gs.Buffer):
    """Bytes in a NumPy array."""

    def __init__(self, backend, size):
        super().__init__(backend, size)
        self.memory = np.zeros(size, np.uint8)

    def write(self, offset, data):
        self.memory[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def read(self, offset, out):
        out[:] = self.memory[offset : offset + len(out)]


def array(tensor):
    """The tensor's memory as an array [ne3, ne2, ne1, ne0]; views and strides are taken into account."""
    return array_over(tensor, tensor.buffer.memory, tensor.offset)


def floats(node, count):
    """The first parameters of a node, of an op whose parameters are f32; trailing zeros are not in `op_params`."""
    return np.array((*node.op_params, *[0] * count)[:count], np.int32).view(np.float32)


def rms_norm(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=3, keepdims=True) + eps)


KERNELS = {
    "ADD": lambda node, x, y: x + y,
    "MUL": lambda node, x, y: x * y,
    "MUL_MAT": lambda node, w, x: x @ w.swapaxes(2, 3),
    "RMS_NORM": lambda node, x: rms_norm(x, floats(node, 1)[0]),
    "UNARY:RELU": lambda node, x: np.maximum(x, 0),
}


class ArrayBackend(gs.Backend):
    """Computes the ops of KERNELS on f32 tensors."""

    def __init__(self, name="arrays"):
        super().__init__(name)

    def alloc_buffer(self, size):
        return ArrayBuffer(self, size)

    def supports_op(self, node):
        if node.op not in KERNELS or any(t.type != gs.Type.F32 for t in (node, *node.src)):
            return False
        # NumPy repeats extents of 1, ggml all extents that divide those of the result.
        dims = (2, 3) if node.op == "MUL_MAT" else range(4)
        return all(source.ne[i] in (1, node.ne[i]) for source in node.src for i in dims)

    def compute_node(self, node):
        if not self.supports_op(node):
            raise gs.UnsupportedOp(f"backend {self.name!r} does not compute {node!r}")
        array(node)[...] = KERNELS[node.op](node, *map(array, node.src))


class BoundedBuffer(ArrayBuffer):
    def free(self):
        self.memory = None
        self.backend.used -= self.size


class BoundedBackend(ArrayBackend):
    """All buffers together have at most `memory` bytes."""

    def __init__(self, name="arrays", memory=1 << 30):
        super().__init__(name)
        self.memory, self.used = memory, 0

    def memory_available(self):
        return self.memory - self.used

    def alloc_buffer(self, size):
        if size > self.memory_available():
            raise gs.OutOfMemory(f"backend {self.name!r}: {size} bytes needed, {self.memory_available()} available",
                                 self.name, size, self.memory_available())
        self.used += size
        return BoundedBuffer(self, size)


class QueueEvent(gs.Event):
    """`passed` is set when the work is done that was queued before the last `event_record`."""

    def __init__(self, backend):
        super().__init__(backend)
        self.passed = threading.Event()
        self.passed.set()


class QueuedBackend(BoundedBackend):
    """Calls return at once; a thread does the work, in the order of the calls."""

    asynchronous = True
    concurrent_copies = True
    takes_at_once = True

    def __init__(self, name="arrays", memory=1 << 30):
        super().__init__(name, memory)
        self.tasks = queue.SimpleQueue()
        self.error = None
        self.taking = threading.Lock()
        self.thread = threading.Thread(target=self.work, name=f"queue of {name}", daemon=True)
        self.thread.start()

    def put(self, task, is_event=False):
        if not self.thread.is_alive():
            raise gs.BackendError(f"backend {self.name!r} is closed")
        self.tasks.put((task, is_event))

    def work(self):
        while (item := self.tasks.get()) is not None:
            task, is_event = item
            # After a failure the work is dropped until `synchronize` raises; events pass, as others wait for them.
            if is_event or self.error is None:
                try:
                    task()
                except BaseException as error:
                    self.error = error

    def synchronize(self):
        event = self.event_new()
        self.event_record(event)
        self.event_synchronize(event)
        with self.taking:  # another thread that finds the error gone must find it counted
            error, self.error = self.error, None
            if error is not None:
                self.note_failure(error)
                raise error

    def set_tensor_async(self, tensor, data, offset=0):
        # The address and the data are taken now: the tensor may have another address when the task runs.
        buffer, start, data = tensor.buffer, tensor.offset + offset, bytes(data)
        self.put(lambda: buffer.write(start, data))

    def get_tensor_async(self, tensor, out, offset=0):
        buffer, start = tensor.buffer, tensor.offset + offset
        self.put(lambda: buffer.read(start, out))

    def graph_compute(self, graph):
        self.put(lambda: self.compute_now(graph))

    def compute_now(self, graph):
        super().graph_compute(graph)  # compute_node for each node, and a note on its exceptions

    def event_new(self):
        return QueueEvent(self)

    def event_record(self, event):
        event.passed = passed = threading.Event()
        self.put(passed.set, is_event=True)

    def event_wait(self, event):
        if isinstance(event, QueueEvent):
            passed = event.passed
            self.put(passed.wait, is_event=True)
        else:
            super().event_wait(event)  # of another kind of device: the host waits

    def event_synchronize(self, event):
        event.passed.wait()

    def close(self):
        if self.thread.is_alive():
            self.tasks.put(None)
            self.thread.join()


class FusedBackend(QueuedBackend):
    """Computes RMS_NORM and a MUL of its result as one kernel."""

    def fusion_groups(self, graph):
        norms = {node: k for k, node in enumerate(graph.nodes) if node.op == "RMS_NORM" and self.supports_op(node)}
        groups = []
        for k, node in enumerate(graph.nodes):
            if node.op == "MUL" and node.src[0] in norms and self.supports_op(node):
                norm, other = node.src
                if other.root is not norm.root:  # the kernel reads `other` from memory, where the norm need not be
                    groups.append((norms.pop(norm), k))
        return groups

    def compute_now(self, graph):
        groups = {group[-1]: group for group in getattr(graph, "groups", ())}  # a Graph has none
        inner = {k for group in groups.values() for k in group[:-1]}
        for k, node in enumerate(graph.nodes):
            if k in groups:
                first = groups[k][0]
                self.scaled_norm(graph.nodes[first], node, first in graph.needed)
            elif k not in inner:
                super().compute_now(gs.GraphView([node]))

    def scaled_norm(self, norm, product, norm_is_needed):
        x = rms_norm(array(norm.src[0]), floats(norm, 1)[0])
        y = x * array(product.src[1])
        if norm_is_needed:
            array(norm)[...] = x
        array(product)[...] = y
