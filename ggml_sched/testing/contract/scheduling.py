"""The backend under a scheduler: beside the CPU, with callbacks, after failures, and with two graphs in turn."""

from __future__ import annotations

import pytest

import ggml_sched as gs
from ggml_sched.testing.contract.base import Contract, alloc_on, as_inputs, oracle_result, supported
from ggml_sched.testing.contract.cases import Case

__all__ = ["SchedulingContract"]


class SchedulingContract(Contract):
    """Plans for the backend, and their computes."""

    def test_a_scheduler_computes_each_supported_node_on_it(self, device: gs.Backend) -> None:
        n_computed = 0
        with gs.CpuBackend(1, f"beside {device.name}") as cpu, gs.Scheduler([device, cpu]) as scheduler:
            for case in self._cases(device):
                leafs, out = case.made()
                graph = as_inputs(leafs, out)
                plan = alloc_on(device, scheduler, graph)
                assert plan.backend_of(out) is device, case.name
                leafs.set()
                scheduler.compute(graph)
                self.check(out, oracle_result(case), case)
                n_computed += 1
        if not n_computed:
            pytest.skip(f"{device!r} supports no case")

    def test_a_callback_sees_each_node(self, device: gs.Backend) -> None:
        case = self._any(device)
        leafs, out = case.made()
        seen = {}
        with gs.CpuBackend(1, f"beside {device.name}") as cpu, gs.Scheduler([device, cpu]) as scheduler:
            graph = as_inputs(leafs, out)
            alloc_on(device, scheduler, graph)
            leafs.set()
            scheduler.compute(graph, lambda node: seen.update({node: node.numpy().copy()}) is None)
        self.check_values(seen[out], oracle_result(case), repr(out), case)

    def test_two_graphs_take_turns(self, device: gs.Backend) -> None:
        cases = self._cases(device)
        if len(cases) < 2:
            pytest.skip(f"{device!r} supports less than two cases")
        with gs.CpuBackend(1, f"beside {device.name}") as cpu, gs.Scheduler([device, cpu]) as scheduler:
            made = []
            for case in cases[:2]:
                leafs, out = case.made()
                made.append((case, leafs, out, as_inputs(leafs, out)))
            for case, leafs, out, graph in made * 2:
                scheduler.alloc(graph)
                leafs.set()
                scheduler.compute(graph)
                self.check(out, oracle_result(case), case)

    def test_what_fails_under_a_scheduler_names_the_backend_and_works_afterwards(self, device: gs.Backend) -> None:
        case = self._any(device)
        leafs, out = case.made()
        with gs.CpuBackend(1, f"beside {device.name}") as cpu, gs.Scheduler([device, cpu]) as scheduler:
            graph = as_inputs(leafs, out)
            alloc_on(device, scheduler, graph)
            leafs.set()
            scheduler.compute(graph)

            def fail(*_: object) -> None:
                raise ZeroDivisionError

            for method in ("graph_plan_compute", "graph_compute"):
                setattr(device, method, fail)
            try:
                with pytest.raises(ZeroDivisionError) as caught:
                    scheduler.compute(graph)
            finally:
                for method in ("graph_plan_compute", "graph_compute"):
                    delattr(device, method)
            assert any(repr(device.name) in note for note in caught.value.__notes__)
            leafs.set()
            scheduler.compute(graph)
            self.check(out, oracle_result(case), case)

    def test_a_graph_that_does_not_fit_is_refused_and_a_smaller_one_is_not(self) -> None:
        limited = self.limited_backend(1 << 16)
        if limited is None:
            pytest.skip("the backend has no bound on its memory: see limited_backend")
        with limited, gs.Scheduler([limited]) as scheduler:
            for rows, fits in ((1 << 12, False), (4, True)):
                ctx = gs.Context()
                x = ctx.tensor("f32", (8, rows), "x", input=True)
                out = ctx.set_output(ctx.add(x, x))
                if not limited.supports_op(out):
                    pytest.skip(f"{limited!r} does not support ADD")
                if fits:
                    scheduler.alloc(gs.Graph(out))
                else:
                    with pytest.raises(gs.OutOfMemory):
                        scheduler.alloc(gs.Graph(out))

    # -- helpers ----------------------------------------------------------------------------------

    def _cases(self, device: gs.Backend) -> list[Case]:
        """The supported cases with a result in memory of its own."""
        found = [(case, case.made()[1]) for case in self.cases]
        return [case for case, out in found if out.view_src is None and out.src and supported(device, out)]

    def _any(self, device: gs.Backend) -> Case:
        """The first of `_cases`; skips the test where there is none."""
        for case in self._cases(device):
            return case
        pytest.skip(f"{device!r} supports no case")
