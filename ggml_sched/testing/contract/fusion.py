"""Fusion groups: those that a backend returns are valid, and computing a group as one gives what its members give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ggml_sched as gs
from ggml_sched.backend import overrides
from ggml_sched.testing.contract.base import Contract, alloc_on, as_inputs, by_the_oracle, supported
from ggml_sched.testing.contract.cases import Leafs

__all__ = ["FusionContract"]


class FusionContract(Contract):
    """Tests of the groups in graphs of `patterns`, for backends that override `fusion_groups`."""

    def test_groups_are_ascending_positions_of_nodes_that_compute(self, backend: gs.Backend) -> None:
        for _, graph, found in self._fused(backend):
            taken: set[int] = set()
            assert found == _groups(backend, graph), "the groups of one graph differ from call to call"
            for group in found:
                assert len(group) >= 2 and list(group) == sorted({*group}), group
                assert group[0] >= 0 and group[-1] < len(graph.nodes), group
                assert all(graph.nodes[k].computes for k in group), group
                assert not taken & {*group}, f"{group} has nodes of another group"
                taken |= {*group}

    def test_a_group_computed_as_one_gives_what_its_members_give(self, device: gs.Backend) -> None:
        """Once with all results needed, and once with only the results that nodes outside the group read."""
        for leafs, graph, groups in self._fused(device):
            hidden = _hidden(graph, groups)
            with device.alloc_tensors(leafs.ctx, usage="any") as memory:
                leafs.set()
                device.graph_compute(gs.GraphView(graph.nodes))
                device.synchronize()
                want = [node.numpy().copy() for node in graph.nodes]
                for needed in (None, frozenset(range(len(graph.nodes))) - hidden):
                    memory.clear(0xCD)
                    leafs.set()
                    view = gs.GraphView(graph.nodes, groups, needed)
                    device.graph_compute(view)
                    device.synchronize()
                    for k in view.needed:
                        self.check(graph.nodes[k], want[k])

    def test_a_scheduler_plans_its_groups(self, device: gs.Backend) -> None:
        for leafs, graph, groups in self._fused(device):
            out = graph.nodes[-1]
            graph = as_inputs(leafs, out)
            with gs.CpuBackend(1, f"beside {device.name}") as cpu, gs.Scheduler([device, cpu]) as scheduler:
                plan = alloc_on(device, scheduler, graph)
                assert plan.groups, f"the plan has none of the groups {groups}"
                leafs.set()
                scheduler.compute(graph)
                found = out.numpy().copy()
            self.check_values(found, by_the_oracle(leafs.ctx, leafs.set, out)[0], repr(out))

    # -- helpers ----------------------------------------------------------------------------------

    def _fused(self, backend: gs.Backend) -> Iterator[tuple[Leafs, gs.Graph, list[tuple[int, ...]]]]:
        """(leafs, graph, the graph's groups) of each pattern in which the backend finds groups; skips the test if there
        is none."""
        if not overrides(backend, "fusion_groups"):
            pytest.skip(f"{backend!r} does not declare fusion_groups")
        n_found = 0
        for name, build in self.patterns.items():
            leafs = Leafs(name)
            out = build(leafs)
            if supported(backend, out):
                graph = gs.Graph(out)
                groups = _groups(backend, graph)
                if groups:
                    n_found += 1
                    yield leafs, graph, groups
        if not n_found:
            pytest.skip(f"{backend!r} fuses nothing of the suite's graphs: see Contract.patterns")


def _groups(backend: gs.Backend, graph: gs.Graph) -> list[tuple[int, ...]]:
    return sorted(tuple(group) for group in backend.fusion_groups(graph))


def _hidden(graph: gs.Graph, groups: list[tuple[int, ...]]) -> set[int]:
    """The positions of those members, and of views of them, that a plan does not need: only their own group reads them,
    directly or through views."""
    nodes = graph.nodes
    inner = {k for group in groups for k in group[:-1]}
    read = {k for k in inner if nodes[-1].root is nodes[k] or any(
        node.computes and any(s is not None and s.root is nodes[k].root for s in node.src)
        and not any({j, k} <= {*group} for group in groups) for j, node in enumerate(nodes))}
    roots = {nodes[k].root for k in inner - read}
    return inner - read | {k for k, node in enumerate(nodes) if not node.computes and node.root in roots}
