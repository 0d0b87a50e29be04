"""Files of every architecture: an error names each missing, superfluous or invalid field, quickly and always typed."""

import math
import time

import arch_cases as cases
import numpy as np
import pytest
from arch_runner import Runner
from small_llama import contents, written

import ggml_sched as gs
from ggml_sched.llama import load, open_gguf
from ggml_sched.llama.arch import ARCHITECTURES
from ggml_sched.llama.synthetic import random_model

WRONG = (None, 0, 1, 3, -1, 7, 1 << 24, (1 << 31) - 1, (1 << 63) - 1, 0.0, -1.0, 1e-30, 1e38, float("nan"),
         float("inf"), "x", True, False, [], [1], [2, 2, 2], [0] * 7, [-1] * 7, ["a"] * 7, [1.5] * 7, [[1]] * 3)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.soak), 12])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_senseless_metadata_is_a_typed_error_in_no_time(arch, every):
    """Each key with each value, or with one `every` some values: other ones for the next key and architecture."""
    name = {"deepseek2": "deepseek2-absorbed", "phi3": "phi3-long"}.get(arch, arch)
    metadata, tensors = contents(cases.model(name))
    refused = 0
    with open_gguf(written(metadata, tensors)) as f:
        usual = ARCHITECTURES[arch].hparams(f)
    more = ["rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor", "rope.freq_base_swa",
            "rope.scaling.original_context_length", "attention.sliding_window_pattern", "expert_group_count",
            "expert_gating_func", "rope.scaling.yarn_log_multiplier", "attention.key_length", "attention.value_length"]
    keys = {k for k in metadata if k.startswith(arch + ".")} | {f"{arch}.{k}" for k in more}
    for first, key in enumerate(sorted(keys), list(ARCHITECTURES).index(arch)):
        for value in WRONG[first % every::every]:
            try:
                data = written({**metadata, key: value}, tensors)
            except (TypeError, ValueError, OverflowError):
                continue        # what no file can hold
            began = time.process_time()
            try:
                with open_gguf(data) as f:
                    same = ARCHITECTURES[arch].hparams(f) == usual
                if not same:
                    with Runner(data, 8) as runner:
                        runner.run([1, 2], outputs=[1])
            except gs.Error:
                refused += 1
            assert time.process_time() - began < 1, (key, value)
    assert refused > 150 // every


@pytest.mark.parametrize(("arch", "key", "value", "match"), [
    ("mamba", "ssm.dt_b_c_rms", 1, "1, not a bool"),
    ("gemma2", "attention.sliding_window_pattern", [True], "no list of bools for"),
    ("gemma2", "attention.sliding_window_pattern", ["x"] * 8, "no list of bools for"),
])
def test_what_is_no_truth_value_is_named(arch, key, value, match):
    metadata, tensors = contents(cases.model(arch))
    with (open_gguf(written({**metadata, f"{arch}.{key}": value}, tensors)) as f,
          pytest.raises(gs.FileFormatError, match=f"{arch}.{key}.*{match}")):
        ARCHITECTURES[arch].hparams(f)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_missing_misshapen_and_unknown_tensors_are_named(arch):
    metadata, tensors = contents(cases.model({"phi3": "phi3-long"}.get(arch, arch)))
    with open_gguf(cases.model({"phi3": "phi3-long"}.get(arch, arch))) as f:
        specs = {s.name: s for s in ARCHITECTURES[arch].weights(ARCHITECTURES[arch].hparams(f))}
    assert set(tensors) <= set(specs)
    for name in tensors:
        if "blk." in name and ".0." not in name or name == "blk.0.attn_qkv.weight":
            continue
        without = {k: v for k, v in tensors.items() if k != name}
        if specs[name].required:
            with pytest.raises(gs.FileFormatError, match=name), Runner(written(metadata, without)):
                pass
        else:
            with Runner(written(metadata, without)) as runner:
                assert np.isfinite(runner.run([1, 2])).all()
        other = np.zeros((3, 5), np.float32)
        with pytest.raises(gs.Error), Runner(written(metadata, {**without, name: other})):
            pass
    with pytest.raises(gs.FileFormatError, match="mystery"), Runner(written(metadata, {**tensors, "mystery": other})):
        pass


@pytest.mark.parametrize("arch, name, options", [
    ("llama", "rope_freqs.weight", {"optional": ("rope_freqs",)}), ("mamba", "blk.0.ssm_a", {}),
    ("gpt-oss", "blk.0.attn_sinks.weight", {})])
def test_a_weight_of_a_type_that_its_op_does_not_take_is_an_error_of_the_file(tmp_path, arch, name, options):
    metadata, tensors = contents(random_model(arch, 1, **options))
    _, ne, data = tensors[name]
    path = tmp_path / "odd.gguf"
    path.write_bytes(written(metadata, {**tensors, name: ("f16", ne, np.frombuffer(data, np.float32).astype("f2"))}))
    with pytest.raises(gs.FileFormatError, match=f"odd.gguf: .*{name}.* f16"):
        load(path, n_ctx=32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_random_models_depend_on_their_arguments_alone(arch):
    assert random_model(arch, 5) == random_model(arch, 5) != random_model(arch, 6)
    tied = random_model(arch, 5, tied=True)
    with open_gguf(tied) as f:
        assert "output.weight" not in f.tensors
    with Runner(tied) as runner:
        assert np.isfinite(runner.run([1, 2, 3])).all()


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("name, log_mul", [("llama-yarn", 0.0), ("deepseek2-yarn", 0.0), ("deepseek2-yarn", 0.707),
                                           ("deepseek2-yarn", 1.0)])
def test_yarns_attention_factor_is_llama_cpps(name, log_mul, factor):
    """Of the quotient of magnitudes by mscale and mscale_all_dim, which are equal in these files, nothing is left."""
    arch = name.partition("-")[0]
    metadata, tensors = contents(cases.model(name))
    more = {f"{arch}.rope.scaling.factor": factor, f"{arch}.rope.scaling.attn_factor": 1.5}
    if arch == "deepseek2":
        more[f"{arch}.rope.scaling.yarn_log_multiplier"] = 0.1 * log_mul
    with open_gguf(written({**metadata, **more}, tensors)) as f:
        rope = ARCHITECTURES[arch].hparams(f).rope

    def mscale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    wanted = mscale(log_mul) / mscale(log_mul) if log_mul else mscale(1.0)
    assert rope.attn_factor == pytest.approx(1.5 * wanted / (1 + 0.1 * math.log(factor)), rel=1e-6)
