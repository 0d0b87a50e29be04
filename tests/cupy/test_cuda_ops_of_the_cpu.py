"""The CPU backend's tests of ops, run with the CUDA kernels: the same formulas, shapes, views and types.

Every test there that computes through `op_results.compute` runs here over `cupy_kernels.compute`, but for sizes
chosen for the CPU.
"""

import cupy_kernels
import pytest
from load_tests import load_tests

import ggml_sched as gs
from ggml_sched.backends.cupy import ops

FILES = ("test_ops_elementwise", "test_ops_copies", "test_ops_reduce", "test_ops_recurrent", "test_ops_attention",
         "test_ops_rows")
FOR_THE_CPU = {"test_flash_attention_of_few_and_of_many_rows"}
"""Sizes for the CPU's kernels; test_cuda_attention has those for these."""


def compute(ctx: gs.Context, out: gs.Tensor, values: dict, ggml: bool = True):
    for node in gs.Graph(out).nodes:
        if node.op in ("CPY", "SET_ROWS") and node.type.is_quantized and not ops.supports(node):
            pytest.skip(f"nothing is converted to {node.type} on the device")
        if node.op in ("CPY", "SET_ROWS") and node.type == gs.Type.IQ4_NL != node.src[0].type:
            pytest.skip("not to the bit: test_cuda_rows says how near")
    # What is expected are results in f32; test_cuda_attention_tiles has attention on tensor cores.
    return cupy_kernels.compute(ctx, out, values, tensor=False)


for _name in FILES:
    _module = load_tests(f"backends/{_name}")
    _module.compute = compute
    _module.CONVERTED = ()      # the emulated device takes long for the large tables of converted types
    _found = {key: value for key, value in vars(_module).items() if key.startswith("test_")
              and "compute" in value.__code__.co_names and key not in FOR_THE_CPU}
    assert _found and not _found.keys() & globals().keys()
    globals().update(_found)
