"""Saved sequences: restoring gives the saved sequence, and an invalid file changes nothing."""

import io
import os
import random
import struct
import time
import zlib

import numpy as np
import pytest
from devices import device
from small_llama import MAMBA, SHAPES, SMALL, TOKENS

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama import ContextFull, ModelClosed, StateFormatError, random_llama
from ggml_sched.llama.state import HEAD
from ggml_sched.llama.synthetic import random_model

LATENT = random_model("deepseek2", 1)


def saved(sequence) -> bytes:
    out = io.BytesIO()
    sequence.save(out)
    return out.getvalue()


@pytest.mark.parametrize(("data", "options"), [
    (SMALL, {}), (SMALL, {"kv_type": "f16"}), (LATENT, {}), (MAMBA, {}),
], ids=["llama", "f16", "latent", "mamba"])
def test_a_sequence_goes_on_in_another_model(load, data, options, tmp_path):
    path = tmp_path / "state"
    with load(data, n_ctx=48, n_seq=2, **options) as model:
        model.sequence(1).eval([1, 2, 3])       # so that rows do not lie where positions say
        model.eval(TOKENS[:5])
        model.sequence(1).eval([4])
        model.eval(TOKENS[5:])
        model.save(path)
        again = saved(model.sequence(0))
        assert path.read_bytes() == again and os.listdir(tmp_path) == ["state"]
        expected = model.eval([7, 8])
    with load(data, n_ctx=20, n_seq=2, **options) as model:
        model.sequence(1).eval([5, 6])
        model.eval([9, 9, 9, 9])
        model.restore(path)
        assert model.sequence(0).tokens == TOKENS and model.n_free == 6
        assert np.allclose(model.eval([7, 8]), expected, atol=1e-4 * np.abs(expected).max())
        model.sequence(0).restore(io.BytesIO(again))
        assert model.sequence(0).tokens == TOKENS and model.sequence(1).tokens == [5, 6]
        assert saved(model.sequence(0)) == again


@pytest.mark.parametrize(("kv_type", "first"), [("f32", False), ("f32", True), ("f16", False)])
def test_the_layout_of_values_makes_no_difference(kv_type, first):
    with llama.load(SMALL, n_ctx=32, kv_type=kv_type, flash=first) as model:
        model.eval(TOKENS)
        state = saved(model.sequence(0))
        expected = model.eval([7])
    with llama.load(SMALL, n_ctx=32, kv_type=kv_type, flash=not first) as model:
        model.restore(io.BytesIO(state))
        assert np.abs(model.eval([7]) - expected).max() <= (1e-4 if kv_type == "f32" else 2e-3) * np.abs(expected).max()


def test_nothing_can_be_saved(load):
    with load(SMALL, n_ctx=16) as model:
        state = saved(model.sequence(0))
        model.eval(TOKENS)
        model.restore(io.BytesIO(state))
        assert model.n_past == 0 and model.n_free == 16


def test_other_models_and_caches_are_named(load):
    with load(SMALL, n_ctx=16) as model:
        model.eval(TOKENS)
        state = saved(model.sequence(0))
    others = ((random_llama(1, **{**SHAPES, "n_layer": 2}), {}, "other sizes"),
              (random_llama(1, **SHAPES, arch="qwen3"), {}, "architecture 'llama', this model has 'qwen3'"),
              (SMALL, {"kv_type": "f16"}, "cache type 'f32', this model has 'f16'"))
    for data, options, match in others:
        with load(data, n_ctx=16, **options) as model:
            before = model.eval([1, 2])
            with pytest.raises(StateFormatError, match=match):
                model.restore(io.BytesIO(state))
            assert model.n_past == 2
            model.reset()
            assert model.eval([1, 2]).tobytes() == before.tobytes()
    with load(SMALL, n_ctx=8) as model:
        model.eval([1])
        with pytest.raises(ContextFull, match="12 tokens do not fit a context of 8") as caught:
            model.restore(io.BytesIO(state))
        assert (caught.value.n_tokens, caught.value.n_ctx, model.n_past) == (12, 8, 1)
    with load(SMALL, n_ctx=14, n_seq=2) as model:
        model.sequence(1).eval([1, 2, 3])
        model.eval([4])
        with pytest.raises(ContextFull):
            model.restore(io.BytesIO(state))
        assert model.sequence(0).tokens == [4] and model.n_free == 10


