"""What programs around this package write.  Type checkers read this file (`nox -s types`); nothing runs it.

A line with `type: ignore[CODE]` is wrong on purpose: a checker that accepts it reports the comment as unused.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Iterator, Sequence
from typing import assert_type

import numpy as np

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.backend import as_nodes


def graphs() -> gs.Graph:
    ctx = gs.Context("example")
    w = ctx.tensor("f16", (64, 32), name="w")
    x = ctx.tensor(gs.Type.F32, [64, 4], input=True)
    y = ctx.silu(ctx.mul_mat(w, x))
    assert_type(y, gs.Tensor)
    assert_type(y.ne, tuple[int, int, int, int])
    assert_type(x.lease is None, bool)
    ctx.mul_mat(w, 3)  # type: ignore[arg-type]
    ctx.tensor(1.5, (64,))  # type: ignore[arg-type]
    ctx.tensor("f32", "64")  # type: ignore[arg-type]
    ctx.argsort(x, "up")  # type: ignore[arg-type]
    ctx.no_such_op(x)  # type: ignore[attr-defined]
    gs.Graph("y")  # type: ignore[arg-type]
    x.name = "x"  # type: ignore[misc]
    x.set(np.ones((4, 64), np.float32))
    return gs.Graph(y)


def scheduling(graph: gs.Graph) -> None:
    cpu, dry = gs.CpuBackend(2), gs.DryBackend("big", memory=1 << 30)
    with gs.Scheduler([cpu], budgets={cpu: 1 << 20}, reorder=True) as scheduler:
        plan = scheduler.alloc(graph)
        assert_type(plan, gs.Plan)
        assert_type(plan.buffer_sizes, tuple[int, ...])
        assert_type(plan.splits, tuple[gs.Split, ...])
        assert_type(plan.backend_of(graph.nodes[0]), gs.Backend | None)
        assert_type(scheduler.compute(graph), bool)
        scheduler.compute(graph, callback=lambda node: node.name != "stop")
        scheduler.set_tensor_backend(graph.nodes[0], None)
        scheduler.compute([graph])  # type: ignore[arg-type]
        scheduler.set_tensor_backend("y", cpu)  # type: ignore[arg-type]
        scheduler.adopt(None)  # type: ignore[arg-type]
    gs.Scheduler(cpu)  # type: ignore[arg-type]
    gs.Scheduler([cpu], copies="2")  # type: ignore[arg-type]
    gs.Scheduler([cpu, dry], budget=3)  # type: ignore[call-arg]


def plans(graph: gs.Graph) -> str:
    cpu = gs.CpuBackend()
    plan = gs.load_plan("plan.json", graph, [cpu])
    plan.verify()
    for step in plan.program.steps:
        if step.kind == "run":
            print(step.backend, step.waits)
    plan.save(3)  # type: ignore[arg-type]
    plan.offset_of("y")  # type: ignore[arg-type]
    plan.policy = "seed"  # type: ignore[misc]
    gs.load_plan("plan.json", graph, cpu)  # type: ignore[arg-type]
    gs.load_graph(b"graph.json")  # type: ignore[arg-type]
    return plan.explain(graph.nodes[0])


class Memory(gs.Buffer):
    def __init__(self, backend: gs.Backend, size: int) -> None:
        super().__init__(backend, size)
        self.bytes = bytearray(size)

    def write(self, offset: int, data: memoryview) -> None:
        self.bytes[offset : offset + len(data)] = data

    def read(self, offset: int, out: memoryview) -> None:
        out[:] = self.bytes[offset : offset + len(out)]


class Device(gs.Backend):
    def alloc_buffer(self, size: int) -> Memory:
        return Memory(self, size)

    def supports_op(self, node: gs.Tensor) -> bool:
        return node.op in ("ADD", "MUL")

    def graph_compute(self, graph: gs.Graph | gs.GraphView) -> None:
        for node in as_nodes(graph):
            self.compute_node(node)


class WrongDevice(gs.Backend):
    def alloc_buffer(self, size: str) -> Memory:  # type: ignore[override]
        raise NotImplementedError

    def supports_op(self, node: gs.Tensor) -> str:  # type: ignore[override]
        return node.op


def backends(tensor: gs.Tensor) -> None:
    with Device("mine", 64) as device:
        device.set_tensor(tensor, np.zeros(4, np.float32))
        device.set_tensor(tensor, bytes(16), offset=4)
        device.set_tensor(tensor, 3)  # type: ignore[arg-type]
        device.get_tensor(tensor, bytearray(16))
        Device(alignment="wide", name="x")  # type: ignore[arg-type]
        Memory(device, None)  # type: ignore[arg-type]
    assert_type(gs.get_backend(tensor), gs.Backend | None)
    gs.CpuBackend().buffer_from_ptr(np.zeros(16, np.uint8)).memory.sum()
    gs.CpuBackend().buffer_from_ptr(1.5)  # type: ignore[arg-type]
    gs.CpuBackend(threads=2)  # type: ignore[call-arg]


def models(prompt: Sequence[int]) -> Iterator[str]:
    with llama.load("model.gguf", n_threads=4) as model:
        assert_type(model, llama.Model)
        for piece in model.generate("Once", 16, temperature=0.8, stop="."):
            assert_type(piece, str)
            yield piece
        for token in model.generate(prompt, 16):
            assert_type(token, int)
        assert_type(model.generate("Once", 16).read(), str)
        assert_type(model.generate(prompt, 16).read(), list[int])
        assert_type({backend: held.total for backend, held in model.memory().items()}, dict[gs.Backend, int])
        model.eval("Once")  # type: ignore[arg-type]
        model.save(3)  # type: ignore[arg-type]
        model.chat("Hello")  # type: ignore[arg-type]
        model.generate(1.5)  # type: ignore[call-overload]
        model.generate("Once", temperature="hot")  # type: ignore[call-overload]
        model.chat([{"role": "user", "content": "Hello"}], stop=3)  # type: ignore[arg-type]
        model.sequence("first")  # type: ignore[arg-type]
        assert_type(model.scheduler, gs.Scheduler)
        assert_type(model.tokenizer.bos_id, int | None)
        assert_type(model.batch_graph(1, 32).output, gs.Tensor | None)
        assert_type(model.chat_template.render([{"role": "user", "content": "Hello"}], enable_thinking=False), str)
        second = model.sequence(1)
        assert_type(second.generate("Once", 8, stop=".", top_k=4), llama.Generation[str])
        assert_type(second.generate(prompt, echo=True), llama.Generation[int])
        second.generate("Once", stops=".")  # type: ignore[call-overload]
        second.chat("Hello")  # type: ignore[arg-type]
        second.chat([{"role": "user", "content": "Hello"}], echo=True)  # type: ignore[call-arg]
        second.copy_to("first")  # type: ignore[arg-type]
    llama.load("model.gguf", n_treads=4)  # type: ignore[arg-type]
    llama.load(3)  # type: ignore[arg-type]
    llama.load("model.gguf", gs.CpuBackend())  # type: ignore[arg-type]
    llama.load("model.gguf", n_ctx="8k")  # type: ignore[arg-type]


def files() -> bytes:
    with llama.open_gguf("model.gguf") as file:
        assert_type(file, llama.GGUFFile)
        assert_type(file.tensors["output.weight"].ne, tuple[int, ...])
        file.metadata["general.name"].upper()  # type: ignore[union-attr]
    llama.write_gguf("small.gguf", {"general.architecture": "llama", "llama.block_count": 1},
                     {"x": np.zeros(4, np.float32), "y": ("q8_0", (32, 1), bytes(34))})
    llama.write_gguf("small.gguf", {}, {"x": 3})  # type: ignore[dict-item]
    llama.random_llama(dtype=3)  # type: ignore[arg-type]
    return llama.random_llama(7, n_layer=2, dtype="q8_0", extra={"general.name": "small"})


def sampling(logits: np.ndarray) -> int:
    sampler = llama.Sampler(0.7, top_k=40, logit_bias={13: -1.0})
    assert_type(sampler.top_k, int)
    llama.Sampler(top_k="40")  # type: ignore[arg-type]
    llama.Sampler(logit_bias=[13])  # type: ignore[arg-type]
    return sampler(logits)


def gpu() -> None:
    with gs.CupyBackend(0, memory=1 << 30) as backend:
        assert_type(backend, gs.CupyBackend)
        assert_type(backend.alloc_buffer(64).backend, gs.CupyBackend)
    gs.CupyBackend("0")  # type: ignore[arg-type]
