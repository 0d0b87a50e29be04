"""What all parts of the contract share: the backends under test, small tensors on them, and comparing results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.testing.compare import distance
from ggml_sched.testing.contract.cases import CASES, PATTERNS, Case, Leafs

__all__ = ["NBYTES", "Contract", "declares", "may_be_in_place", "oracle_result", "small", "supported", "values"]

NE = (8, 4)
NBYTES = 128


class Contract:
    """The base of all parts; a subclass defines `new_backend`, and the other methods where they apply."""

    max_nmse: float = 1e-6
    """The largest sum((a - b)**2) / sum(b**2) that is permitted, for f32 results a and those of the NumPy kernels, b.
    Cases with rounded or quantised types add to it."""

    cases: ClassVar[Sequence[Case]] = CASES
    """The nodes that kernels are tested with; a subclass may add cases of its own."""

    patterns: ClassVar[Mapping[str, Callable[[Leafs], gs.Tensor]]] = PATTERNS
    """Graphs in which the backend may find fusion groups; a subclass adds those that its `fusion_groups` knows."""

    def new_backend(self) -> gs.Backend:
        """A backend to test; the test closes it."""
        raise NotImplementedError("define new_backend()")

    def second_backend(self) -> gs.Backend | None:
        """Another backend with another name, for one scheduler with that of `new_backend`; None: there is none."""
        return None

    def limited_backend(self, memory: int) -> gs.Backend | None:
        """A backend with `memory` bytes for all its buffers; None: the backend has no such bound."""
        return None

    @pytest.fixture
    def backend(self) -> Iterator[gs.Backend]:
        with self.new_backend() as made:
            yield made

    @pytest.fixture
    def device(self, backend: gs.Backend) -> gs.Backend:
        """The backend, if its addresses are those of real memory; tests of a dry backend are skipped."""
        if not backend.has_memory:
            pytest.skip(f"{backend!r} has no memory")
        return backend

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Give tests with the argument `case` each of `cases`, and `inplace_case` those that may be in place."""
        for argument, cases in (("case", self.cases),
                                ("inplace_case", [case for case in self.cases if may_be_in_place(*case.made())])):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, cases, ids=[case.name for case in cases])

    def check(self, got: gs.Tensor, want: np.ndarray, case: Case | None = None) -> None:
        """Assert that the results of a node are close enough to `want`: equal, if they are integers."""
        self.check_values(got.numpy(), want, repr(got), case)

    def check_values(self, found: np.ndarray, want: np.ndarray, what: str, case: Case | None = None) -> None:
        """Assert that results are close enough to `want`."""
        if case is not None and case.is_set:
            found, want = np.sort(found), np.sort(want)
        _, nmse = distance(want.astype(np.float64), found.astype(np.float64))
        allowed = 0.0 if want.dtype.kind == "i" else self.max_nmse + (0.0 if case is None else case.max_nmse)
        assert nmse <= allowed, (
            f"{what}: the error is {nmse:.2e}, {allowed:.0e} is permitted; {found.flat[:4]}, not {want.flat[:4]}")


def declares(backend: gs.Backend, *methods: str) -> bool:
    """Whether the class of a backend overrides one of these methods of `Backend`."""
    return any(getattr(type(backend), method) is not getattr(gs.Backend, method) for method in methods)


def values(seed: int) -> np.ndarray:
    """Values of a tensor of `small`, positive so that sums do not cancel."""
    return np.random.default_rng(seed).uniform(0.5, 2, NE[::-1]).astype(np.float32)


def small() -> tuple[gs.Context, gs.Tensor, gs.Tensor]:
    """Two f32 leafs with ne = (8, 4), without addresses."""
    ctx = gs.Context("contract")
    return ctx, ctx.tensor("f32", NE, "x"), ctx.tensor("f32", NE, "y")


def supported(backend: gs.Backend, out: gs.Tensor) -> bool:
    """Whether the backend computes a node and all nodes that it depends on; views need no kernel."""
    return all(backend.supports_op(node) for node in gs.Graph(out).nodes if node.computes)


def may_be_in_place(leafs: Leafs, out: gs.Tensor) -> list[int]:
    """The sources of a node whose memory may also be that of its result: leafs of an equal layout."""
    return [i for i, source in enumerate(out.src) if source in leafs.values and out.view_src is None
            and (source.type, source.ne, source.nb) == (out.type, out.ne, out.nb)]


def oracle_result(case: Case) -> np.ndarray:
    """The values of a case's node by the NumPy kernels of the CPU backend."""
    leafs, out = case.made()
    with gs.CpuBackend(1, kernels="numpy") as oracle, oracle.alloc_tensors(leafs.ctx):
        leafs.set()
        oracle.graph_compute(gs.Graph(out))
        return out.numpy().copy()
