"""The CPU backend's tests of ops, run with the CUDA kernels: the same formulas, shapes, views and types.

Every test there that computes through `op_results.compute` runs here over `cupy_kernels.compute`, but for those of
matrix products and flash attention, whose kernels are tested elsewhere.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import cupy_kernels
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import ops

BACKENDS = Path(__file__).parent.parent / "backends"
FILES = ("test_ops_elementwise", "test_ops_copies", "test_ops_reduce", "test_ops_recurrent", "test_ops_attention",
         "test_ops_rows")
ELSEWHERE = ("flash_att", "mul_mat")


def compute(ctx: gs.Context, out: gs.Tensor, values: dict, ggml: bool = True):
    for node in gs.Graph(out).nodes:
        if node.op in ("CPY", "SET_ROWS") and node.type.is_quantized and not ops.supports(node):
            pytest.skip(f"nothing is converted to {node.type} on the device")
        if node.op in ("CPY", "SET_ROWS") and node.type == gs.Type.IQ4_NL != node.src[0].type:
            pytest.skip("not to the bit: test_cuda_rows says how near")
    return cupy_kernels.compute(ctx, out, values)


def borrowed(name: str) -> dict:
    """The tests of a file whose `compute` is ours."""
    spec = importlib.util.spec_from_file_location(f"borrowed_{name}", BACKENDS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.compute = compute
    return {key: value for key, value in vars(module).items() if key.startswith("test_")
            and "compute" in value.__code__.co_names and not any(word in key for word in ELSEWHERE)}


for _name in FILES:
    _found = borrowed(_name)
    assert _found and not _found.keys() & globals().keys()
    globals().update(_found)
