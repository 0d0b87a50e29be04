"""The common base of all parts of the contract: the backends under test, small tensors on them, and comparing
results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.testing.compare import distance
from ggml_sched.testing.contract.cases import CASES, PATTERNS, Case, Leafs

__all__ = ["NBYTES", "Contract", "alloc_on", "as_inputs", "build", "by_the_oracle", "expected",
           "may_be_in_place", "oracle_result", "same", "simple_op", "small", "supported", "values"]

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
        """A second backend, with another name, for use in one scheduler beside that of `new_backend`; None: there is
        none."""
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
        """Run each test that has the argument `case` once for each of `cases`."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=[case.name for case in self.cases])

    def check(self, got: gs.Tensor, want: np.ndarray, case: Case | None = None) -> None:
        """Assert that the results of a node are close enough to `want`; integers must be equal."""
        __tracebackhide__ = True
        self.check_values(got.numpy(), want, f"{got.backend!r}, {_layouts(got)}", case)

    def check_values(self, found: np.ndarray, want: np.ndarray, what: str, case: Case | None = None) -> None:
        """Assert that results are close enough to `want`; `what` begins the message of the AssertionError."""
        __tracebackhide__ = True
        if case is not None and case.is_set:
            found, want = np.sort(found), np.sort(want)
        _, nmse = distance(want.astype(np.float64), found.astype(np.float64))
        is_exact = want.dtype.kind == "i" or case is not None and case.is_exact
        allowed = 0.0 if is_exact else self.max_nmse + (0.0 if case is None else case.max_nmse)
        if not nmse <= allowed:
            raise AssertionError(f"{what}: the error is {nmse:.2e}, {allowed:.0e} is permitted; "
                                 f"{_difference(found, want)}")


def same(tensor: gs.Tensor, want: np.ndarray) -> None:
    """Assert that a tensor has exactly these values."""
    __tracebackhide__ = True
    found = tensor.numpy()
    if not np.array_equal(found, want):
        raise AssertionError(f"{tensor!r} on {tensor.backend!r} has other values; {_difference(found, want)}")


def _layouts(node: gs.Tensor) -> str:
    """The op of a node and the layouts of its sources."""
    sources = [f"{s.type} {list(s.ne)}" + ("" if s.is_contiguous else f" with nb {list(s.nb)}")
               for s in node.src if s is not None]
    return f"{node.op} of {', '.join(sources) or 'nothing'} to {node.type} {list(node.ne)}"


def _difference(found: np.ndarray, want: np.ndarray) -> str:
    """In words: the element with the largest difference, its index in NumPy's order (outermost first), and both
    values."""
    if found.shape != want.shape:
        return f"shape {found.shape}, not {want.shape}"
    with np.errstate(all="ignore"):
        apart = np.abs(found.astype(np.float64) - want)
    apart = np.where(found == want, 0, np.where(np.isnan(apart), np.inf, apart))
    worst = np.unravel_index(int(np.argmax(apart)), apart.shape)
    return f"worst at {[int(k) for k in worst]}: {found[worst]}, not {want[worst]}"


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
    """The slots of those sources of a node over which its result may be written: leafs of the same layout as the
    result."""
    return [i for i, source in enumerate(out.src) if source in leafs.values and out.view_src is None
            and (source.type, source.ne, source.nb) == (out.type, out.ne, out.nb)]


def as_inputs(leafs: Leafs, out: gs.Tensor) -> gs.Graph:
    """The graph of `out`, in which `out` is flagged as an output and the leafs as inputs."""
    for leaf in leafs.values:
        leafs.ctx.set_input(leaf)
    return gs.Graph(leafs.ctx.set_output(out))


def alloc_on(device: gs.Backend, scheduler: gs.Scheduler, graph: gs.Graph) -> gs.Plan:
    """Allocate a graph with all nodes on one backend; returns the plan, verified."""
    for node in graph.nodes:
        scheduler.set_tensor_backend(node, device)
    plan = scheduler.alloc(graph)
    plan.verify()
    return plan


def by_the_oracle(ctx: gs.Context, set_leafs: Callable[[], None], *nodes: gs.Tensor) -> list[np.ndarray]:
    """The values of nodes by the NumPy kernels of the CPU backend, on which the tensors of `ctx` have addresses
    meanwhile."""
    with gs.CpuBackend(1, kernels="numpy") as oracle, oracle.alloc_tensors(ctx):
        set_leafs()
        oracle.graph_compute(gs.Graph(*nodes))
        return [node.numpy().copy() for node in nodes]


def oracle_result(case: Case) -> np.ndarray:
    """The values of a case's node by the NumPy kernels."""
    leafs, out = case.made()
    return by_the_oracle(leafs.ctx, leafs.set, out)[0]


SIMPLE_OPS = ("add", "mul", "sub", "div", "sqr", "relu", "silu", "neg", "abs", "exp", "tanh", "sigmoid", "sqrt",
              "scale", "rms_norm", "soft_max", "cont", "mul_mat")
"""Ops of one or two f32 matrices; the results of all but the last have the shape of their first source."""


def build(ctx: gs.Context, op: str, x: gs.Tensor, y: gs.Tensor) -> gs.Tensor:
    """A node of one of SIMPLE_OPS: it reads x, and also y if the op has two sources."""
    if op == "scale":
        return ctx.scale(x, 0.5)
    if op == "rms_norm":
        return ctx.rms_norm(x, 1e-5)
    make = getattr(ctx, op)
    node: gs.Tensor = make(x, y) if op in ("add", "mul", "sub", "div", "mul_mat") else make(x)
    return node


def simple_op(device: gs.Backend) -> str:
    """The first of SIMPLE_OPS that the backend supports; skips the test where there is none."""
    for op in SIMPLE_OPS:
        if supported(device, build(*_with_op(op))):
            return op
    pytest.skip(f"{device!r} supports none of {', '.join(SIMPLE_OPS)}")


def _with_op(op: str) -> tuple[gs.Context, str, gs.Tensor, gs.Tensor]:
    ctx, x, y = small()
    return ctx, op, x, y


def expected(op: str, a: np.ndarray, b: np.ndarray, times: int = 1) -> np.ndarray:
    """The values that NumPy kernels give for a node of one of SIMPLE_OPS with the sources a and b; with `times` for the
    last of so many nodes, each of which reads the one before in place of a."""
    ctx, x, y = small()
    out = x
    for _ in range(times):
        out = build(ctx, op, out, y)

    def set_leafs() -> None:
        x.set(a)
        y.set(b)

    return by_the_oracle(ctx, set_leafs, out)[0]
