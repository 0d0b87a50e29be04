"""The package's own kernels under AddressSanitizer and UndefinedBehaviorSanitizer, each tensor in memory of its own.

Processes that are started for it run tests of ops: odd sizes, views, every type of weights.  Bugs planted in a copy of
the sources must end such a process, with a report of their line.
"""

import json
import shutil
from pathlib import Path

import pytest
from cupy_sources import needs_compiler, run_sanitized

from ggml_sched.backends.cupy.source import KERNELS

pytestmark = needs_compiler

HERE = Path(__file__).parent

CODE = """
import json, os, sys, tempfile
from pathlib import Path
import pytest
import numpy, ggml_sched         # once for all
from ggml_sched.backends.cupy import source

def run(folder, files, tests):
    if folder:
        source.KERNELS = Path(folder)
    # pytest warns of the package, which has a plugin, because it is imported already.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return pytest.main(["-x", "-q", "-s", "-p", "no:cacheprovider", *quiet, "-k", " or ".join(tests), *files])

def start(case):
    said = tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        status = run(*case)
        sys.stdout.flush()
        os._exit(status)
    return child, said

for child, said in list(map(start, json.loads(sys.argv[1]))):
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said.seek(0)
    print(json.dumps([status, said.read().decode(errors="replace")]), flush=True)
"""

WELL = {
    "products": (("cuda_matrix", "cuda_repack", "cuda_groups"), (
        "test_every_type_with_few_columns_and_more", "test_plain_rows_of_odd_lengths",
        "test_columns_between_the_multiples", "test_columns_of_other_types", "test_views_of_a_cache",
        "test_ids_in_a_strided_view", "test_products_have_the_bits_of_ggmls_order",
        "test_chosen_experts", "test_a_feed_forward_of_one_token", "test_gates_and_several_tokens")),
    "attention": (("cuda_attention", "cuda_attention_tiles", "cuda_ops_of_the_cpu", "cuda_sort", "cuda_values"), (
        "test_caches", "test_head_sizes", "test_batches_and_unused", "test_long_caches", "test_flash_attention_over",
        "test_heads_whose_keys", "test_columns", "test_cells", "test_variants", "test_a_mask_between",
        "test_what_is_not_finite", "test_splits_are_joined",
        "test_soft_max_of_masked_rows", "test_rows_with_nan", "test_diag_mask", "test_rope", "test_rows_of_one_block",
        "test_argmax", "test_top_k")),
    "rows": (("cuda_rows", "cuda_groups"), (
        "test_get_rows", "test_of_several_rows", "test_blocks_are_those", "test_an_id_that_names_nothing",
        "test_a_norm_", "test_a_sum_", "test_rope_and_the_write")),
    "fused": (("cuda_projections", "cuda_routing", "cuda_rounded"), (
        "test_three_products", "test_biases", "test_norms_of_heads", "test_ropes", "test_as_many_heads",
        "test_experts_are_chosen", "test_a_weighted_sum_is", "test_a_norm_rounds", "test_a_gated_unit_rounds",
        "test_experts_round", "test_attention_rounds")),
    "values": (("cuda_ops_of_the_cpu", "cuda_launch"), (
        "test_binary_of_permuted", "test_binary_broadcasts", "test_unary_of_permuted", "test_glu", "test_concat",
        "test_pad", "test_repeat", "test_cpy", "test_dup", "test_set and not test_set_rows", "test_get_rows",
        "test_cont", "test_arange", "test_xielu", "test_rows", "test_sum", "test_group_norm", "test_ssm",
        "test_a_scan_reads", "test_add1", "test_cast_between_f32", "test_four_neighbours", "test_a_bias_is_added",
        "test_neighbours_are_copied")),
}
"""(Files, tests), to run at the same time."""