def test_a_second_copy_of_a_tied_matrix_makes_no_difference():
    data = random_llama(1, **SHAPES, tied=True)
    with gs.CpuBackend(1, name="a") as a, \
            device(name="b", attributes={"is_host": False, "worker": "w"}) as b, \
            llama.load(data, [a], n_ctx=32) as one, llama.load(data, [a, b], n_ctx=32) as two:
        assert [len(model.weights.tensors) for model in (one, two)] == [29, 30]
        for source, target in ((one, two), (two, one)):
            source.eval(TOKENS)
            target.restore(io.BytesIO(saved(source.sequence(0))))
            assert target.sequence(0).tokens == source.sequence(0).tokens


def test_a_context_that_turns_keys_by_other_factors_is_refused():
    data = random_model("phi3", 1, metadata={"context_length": 256, "rope.scaling.original_context_length": 64})
    with llama.load(data, n_ctx=64) as model:
        model.eval(TOKENS)
        state = saved(model.sequence(0))
        expected = model.eval([7])
    with llama.load(data, n_ctx=32) as model:
        model.restore(io.BytesIO(state))
        assert np.allclose(model.eval([7]), expected, atol=1e-4 * np.abs(expected).max())
    with llama.load(data, n_ctx=128) as longer, llama.load(data, n_ctx=256) as longest:
        longer.eval([1, 2])
        with pytest.raises(StateFormatError, match="on the other side of 64 tokens"):
            longer.restore(io.BytesIO(state))
        assert longer.n_past == 2
        longest.restore(io.BytesIO(saved(longer.sequence(0))))
        expected = longer.eval([3])
        assert np.allclose(longest.eval([3]), expected, atol=1e-4 * np.abs(expected).max())


def test_every_truncation_and_every_flipped_bit_is_refused(load, tmp_path):
    rng = random.Random(1)
    with load(SMALL, n_ctx=16) as model:
        model.eval(TOKENS[:3])
        state = saved(model.sequence(0))
        model.eval([7])
        cut = [state[:n] for n in (*range(0, HEAD.size + 14), *range(0, len(state), 97))]
        flipped = []
        for at in (*range(HEAD.size), *(rng.randrange(len(state)) for _ in range(100))):
            data = bytearray(state)
            data[at] ^= 1 << rng.randrange(8)
            flipped.append(bytes(data))
        start = time.process_time()
        for data in cut + flipped:
            with pytest.raises(StateFormatError):
                model.restore(io.BytesIO(data))
        assert time.process_time() - start < 0.05 * len(cut + flipped)
        path = tmp_path / "state"
        path.write_bytes(state + b"x")
        with pytest.raises(StateFormatError, match="more bytes"):
            model.restore(path)
        with pytest.raises(FileNotFoundError):
            model.restore(tmp_path / "missing")
        for text in ("text", "text" * 1000):
            with pytest.raises(TypeError, match="a binary file is needed"):
                model.restore(io.StringIO(text))
        assert model.sequence(0).tokens == [*TOKENS[:3], 7]


@pytest.mark.parametrize("token", [-1, 64, 1 << 30])
def test_tokens_that_the_model_does_not_have_are_refused(load, token):
    """Also where the sum of the bytes is right."""
    with load(SMALL, n_ctx=16) as model:
        model.eval(TOKENS)
        state = saved(model.sequence(0))
        body = struct.pack("<i", token) + state[HEAD.size + 4 :]
        head = HEAD.pack(*HEAD.unpack(state[: HEAD.size])[:-1], zlib.crc32(body))
        with pytest.raises(StateFormatError, match="a token is not in 0 .. 63"):
            model.restore(io.BytesIO(head + body))
        assert model.sequence(0).tokens == TOKENS


