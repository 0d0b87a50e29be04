"""Loading weights: mapped or copied, with progress, from one file or several, of all types."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from small_llama import contents, written, written_in_parts

import ggml_sched as gs
from ggml_sched.graph import quants
from ggml_sched.llama import load, open_gguf, random_llama, write_gguf
from ggml_sched.llama.gguf import Kind
from ggml_sched.llama.weights import Spec, load_weights

SHAPES = {"n_vocab": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_ff": 64}
MODEL = random_llama(3, **SHAPES, dtype="q8_0")
TOKENS = [1, 5, 63, 0]


def split(folder, n_parts, data=MODEL, **how):
    return written_in_parts(folder, n_parts, data, **how)


def logits(source, **options) -> np.ndarray:
    with load(source, n_ctx=16, **options) as model:
        return model.eval(TOKENS)


def specs_of(data) -> list[Spec]:
    with open_gguf(data) as file:
        return [Spec(info.name, info.ne) for info in file.tensors.values()]


# -- where they are -----------------------------------------------------------------------


def test_mapped_weights_are_the_file_and_say_so(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    with gs.CpuBackend(1) as backend, open_gguf(path) as file:
        base, size = file.memory.ctypes.data, file.memory.nbytes
        weights = load_weights(file, specs_of(MODEL), lambda name, layer: backend)
        assert backend.used == 0 and weights.mapped[backend]
        (buffer,) = weights.buffers[backend]
        assert buffer.file_backed and buffer.usage == "weights"
        assert base <= buffer.base and buffer.base + buffer.size <= base + size
        weights.close()
        assert weights.buffers == {}


def test_weights_over_bytes_of_the_caller_are_no_file():
    with gs.CpuBackend(1) as backend, open_gguf(bytearray(MODEL)) as file:
        weights = load_weights(file, specs_of(MODEL), lambda name, layer: backend)
        assert backend.used == 0 and not weights.buffers[backend][0].file_backed
        weights.close()


def test_copied_weights_are_not_the_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    with gs.CpuBackend(1) as backend, open_gguf(path) as file:
        weights = load_weights(file, specs_of(MODEL), lambda name, layer: backend, use_mmap=False)
        (buffer,) = weights.buffers[backend]
        assert backend.used >= buffer.size > 0 and not buffer.file_backed and not weights.mapped[backend]
        for info in file.tensors.values():
            out = bytearray(info.nbytes)
            backend.get_tensor(weights[info.name], out)
            assert out == file.data(info).tobytes()
        weights.close()
        assert backend.used == 0


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the host does not say what is resident")
def test_loading_holds_nothing_beyond_the_file(tmp_path):
    """64 MB of weights, mapped or copied: at most a piece of them is in memory twice, and mapped none of its own."""
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, {f"w{i}": np.zeros((2048, 2048), np.float32) for i in range(4)})
    specs = [Spec(f"w{i}", (2048, 2048)) for i in range(4)]

    def resident(kind: str) -> int:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith(kind + ":"):
                return int(line.split()[1]) << 10
        raise AssertionError(kind)

    highest = [0]

    def watch(done: int, total: int) -> None:
        highest[0] = max(highest[0], resident("Rss"))

    with gs.CpuBackend(1) as backend:
        for use_mmap, private, most in ((True, 8 << 20, 72 << 20), (False, 72 << 20, 100 << 20)):
            with open_gguf(path) as file:
                before, own, highest[0] = resident("Rss"), resident("Anonymous"), 0
                weights = load_weights(file, specs, lambda name, layer: backend, use_mmap, watch)
                assert highest[0] - before < most
                assert resident("Anonymous") - own < private
                weights.close()


# -- progress -------------------------------------------------------------------------------


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("source", ["path", "bytes", "parts"])
def test_progress_counts_every_byte_of_weights(tmp_path, source, use_mmap):
    if source == "parts":
        source = split(tmp_path, 3)
    elif source == "path":
        source = tmp_path / "m.gguf"
        source.write_bytes(MODEL)
    else:
        source = MODEL
    seen = []
    with gs.CpuBackend(1) as a, gs.CpuBackend(1, name="B") as b, open_gguf(source) as file:
        weights = load_weights(file, specs_of(MODEL), lambda name, layer: b if "blk.1" in name else a, use_mmap,
                               progress=lambda done, total: seen.append((done, total)))
        weights.close()
        total = sum(info.nbytes for info in file.tensors.values())
    assert seen[0] == (0, total) and seen[-1] == (total, total) and len(seen) > 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("use_mmap", [True, False])
def test_what_progress_raises_ends_the_load_and_nothing_is_held(use_mmap):
    class Enough(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise Enough

    with gs.CpuBackend(1) as backend, open_gguf(MODEL) as file:
        with pytest.raises(Enough):
            load_weights(file, specs_of(MODEL), lambda name, layer: backend, use_mmap, progress=stop)
        assert backend.used == 0


def test_weights_that_were_dropped_raise_though_another_thread_got_the_exception():
    class Overtaken(gs.DryBackend):
        takes_at_once = True

        def set_tensor_async(self, tensor, data, offset=0):
            pass

        def synchronize(self):
            self.note_failure(gs.BackendError("broken"))

    with Overtaken("A") as backend, open_gguf(MODEL) as file:
        with pytest.raises(gs.BackendError, match="'A'.*another thread failed.*dropped: broken"):
            load_weights(file, specs_of(MODEL), lambda name, layer: backend)
        assert backend.used == 0


def test_a_file_that_was_cut_while_it_loads_is_an_error(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    with gs.CpuBackend(1) as backend, open_gguf(path) as file:
        os.truncate(path, 8192)
        with pytest.raises(gs.FileFormatError, match="m.gguf.*cannot be read.*8192"):
            load_weights(file, specs_of(MODEL), lambda name, layer: backend, progress=lambda done, total: None)
        assert backend.used == 0


# -- files in parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("n_parts", [2, 3, 7])
def test_a_model_in_parts_is_the_model(tmp_path, n_parts):
    path = split(tmp_path, n_parts)
    want = logits(MODEL)
    assert np.array_equal(logits(path), want)
    assert np.array_equal(logits(path, use_mmap=False), want)
    with gs.CpuBackend(1) as a, gs.CpuBackend(1, name="B") as b:
        assert np.array_equal(logits(path, backends=[a, b]), logits(MODEL, backends=[a, b]))
        assert a.used == b.used == 0
    with open_gguf(path) as file, open_gguf(MODEL) as whole:
        assert len(file.parts) == n_parts
        assert {n: file.data(t).tobytes() for n, t in file.tensors.items()} == {
            n: whole.data(t).tobytes() for n, t in whole.tensors.items()}
    assert all(part.closed for part in file.parts)


def test_a_part_on_its_own_in_memory_or_out_of_turn_is_refused(tmp_path):
    path = split(tmp_path, 3)
    with pytest.raises(gs.FileFormatError, match="part 2 of 3.*first part"):
        open_gguf(tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(gs.FileFormatError, match="3 files.*path"):
        open_gguf(path.read_bytes())
    renamed = path.rename(tmp_path / "model.gguf")
    with pytest.raises(gs.FileFormatError, match="-00001-of-00003"):
        open_gguf(renamed)
    renamed.rename(path)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(gs.FileFormatError, match="part 3 of 3.*m-00003-of-00003"):
        open_gguf(path)


@pytest.mark.parametrize(("changes", "says"), [
    ({1: {"split.no": (Kind.U16, 2)}}, "says it is part 3 of 3, not 2 of 3"),
    ({2: {"split.count": (Kind.U16, 4)}}, "says it is part 3 of 4, not 3 of 3"),
    ({0: {"split.count": (Kind.U16, 4)}}, "-00001-of-00004"),
    ({0: {"split.count": (Kind.U32, 1 << 31)}}, "split.count is 2147483648"),
    ({0: {"split.count": "three"}}, "split.count is 'three'"),
    ({0: {"split.count": (Kind.I32, -3)}}, "split.count is -3"),
    ({0: {"split.no": (Kind.BOOL, False)}}, "split.no is False"),
    ({0: {"split.tensors.count": (Kind.I32, 7)}}, "split.tensors.count is 7"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_parts_that_do_not_belong_together_are_refused(tmp_path, changes, says):
    with pytest.raises(gs.FileFormatError, match=says):
        open_gguf(split(tmp_path, 3, changes=changes))


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    path = split(tmp_path, 3)
    second = tmp_path / "m-00002-of-00003.gguf"
    metadata, tensors = contents(path.read_bytes().replace(b"split.count", b"split.xxxxx"))
    write_gguf(second, {"split.no": (Kind.U16, 1), "split.count": (Kind.U16, 3)}, tensors)
    with pytest.raises(gs.FileFormatError, match="m-00002.*earlier part"):
        open_gguf(path)


# -- tensors of other types, and others than are needed -------------------------------------------


def with_type(data: bytes, name: str, number: int) -> bytes:
    """The file with the type number of one tensor replaced."""
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    n_dims = struct.unpack_from("<I", data, at)[0]
    at += 4 + 8 * n_dims
    return data[:at] + struct.pack("<I", number) + data[at + 4 :]


@pytest.mark.parametrize("number", [40, 4, 1 << 31])
def test_an_unknown_type_is_refused_where_the_tensor_is_needed_and_named(number):
    data = with_type(MODEL, "blk.1.ffn_up.weight", number)
    with open_gguf(data) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
        assert info.type == number and info.nbytes == 0
        with pytest.raises(gs.FileFormatError, match=f"'blk.1.ffn_up.weight'.*type {number}"):
            file.data(info)
    with pytest.raises(gs.FileFormatError, match=f"'blk.1.ffn_up.weight'.*type {number}"):
        load(data, n_ctx=16)


def test_a_type_that_no_backend_computes_is_named():
    metadata, tensors = contents(random_llama(1, **(SHAPES | {"n_embd": 256, "n_ff": 256})))
    tensors["blk.1.ffn_up.weight"] = ("iq2_xxs", (256, 256), bytes(256 * 66))
    with pytest.raises(gs.UnsupportedOp, match=r"'blk\.1\.ffn_up\.weight' iq2_xxs"):
        load(written(metadata, tensors), [gs.CpuBackend(1)], n_ctx=16)


def test_a_tensor_that_the_architecture_does_not_have_is_refused_unless_it_is_ignored():
    metadata, tensors = contents(MODEL)
    specs = specs_of(MODEL)
    tensors["blk.0.odd.bias"] = np.zeros(7, np.float32)
    tensors["blk.1.odd.bias"] = np.zeros(7, np.float32)
    data = with_type(written(metadata, tensors), "blk.1.odd.bias", 77)
    with gs.CpuBackend(1) as backend, open_gguf(data) as file:
        with pytest.raises(gs.FileFormatError, match="'blk.0.odd.bias'"):
            load_weights(file, specs, lambda name, layer: backend)
        with pytest.raises(gs.FileFormatError, match="'blk.0.odd.bias'"):
            load_weights(file, specs, lambda name, layer: backend, ignored=["*.even.bias"])
        weights = load_weights(file, specs, lambda name, layer: backend, ignored=["*.odd.bias"])
        assert weights.get("blk.0.odd.bias") is None and len(weights.tensors) == len(specs)
        weights.close()


# -- types ----------------------------------------------------------------------------------------

WIDE = {"n_vocab": 64, "n_embd": 256, "n_layer": 2, "n_head": 8, "n_head_kv": 2, "n_ff": 512}
TYPES = ["f16", "bf16", *(str(kind) for kind in sorted(quants.QUANTIZED))]


def dequantised(data: bytes) -> bytes:
    """The same model with f32 weights."""
    with open_gguf(data) as file:
        tensors = {}
        for name, info in file.tensors.items():
            raw = np.array(file.data(info))
            shape = info.ne[::-1]
            if info.type == gs.Type.F32:
                values = raw.view(np.float32)
            elif info.type == gs.Type.F16:
                values = raw.view(np.float16).astype(np.float32)
            elif info.type == gs.Type.BF16:
                values = quants.bf16_to_f32(raw.view(np.uint16))
            else:
                values = quants.dequantize(raw.reshape(-1, info.type.type_size), info.type)
            tensors[name] = values.reshape(shape)
        return written(file.metadata, tensors)


def logits_in_parts(data: bytes, **options) -> np.ndarray:
    with load(data, n_ctx=32, **options) as model:
        return np.concatenate([model.eval(TOKENS[:2]), model.eval(TOKENS[2:3]), model.eval(TOKENS[3:])])


@pytest.mark.spread("dtype", "n_expert")
@pytest.mark.parametrize("n_expert", [0, 4], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_model_of_each_type_computes_what_its_f32_twin_does(dtype, n_expert):
    data = random_llama(8, **WIDE | {"n_layer": 1}, dtype=dtype, n_expert=n_expert)     # one holds every kind of tensor
    with open_gguf(data) as file:
        assert {info.type for info in file.tensors.values()} == {gs.Type.F32, gs.Type[dtype.upper()]}
        assert file.tensors["blk.0.attn_norm.weight"].type == gs.Type.F32
    want = logits_in_parts(dequantised(data))
    with gs.CpuBackend(kernels="numpy") as backend:
        error = logits_in_parts(data, backends=[backend]) - want
    assert (error**2).mean() < 1e-3 * (want**2).mean()
    # Compiled kernels multiply with 8-bit activations, which may send a token to another expert where two are as good.
    error = logits_in_parts(data) - want
    assert (error**2).mean() < (2e-2 if n_expert else 1e-3) * (want**2).mean()


def test_types_mixed_in_one_file():
    """As Q4_K_M and its like mix them."""
    data = random_llama(9, **WIDE, dtype="q4_K")
    with open_gguf(data) as file, open_gguf(random_llama(9, **WIDE, dtype="q6_K")) as finer:
        tensors = {}
        for name in file.tensors:
            source = finer if "v.weight" in name or "output" in name else file
            info = source.tensors[name]
            tensors[name] = info.type, info.ne, source.data(info)
        mixed = written(file.metadata, tensors)
    assert len({kind for kind, *_ in tensors.values()}) == 3
    want = logits_in_parts(dequantised(mixed))
    assert ((logits_in_parts(mixed) - want) ** 2).mean() < 1e-3 * (want**2).mean()


def test_a_type_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="352.*whole q4_K blocks of 256"):
        random_llama(1, **(WIDE | {"n_ff": 352}), dtype="q4_K")
    with pytest.raises(ValueError, match="'q9_9'.*q4_K"):
        random_llama(1, **WIDE, dtype="q9_9")
    with pytest.raises(gs.UnsupportedOp, match="iq2_xxs"):
        random_llama(1, **WIDE, dtype="iq2_xxs")
