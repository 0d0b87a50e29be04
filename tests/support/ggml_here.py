"""ggml in tests: the library to load, and the error bounds between its results and those of the CPU backend.

GGML_SCHED_TEST_GGML in the environment names a folder with other libraries than those of the `ggml` package.
"""

import functools
import importlib.util
import os

import numpy as np

import ggml_sched as gs

LIBRARY = os.environ.get("GGML_SCHED_TEST_GGML")
IS_HERE = LIBRARY is not None or importlib.util.find_spec("ggml") is not None
WHY_NOT = "needs ggml-python"

HALVES = ("UNARY:GELU", "GLU:GEGLU")
"""Ops that ggml computes by a lookup table of f16 values."""

ENCODED_FREELY = ("iq4_nl",)
"""Types with many valid encodings of a block: our encoder and ggml's choose different ones."""


def backend(n_threads: int = 2, **options) -> gs.GgmlBackend:
    return gs.GgmlBackend(n_threads=n_threads, library=LIBRARY, **options)


@functools.cache
def shared() -> gs.GgmlBackend:
    """The GgmlBackend that all op tests of the process share; all its kernels are ggml's."""
    return backend(own_products=False)


def bound_of(nodes) -> float:
    """The bound on the normalised mean squared error of results of these nodes.

    The mean of a few elements scatters about that of many: with 8 elements it may be twice as large.
    """
    return expected_of(nodes) * (1 + 8 / max(nodes[-1].n_elements, 1))


def expected_of(nodes) -> float:
    """The bound for results of many elements."""
    if any(str(node.type) in ENCODED_FREELY for node in nodes):
        return 1e-2
    types = {str(t.type) for node in nodes for t in (node, *node.src) if t is not None}
    if types <= {"f32", "i32", "i64"}:
        return 1e-6 if any(node.op in HALVES for node in nodes) else 1e-9
    return 3e-4


def error_of(got: np.ndarray, want: np.ndarray) -> float:
    """Normalised mean squared error; infinite where NaNs or infinities differ."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    got, want = got[finite], want[finite]
    return float(((got - want) ** 2).sum() / max((want**2).sum(), 1e-30))