PLANTED = {
    "a row that ends one element too late": (
        "norm.cu", "if (i >= n) continue;", "if (i > n) continue;", "cuda_groups", "test_a_norm_and_its_weight",
        "heap-buffer-overflow"),
    "more warps than shared memory was taken for": (
        "soft_max.cu", "__shared__ float part[32];", "__shared__ float part[1];",
        "cuda_values", "test_soft_max_of_masked_rows", "global-buffer-overflow"),
    "a key behind the shared memory of a launch": (
        "sort.cu", "for (int i = threadIdx.x; i < n; i += blockDim.x) keys[i] =",
        "for (int i = threadIdx.x; i <= n; i += blockDim.x) keys[i] =", "cuda_sort", "test_rows_of_one_block",
        "heap-buffer-overflow"),
    "an element behind those that a thread holds": (
        "norm.cu", "v[j] = f[j] = t[j] = 0.0f;", "v[j + 1] = f[j] = t[j] = 0.0f;", "cuda_groups",
        "test_a_norm_and_its_weight", "index 16 out of bounds for type 'float [16]'"),
    "a scale that is loaded with what stands beside it": (
        "elements.cuh", "case Q4_0: return (float)(nibble(b + 2, j, 16) - 8) * half_at(b);",
        "case Q4_0: return (float)(nibble(b + 2, j, 16) - 8) * __half_bits_to_float(*(const uint32_t*)b & 0xffff);",
        "cuda_rows", "test_get_rows_reads_every_bit", "misaligned address"),
    "a head beside those that there are": (
        "rope.cu", "char* to = at(h.d, 0, head, token, 0);", "char* to = at(h.d, 0, head + 1, token, 0);",
        "cuda_projections", "test_three_products", "heap-buffer-overflow"),
    "an expert behind the last one": (
        "sort.cu", "i < n_experts; i += blockDim.x)\n            *(int32_t*)at(order",
        "i <= n_experts; i += blockDim.x)\n            *(int32_t*)at(order", "cuda_routing",
        "test_experts_are_chosen", "heap-buffer-overflow"),
    "cells behind the last one of a cache": (
        "attention_mma.cuh", "const bool whole = cell0 + i < end;", "const bool whole = cell0 + i <= end;",
        "cuda_attention_tiles", "test_cells", "heap-buffer-overflow"),
    "a cell behind those of a tile": (
        "attention_mma.cuh", "(values + 9 * pitch)", "(values + 10 * pitch)", "cuda_attention_tiles", "test_columns",
        "heap-buffer-overflow"),
    "a place that is counted in too few bits": (
        "rows.cu", "if (row < 0 || row >= a.ne[1]) {", "if (row < 0 || (int)row * 4 >= a.ne[1] * 4) {",
        "cuda_rows", "test_an_id_that_names_nothing", "signed integer overflow"),
}


def results(cases: dict[str, tuple[str | None, tuple[str, ...], tuple[str, ...]]]) -> dict[str, tuple[int, str]]:
    """(exit status, output) of tests in files with the kernels of a folder (None: the package's)."""
    given = [(folder, [str(HERE / f"test_{file}.py") for file in files], tests)
             for folder, files, tests in cases.values()]
    done = run_sanitized("address,undefined", CODE, json.dumps(given))
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


# One test for all cases: they share a process that loads the package, and are computed at the same time.

@pytest.mark.parametrize("cases", [
    {"norms": (("cuda_groups",), ("test_a_norm_and_its_weight",))}, pytest.param(WELL, marks=pytest.mark.soak),
    pytest.param({"models": (("cupy_models",), ("test_quantised_weights_and_experts", "test_captured_plans"))},
                 marks=pytest.mark.soak)], ids=["norms", "kernels", "plans of models"])
def test_kernels_stay_in_their_memory_and_do_nothing_undefined(cases):
    """Those of models are launched, captured and replayed there."""
    found = results({name: (None, *what) for name, what in cases.items()})
    wrong = [f"{name}: {said}" for name, (status, said) in found.items() if status or " passed" not in said]
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
def test_planted_bugs_end_the_process_where_they_are(tmp_path):
    cases = {}
    for i, (name, (source, good, bad, file, test, _)) in enumerate(PLANTED.items()):
        folder = shutil.copytree(KERNELS, tmp_path / str(i))
        text = (folder / source).read_text(encoding="utf-8")
        assert good in text, name
        (folder / source).write_text(text.replace(good, bad), encoding="utf-8")
        cases[name] = str(folder), (file,), (test,)
    missed = [f"{name}: {said}" for name, (status, said) in results(cases).items()
              if not status or PLANTED[name][-1] not in said or " passed" in said]
    assert not missed, "\n".join(missed)
