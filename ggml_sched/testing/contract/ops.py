"""Tests of kernels: each supported node gives what the NumPy kernels give, also in place and in graphs; and
failures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.backend import new_graph_plan
from ggml_sched.graph.hostdata import array_over
from ggml_sched.testing.contract.base import (
    Contract,
    build,
    by_the_oracle,
    expected,
    may_be_in_place,
    oracle_result,
    simple_op,
    small,
    supported,
    values,
)
from ggml_sched.testing.contract.cases import Case, Leafs

__all__ = ["OpsContract"]


class OpsContract(Contract):
    """Support queries and results."""

    def test_answers_about_nodes_have_the_types_that_the_planner_expects(self, backend: gs.Backend) -> None:
        for case in self.cases:
            _, out = case.made()
            for node in gs.Graph(out).nodes:
                for answer in (backend.supports_op(node), backend.offload_op(node)):
                    assert isinstance(answer, (bool, np.bool_)), f"{case.name}: {answer!r} for {node!r}"
                assert isinstance(backend.inplace_sources(node.op), int), f"{case.name}: {node!r}"
            size = backend.work_size(gs.Graph(out).nodes)
            assert isinstance(size, int) and size >= 0, f"{case.name}: work_size gives {size!r}"

    def test_answers_depend_on_the_kind_of_node_alone(self, backend: gs.Backend) -> None:
        if backend.answers_version is None:
            pytest.skip(f"{backend!r} declares answers_version = None")
        for case in self.cases:
            _, before = case.made()
            answers = backend.supports_op(before), backend.offload_op(before), backend.alloc_size(before)
            leafs, out = case.made()
            for k, tensor in enumerate(leafs.ctx.tensors):
                leafs.ctx.set_name(tensor, f"blk.{k}.weight x")
            leafs.ctx.set_output(out)
            with backend.alloc_tensors(leafs.ctx):
                now = backend.supports_op(out), backend.offload_op(out), backend.alloc_size(out)
            assert now == answers, f"{case.name}: other answers for other names, an output, and addresses"

    def test_a_node_is_computed_as_the_numpy_kernels_do_or_refused(self, device: gs.Backend, case: Case) -> None:
        """A supported node has the values of the NumPy kernels.  An unsupported one raises an exception or has these
        values, too: if it were skipped, old bytes would stay in its memory.  Bytes outside the result do not change."""
        leafs, out = case.made()
        with _Spread(device, leafs) as memory:
            before = memory.bytes()
            try:
                self._compute(device, leafs, out)
            except Exception:
                if supported(device, out):
                    raise
                return
            try:
                self.check(out, oracle_result(case), case)
            except AssertionError as error:
                if not supported(device, out):
                    raise AssertionError(f"{device!r} does not support {out!r}, and computes it without an exception: "
                                         f"raise one, such as gs.UnsupportedOp; {error}") from None
                raise
            assert memory.changed(before, gs.Graph(out).nodes) == [], f"{case.name}: bytes outside the result"

    def test_values_that_change_between_computes_are_read(self, device: gs.Backend) -> None:
        """The same node is computed again at the same addresses, with other values of its sources."""
        wrong, n_nodes = [], 0
        for case in self.cases:
            leafs, out = case.made()
            if not supported(device, out) or not leafs.values:
                continue
            n_nodes += 1
            other = case.with_other_values
            with device.alloc_tensors(leafs.ctx, usage="any"):
                self._compute(device, leafs, out)
                leafs.values = dict(zip(leafs.values, other.made()[0].values.values(), strict=True))
                self._compute(device, leafs, out)
                try:
                    self.check(out, oracle_result(other), case)
                except AssertionError as error:
                    wrong.append(f"{case.name}: {error}")
        assert wrong == [], "results of an earlier compute's values"
        if not n_nodes:
            pytest.skip(f"{device!r} supports no case with sources")

    def test_nodes_in_place_have_the_same_bits(self, device: gs.Backend) -> None:
        """A result is written over each source in `inplace_sources` that is a leaf of the result's layout."""
        wrong, n_nodes = [], 0
        for case in self.cases:
            leafs, out = case.made()
            sources = [i for i in may_be_in_place(leafs, out) if device.inplace_sources(out.op) >> i & 1]
            if not sources or not supported(device, out):
                continue
            with device.alloc_tensors(leafs.ctx):
                self._compute(device, leafs, out)
                apart = out.numpy().tobytes()
            for i in sources:
                n_nodes += 1
                leafs, out = case.made()
                with _place(device, leafs, out, out.src[i]):
                    self._compute(device, leafs, out)
                    if out.numpy().tobytes() != apart:
                        wrong.append(f"{case.name} over source {i}")
        assert wrong == [], "other bits than in memory of its own; what is not computed in place: inplace_sources"
        if not n_nodes:
            pytest.skip(f"{device!r} declares no supported node that it computes in place")

    def test_buffers_that_it_reads_without_a_copy(self, device: gs.Backend) -> None:
        """The sources are in memory of the CPU, if `supports_buffer` returns True for it."""
        case = self._any(device)
        leafs, out = case.made()
        with gs.CpuBackend(1, "host") as host, host.alloc_buffer(sum(t.nbytes + 64 for t in leafs.values)) as memory:
            if not device.supports_buffer(memory):
                pytest.skip(f"{device!r} does not read buffers of the CPU")
            offset = 0
            for leaf in leafs.values:
                gs.bind_resident(leaf, memory, offset)
                offset += -(-leaf.nbytes // 64) * 64
            device.alloc_tensors(leafs.ctx)
            self._compute(device, leafs, out)
            self.check(out, oracle_result(case), case)

    def test_nodes_are_computed_in_order(self, device: gs.Backend) -> None:
        """Three nodes, each of which reads the one before."""
        op = simple_op(device)
        if op == "mul_mat":
            pytest.skip(f"{device!r} supports no simple op but products")
        ctx, x, y = small()
        out = x
        for _ in range(3):
            out = build(ctx, op, out, y)
        device.alloc_tensors(ctx, usage="any").clear(0xCD)
        x.set(values(1))
        y.set(values(2))
        device.graph_compute(gs.Graph(out))
        device.synchronize()
        self.check(out, expected(op, values(1), values(2), times=3))

    def test_a_graph_plan_computes_its_graph_again(self, device: gs.Backend) -> None:
        pair = self._pair(device)
        device.alloc_tensors(pair.leafs.ctx)
        pair.leafs.set()
        plan = new_graph_plan(device, pair.graph)
        if plan is None:
            pytest.skip(f"{device!r} makes no graph plans")
        for given in (pair, pair, self._pair(device, with_other_values=True)):
            for node in pair.nodes:
                node.set(np.zeros(node.ne[::-1], np.float32))
            pair.leafs.values = dict(zip(pair.leafs.values, given.leafs.values.values(), strict=True))
            pair.leafs.set()
            device.graph_plan_compute(plan)
            device.synchronize()
            for node, want in zip(pair.nodes, given.want, strict=True):
                self.check(node, want)
        device.graph_plan_free(plan)

    def test_a_part_of_a_graph_is_computed_alone(self, device: gs.Backend) -> None:
        pair = self._pair(device)
        first, second = pair.nodes
        device.alloc_tensors(pair.leafs.ctx)
        pair.leafs.set()
        device.graph_compute(pair.graph)
        device.synchronize()
        for node in pair.nodes:
            node.set(np.zeros(node.ne[::-1], np.float32))
        device.graph_compute(gs.GraphView(pair.graph.nodes[pair.graph.nodes.index(first) + 1 :]))
        device.graph_compute(gs.GraphView(()))
        device.synchronize()
        assert not first.numpy().any()
        self.check(second, pair.want[1])

    def test_after_a_failure_it_works(self, device: gs.Backend) -> None:
        """Nodes without addresses can not be computed: the backend raises an exception of its own choice."""
        case = self._any(device)
        with pytest.raises(Exception):  # noqa: B017 - the backend chooses the type
            device.graph_compute(gs.Graph(case.made()[1]))
            device.synchronize()
        leafs, out = case.made()
        device.alloc_tensors(leafs.ctx)
        self._compute(device, leafs, out)
        self.check(out, oracle_result(case), case)

    # -- helpers ----------------------------------------------------------------------------------

    def _compute(self, device: gs.Backend, leafs: Leafs, out: gs.Tensor) -> None:
        leafs.set()
        device.graph_compute(gs.Graph(out))
        device.synchronize()

    def _any(self, device: gs.Backend) -> Case:
        """The first supported case with an f32 result in memory of its own; skips the test if there is none."""
        for case in self.cases:
            _, out = case.made()
            if out.type == gs.Type.F32 and out.view_src is None and out.src and supported(device, out):
                return case
        pytest.skip(f"{device!r} supports no case with an f32 result")

    def _pair(self, device: gs.Backend, with_other_values: bool = False) -> _Pair:
        """The node of the first supported case, made twice; `want` has their values by the NumPy kernels."""
        case = self._any(device)
        if with_other_values:
            case = case.with_other_values
        made = _Pair(case)
        return _Pair(case, by_the_oracle(made.leafs.ctx, made.leafs.set, *made.nodes))


class _Pair:
    """The node of a case, made twice in one graph with leafs of its own each time; `want` has both values."""

    def __init__(self, case: Case, want: Sequence[np.ndarray] = ()) -> None:
        self.leafs = Leafs(case.name)
        self.nodes = [self.leafs.ctx.set_name(case.build(self.leafs), name) for name in ("first", "second")]
        self.graph = gs.Graph(*self.nodes)
        self.want = want


class _Spread:
    """Memory for the tensors of a case, full of 0xCD, with a gap before, between and after them."""

    def __init__(self, device: gs.Backend, leafs: Leafs) -> None:
        self.leafs, step = leafs, device.alignment
        gap = -(-64 // step) * step
        self.tensors = {t: device.alloc_size(t) for t in leafs.ctx.tensors if t.view_src is None}
        self.buffer = device.alloc_buffer(gap + sum(-(-size // step) * step + gap for size in self.tensors.values()))
        self.buffer.clear(0xCD)
        offset = gap
        for tensor, size in self.tensors.items():
            gs.bind_resident(tensor, self.buffer, offset)
            self.buffer.init_tensor(tensor)
            offset += -(-size // step) * step + gap
        leafs.set()

    def bytes(self) -> bytearray:
        found = bytearray(self.buffer.size)
        self.buffer.read(0, memoryview(found))
        return found

    def changed(self, before: bytearray, nodes: Sequence[gs.Tensor]) -> list[str]:
        """In words: the first byte that differs from `before` and is in no result of `nodes`, with the tensor at or
        before it; empty if no byte differs.  Overwrites `before`."""
        now = self.bytes()
        for node in nodes:
            if node.computes:
                array_over(node, before, node.offset)[...] = array_over(node, now, node.offset)
        for tensor, size in self.tensors.items():       # a backend may use all bytes of alloc_size
            before[tensor.offset + tensor.nbytes : tensor.offset + size] = (
                now[tensor.offset + tensor.nbytes : tensor.offset + size])
        at = next((i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b), None)
        if at is None:
            return []
        last = max((t for t in self.tensors if t.offset <= at), key=lambda t: t.offset, default=None)
        where = "before all tensors" if last is None else f"byte {at - last.offset} of {last!r} ({last.nbytes} bytes)"
        return [f"{where} was {before[at]:#04x}, is {now[at]:#04x}"]

    def __enter__(self) -> _Spread:
        return self

    def __exit__(self, *exc: object) -> None:
        self.buffer.close()


def _place(device: gs.Backend, leafs: Leafs, out: gs.Tensor, under: gs.Tensor) -> gs.Buffer:
    """Give all tensors addresses one after another in a new buffer, but `out` the address of `under`."""
    roots = [t for t in leafs.ctx.tensors if t.view_src is None and t is not out]
    offsets, end = [], 0
    for tensor in roots:
        offsets.append(end)
        end += -(-max(device.alloc_size(tensor), device.alloc_size(out)) // device.alignment) * device.alignment
    buffer = device.alloc_buffer(end)
    for tensor, offset in zip(roots, offsets, strict=True):
        gs.bind_resident(tensor, buffer, offset)
    gs.bind_resident(out, buffer, under.offset)
    return buffer