def test_what_failed_before_does_not_touch_what_is_restored(load, monkeypatch):
    def failing(graph, wait):
        raise ZeroDivisionError

    with load(SMALL, n_ctx=16) as model:
        model.eval(TOKENS)
        state = saved(model.sequence(0))
        expected = model.eval([7])
        model.reset()
        with monkeypatch.context() as patch:
            patch.setattr(model.scheduler, "compute", failing)
            with pytest.raises(ZeroDivisionError):
                model.eval(TOKENS[:3])
        model.restore(io.BytesIO(state))
        assert model.eval([7]).tobytes() == expected.tobytes()


def test_a_raw_file_that_moves_few_bytes_a_call_is_no_damage(load):
    class Pipe(io.RawIOBase):
        data = b""

        def readable(self):
            return True

        def writable(self):
            return True

        def readinto(self, room):
            part, self.data = self.data[: min(len(room), 1000)], self.data[min(len(room), 1000) :]
            room[: len(part)] = part
            return len(part)

        def write(self, data):
            self.data += bytes(data[:1000])
            return min(len(data), 1000)

    with load(SMALL, n_ctx=32) as model:
        model.eval(TOKENS)
        pipe = Pipe()
        model.save(pipe)
        assert pipe.data == saved(model.sequence(0))
        model.reset()
        model.restore(pipe)
        assert model.sequence(0).tokens == TOKENS and pipe.data == b""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_file_opened_as_text_is_refused_and_changes_nothing(load, tmp_path, encoding):
    path = tmp_path / "state"
    with load(SMALL, n_ctx=32) as model:
        model.eval(TOKENS)
        model.save(os.fsencode(path))
        before = saved(model.sequence(0))
        with path.open(encoding=encoding) as file, pytest.raises(TypeError, match="a binary file is needed"):
            model.restore(file)
        assert saved(model.sequence(0)) == before
        model.restore(os.fsencode(path))


def test_what_is_no_path_and_no_file_is_refused_with_what_is_needed(load):
    with load(SMALL, n_ctx=32) as model:
        model.eval(TOKENS)
        before = saved(model.sequence(0))
        for call in (model.save, model.restore):
            for wrong in (before, "a\0b"):
                with pytest.raises(ValueError, match="a path or a binary file.*io.BytesIO.*no null byte"):
                    call(wrong)
            for wrong in (bytearray(before), None, 5):
                with pytest.raises(TypeError, match=f"a path or a binary file.*not as {type(wrong).__name__}"):
                    call(wrong)
            with pytest.raises(FileNotFoundError, match="No such file or directory: ''"):
                call("")
        assert saved(model.sequence(0)) == before


def test_a_state_is_bound_to_sizes_and_not_to_the_values_of_weights(load):
    with load(random_llama(1, **SHAPES), n_ctx=32) as model, load(random_llama(2, **SHAPES), n_ctx=32) as other:
        model.eval(TOKENS)
        other.restore(io.BytesIO(saved(model.sequence(0))))
        assert saved(other.sequence(0)) == saved(model.sequence(0))


def test_a_save_that_fails_leaves_the_old_file(load, tmp_path, monkeypatch):
    path = tmp_path / "state"
    with load(SMALL, n_ctx=16) as model:
        model.eval(TOKENS)
        model.save(path)
        before = path.read_bytes()
        model.eval([7])

        def failing(*paths):
            raise OSError("full")

        monkeypatch.setattr(os, "replace", failing)
        with pytest.raises(OSError, match="full"):
            model.save(path)
        assert path.read_bytes() == before and os.listdir(tmp_path) == ["state"]
    with pytest.raises(ModelClosed):
        model.save(path)
    with pytest.raises(ModelClosed):
        model.restore(path)
