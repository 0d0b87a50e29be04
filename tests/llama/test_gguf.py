"""GGUF files: written files are read back, and every error in a file is a typed error, fast."""

import io
import os
import pickle
import random
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_llama import written

import ggml_sched as gs
from ggml_sched.llama import gguf, gguf_reader, load, open_gguf, random_llama, write_gguf
from ggml_sched.llama.gguf import Kind

SHAPES = {"n_vocab": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_ff": 32}
TOKENS = {"tokenizer.ggml.tokens": [f"tok_{i}" for i in range(32)], "tokenizer.ggml.scores": [0.0] * 32}
SMALL = random_llama(1, **SHAPES, extra=TOKENS)
SECONDS = 1.0


def string(text: bytes | str) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text


def file(keys: list[bytes] = (), tensors: list[bytes] = (), data: bytes = b"", n_keys=None, n_tensors=None,
         version=3) -> bytes:
    """A file put together by hand, right or wrong."""
    n_keys = len(keys) if n_keys is None else n_keys
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def tensor(name="t", ne=(8,), kind=0, offset=0, n_dims=None) -> bytes:
    n_dims = len(ne) if n_dims is None else n_dims
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", n_dims, *ne, kind, offset)


def refused(data: bytes, match: str) -> None:
    start = time.process_time()
    with pytest.raises(gs.FileFormatError, match=match):
        open_gguf(data)
    assert time.process_time() - start < SECONDS


# -- valid files ---------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_metadata_that_has_an_alignment_gives_it(alignment):
    tensors = {"a": np.arange(16, dtype=np.float32), "b": np.arange(8, dtype=np.float32), "c": np.ones(3, np.float32)}
    for n in range(0, 64, 4):
        first = written({"x": "y" * n}, tensors, alignment=alignment)
        with open_gguf(first) as f:
            copies = {name: (info.type, info.ne, f.data(info)) for name, info in f.tensors.items()}
            assert written(f.metadata, copies) == written(f.metadata, copies, alignment=alignment) == first
    assert written({"general.alignment": 32}, tensors, alignment=32)
    for metadata, wrong in (({"general.alignment": 64}, 32), ({"general.alignment": 32}, 64), ({}, 24), ({}, 0),
                            ({"general.alignment": 24}, None), ({"general.alignment": "32"}, None)):
        with pytest.raises(ValueError, match="alignment"):
            written(metadata, tensors, alignment=wrong)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 32, 64, 4096])
def test_what_is_written_is_read_back(version, alignment):
    metadata = {
        "general.architecture": "llama", "bool": True, "small": 7, "negative": -7, "large": 1 << 40,
        "largest": (1 << 64) - 1, "least": -(1 << 63), "float": 0.5, "empty": "", "text": "grüße 你好",
        "u8": (Kind.U8, 255), "i8": (Kind.I8, -1), "u16": (Kind.U16, 65535), "i16": (Kind.I16, -2),
        "f64": (Kind.F64, 0.1), "ints": [1, 2, 3], "mixed": [1, -1], "floats": [0.5, 1.5],
        "bools": [True, False], "strings": ["a", "", "ü"], "none": [], "array": np.arange(5, dtype=np.int16),
        "nested": [[1, 2], [], [3]],
    }
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float16),
               "q": ("q8_0", (32, 2), bytes(range(68)))}
    with open_gguf(written(metadata, tensors, version=version, alignment=alignment)) as f:
        assert f.version == version and f.alignment == alignment
        for key, value in metadata.items():
            value = value[1] if isinstance(value, tuple) else value
            assert f.metadata[key] == (value.tolist() if isinstance(value, np.ndarray) else value), key
        assert [(t.name, str(t.type), t.ne) for t in f.tensors.values()] == [
            ("a", "f32", (3, 2)), ("b", "f16", (3,)), ("q", "q8_0", (32, 2))]
        assert all(t.offset % alignment == 0 for t in f.tensors.values())
        assert f.data(f.tensors["a"]).view(np.float32).tolist() == list(range(6))
        assert f.data(f.tensors["q"]).tobytes() == bytes(range(68))


def test_another_reader_agrees(tmp_path):
    other = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    reader = other.GGUFReader(str(path))
    with open_gguf(path) as f:
        for key, field in reader.fields.items():
            assert key.startswith("GGUF.") or f.metadata[key] == field.contents()
        assert [t.name for t in reader.tensors] == list(f.tensors)
        for t in reader.tensors:
            assert f.data(f.tensors[t.name]).tobytes() == t.data.tobytes()
    del reader


def test_arrays_are_sequences():
    f = open_gguf(written({"s": ["a", "bc", "d"], "n": [1.5, 2.5], "raw": [b"\xff\x00", "x"],
                           "deep": [[1], [2, 3]]}))
    s, n, raw = (f.metadata[k] for k in ("s", "n", "raw"))
    assert len(s) == 3 and s[1] == "bc" and s[-1] == "d" and s[1:] == ["bc", "d"]
    assert list(s) == ["a", "bc", "d"]
    assert "bc" in s and s.raw(1) == b"bc" and s.kind is Kind.STRING
    assert n[0] == 1.5 and type(n[0]) is float and n.numpy().tolist() == [1.5, 2.5]
    # Bytes that are not UTF-8 survive.
    assert raw.raw(0) == b"\xff\x00" and raw[0].encode("utf-8", "surrogateescape") == b"\xff\x00"
    assert f.metadata["deep"][1].tolist() == [2, 3]
    again = pickle.loads(pickle.dumps(dict(f.metadata)))
    assert again == f.metadata and again["raw"].raw(0) == b"\xff\x00"
    assert [again[k].kind for k in again] == [f.metadata[k].kind for k in again]
    with pytest.raises(IndexError):
        s[3]
    with pytest.raises(TypeError):
        s.numpy()
    with pytest.raises(TypeError):
        n.raw(0)


def test_sources_of_every_kind(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    for source in (path, str(path), SMALL, bytearray(SMALL),
                   memoryview(SMALL), np.frombuffer(SMALL, np.uint8), io.BytesIO(SMALL)):
        with open_gguf(source) as f:
            assert f.metadata["llama.block_count"] == 2
    with open(path, "rb") as binary, open_gguf(binary) as f:
        assert len(f.tensors) == 21
    with pytest.raises(TypeError):
        open_gguf(io.StringIO("text"))
    with pytest.raises(TypeError):
        open_gguf(np.zeros((8, 8), np.uint8).T)


def test_a_view_of_a_closed_file_stays_readable(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(SMALL)
    f = open_gguf(path)
    view = f.data(f.tensors["token_embd.weight"])
    tokens = f.metadata["tokenizer.ggml.tokens"]
    before = view.copy()
    assert not view.flags.writeable
    f.close()
    f.close()
    assert f.closed
    path.unlink()
    assert (view == before).all() and tokens[3] == "tok_3"
    with pytest.raises(ValueError, match="closed"):
        _ = f.memory


def test_a_large_vocabulary_opens_without_parsing_its_strings():
    n = 128 * 1024
    data = written({"tokenizer.ggml.tokens": [f"token{i}" for i in range(n)],
                    "tokenizer.ggml.scores": np.zeros(n, np.float32),
                    "tokenizer.ggml.token_type": np.ones(n, np.int32)})
    start = time.process_time()
    with open_gguf(data) as f:
        tokens = f.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == n and tokens[n - 1] == f"token{n - 1}"
        assert len(list(tokens)) == n
    assert time.process_time() - start < SECONDS


def test_arrays_of_a_closed_file_do_not_keep_it_open(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(written({"strings": ["a", "", "ü"], "numbers": np.arange(5, dtype=np.int16),
                              "nested": [[1], ["b"]]}))
    before = set(os.listdir("/proc/self/fd")) if sys.platform == "linux" else None
    with open_gguf(path) as f:
        mapping, metadata = f._mapping, f.metadata
    assert mapping.closed
    assert {key: value.tolist() for key, value in metadata.items() if key != "general.architecture"} == {
        "strings": ["a", "", "ü"], "numbers": [0, 1, 2, 3, 4], "nested": [[1], ["b"]]}
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind, body", [(7, bytes(8)), (8, (struct.pack("<Q", 0)))])
def test_arrays_of_more_bytes_than_any_vocabulary_are_refused(monkeypatch, kind, body):
    monkeypatch.setattr(gguf_reader, "MAX_ARRAY_BYTES", 7)
    with pytest.raises(gs.FileFormatError, match="metadata 'k'.*limit"):
        open_gguf(file([string("k") + struct.pack("<IIQ", 9, kind, 8 if kind == 7 else 1) + body]))


def test_a_file_object_stays_where_it_was(tmp_path):
    (tmp_path / "a").write_bytes(b"before" + SMALL)
    with open(tmp_path / "a", "rb") as source:
        source.seek(6)
        for _ in range(2):
            with open_gguf(source) as f:
                assert f.tensors and source.tell() == 6
        with pytest.raises(gs.OutOfMemory):
            load(source, n_ctx=32, memory=1)
        with load(source, n_ctx=32) as model:
            assert model.n_vocab == 32


VOCABULARIES = sorted((Path(__file__).resolve().parents[3] / "shared" / "vocab").glob("*.gguf"))


@pytest.mark.parametrize("path", VOCABULARIES, ids=lambda path: path.stem)
def test_real_vocabularies_open_in_time(path):
    start = time.process_time()
    with open_gguf(path) as f:
        tokens, types = f.metadata["tokenizer.ggml.tokens"], f.metadata["tokenizer.ggml.token_type"]
        assert len(list(tokens)) == len(types.numpy()) > 30_000
    assert time.process_time() - start < SECONDS


def test_opening_a_file_touches_no_weights(tmp_path):
    """A terabyte of weights, of which the disk holds nothing, opens at once."""
    path = tmp_path / "sparse.gguf"
    size = 1 << 40
    path.write_bytes(file(tensors=[tensor("w", (size // 4,))]))
    with open(path, "r+b") as out:
        out.truncate(size + 4096)
    start = time.process_time()
    with open_gguf(path) as f:
        assert f.tensors["w"].nbytes == size
    assert time.process_time() - start < SECONDS


# -- invalid files -----------------------------------------------------------------------


def test_files_that_are_none(tmp_path):
    empty = tmp_path / "empty.gguf"
    empty.touch()
    with pytest.raises(gs.FileFormatError, match="0 bytes"):
        open_gguf(empty)
    with pytest.raises(gs.FileFormatError, match="directory"):
        open_gguf(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_gguf(tmp_path / "missing.gguf")
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    with pytest.raises(gs.FileFormatError, match="regular"):
        open_gguf(fifo)
    with pytest.raises(gs.FileFormatError, match="not a path"):
        open_gguf("a\0b")
    for data in (b"", b"GG", b"GGUF", b"ggml" + bytes(100)):
        refused(data, "at byte")
    empty.write_bytes(b"GGUF\x97")
    for encoding in ("utf-8", "latin-1"):
        with empty.open(encoding=encoding) as text, pytest.raises(TypeError, match="from a binary file, not a text"):
            open_gguf(text)


@pytest.mark.parametrize(("data", "match"), [
    (file(version=1), "version 1"),
    (file(version=4), "version 4"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (file(n_keys=1 << 63), "metadata keys"),
    (file(n_tensors=(1 << 64) - 1), "tensors"),
    (file(n_keys=1), "metadata key 0|bytes"),
    (file([string("k") + struct.pack("<I", 13)]), "unknown type 13"),
    (file([struct.pack("<Q", 1 << 62) + b"k"]), "bytes of metadata key 0"),
    (file([string(b"\xff") + struct.pack("<II", 4, 1)]), "UTF-8"),
    (file([string("k") + struct.pack("<II", 4, 1)] * 2), "'k' appears twice"),
    (file([string("k") + struct.pack("<IB", 7, 2)]), "not a bool"),
    (file([string("k") + struct.pack("<IIQ", 9, 4, 1 << 62)]), "elements of metadata 'k'"),
    (file([string("k") + struct.pack("<IIQ", 9, 8, 1 << 62)]), "strings in metadata 'k'"),
    (file([string("k") + struct.pack("<IIQ", 9, 8, 2) + string("a") + struct.pack("<Q", (1 << 64) - 9)]),
     "string 1 of 2"),
    (file([string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100]), "nested"),
    (file([string("k") + struct.pack("<I", 8) + struct.pack("<Q", 1 << 40)]), "bytes of metadata 'k'"),
    (file([string("general.alignment") + struct.pack("<II", 4, 0)]), "alignment"),
    (file([string("general.alignment") + struct.pack("<II", 4, 33)]), "alignment"),
    (file([string("general.alignment") + struct.pack("<II", 4, 1 << 31)]), "alignment"),
    (file([string("general.alignment") + struct.pack("<If", 6, 32)]), "alignment"),
    (file(tensors=[tensor(ne=(8,), n_dims=0)], data=bytes(32)), "0 dimensions"),
    (file(tensors=[tensor(ne=(8,) * 5)], data=bytes(1 << 18)), "5 dimensions"),
    (file(tensors=[tensor(ne=(8,), n_dims=1 << 31)], data=bytes(32)), "dimensions"),
    (file(tensors=[tensor(ne=(1 << 32, 1 << 32))], data=bytes(32)), "do not lie|inside"),
    (file(tensors=[tensor(ne=(1 << 62, 4))], data=bytes(32)), "do not lie|inside"),
    (file(tensors=[tensor(ne=((1 << 64) - 1,) * 4)], data=bytes(32)), "do not lie|inside"),
    (file(tensors=[tensor(ne=(0, 8))], data=bytes(32)), "extents"),
    (file(tensors=[tensor(ne=(33,), kind=8)], data=bytes(99)), "blocks"),
    (file(tensors=[tensor(kind=4, offset=64)], data=bytes(32)), "do not lie|inside"),
    (file(tensors=[tensor(kind=1 << 31, offset=8)], data=bytes(32)), "aligned"),
    (file(tensors=[tensor(offset=16)], data=bytes(64)), "aligned"),
    (file(tensors=[tensor(offset=(1 << 64) - 32)], data=bytes(64)), "do not lie|inside"),
    (file(tensors=[tensor(offset=32)], data=bytes(32)), "do not lie|inside"),
    (file(tensors=[tensor("a"), tensor("a", offset=32)], data=bytes(64)), "'a' appears twice"),
    (file(tensors=[tensor("a"), tensor("b")], data=bytes(64)), "overlap"),
    (file(tensors=[tensor("a" * 300)], data=bytes(64)), "name of tensor 0"),
])
def test_what_is_wrong_is_named(data, match):
    refused(data, match)


def test_counts_that_a_file_could_hold_but_no_vocabulary_has_are_refused_quickly():
    refused(file([string("k") + struct.pack("<IIQ", 9, 8, 1 << 24) + bytes(8 << 24)]), "strings")
    refused(file([string("k") + struct.pack("<IIQ", 9, 9, 1 << 20) + struct.pack("<IQ", 4, 0) * (1 << 20)]), "arrays")


def test_every_truncation_is_refused():
    with open_gguf(SMALL) as f:
        ends = sorted({t.offset + t.nbytes for t in f.tensors.values()})
    lengths = {*range(0, 200), *range(0, ends[-1], 101), *ends[:-1], *(e - 1 for e in ends)}
    for length in sorted(lengths):
        refused(SMALL[:length], "at byte")


def attempt(data: bytes) -> None:
    """Load and run a mutated model: it works, or raises a gs.Error, quickly."""
    start = time.process_time()
    try:
        with open_gguf(data) as f:
            for value in f.metadata.values():
                if isinstance(value, gguf.Array):
                    value.tolist()
        with load(data, [gs.DryBackend("dry")], n_ctx=8):
            pass
    except gs.Error:
        pass
    assert time.process_time() - start < SECONDS


with open_gguf(SMALL) as opened:
    HEAD = min(t.offset for t in opened.tensors.values())
EXTREMES = [0, 1, 0x7F, 0xFF, *((1 << n) - off for n in (31, 32, 63) for off in (0, 1)), (1 << 64) - 1]


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bits_and_extreme_numbers_give_a_model_or_a_typed_error(seed):
    rng = random.Random(seed)
    for _ in range(60):
        data = bytearray(SMALL)
        if seed % 3:
            for _ in range(rng.choice((1, 1, 1, 2, 8))):
                data[rng.randrange(HEAD)] ^= 1 << rng.randrange(8)
        else:
            at = rng.randrange(4, HEAD - 8)
            data[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES))
        attempt(bytes(data))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_cut_and_spliced_files_give_a_model_or_a_typed_error(data):
    start = data.draw(st.integers(0, HEAD))
    end = data.draw(st.integers(start, min(start + 64, HEAD)))
    attempt(SMALL[:start] + data.draw(st.binary(max_size=64)) + SMALL[end:])


def test_the_writer_refuses_what_gguf_cannot_hold():
    for metadata, tensors in (({"k": object()}, {}), ({"k": ["a", 1]}, {}), ({"k": np.zeros(2, complex)}, {}),
                              ({}, {"t": np.zeros(2, np.uint8)}), ({}, {"t": np.float32(1)})):
        with pytest.raises(TypeError):
            written(metadata, tensors)
    with pytest.raises(ValueError, match="bytes"):
        written({}, {"t": ("q8_0", (32,), bytes(33))})


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, [1 << 63, -1], (Kind.U8, 256), (Kind.I16, -40000), 1e39,
                                   [1.0, 1e39], (Kind.U32, "x")], ids=repr)
def test_metadata_that_its_type_does_not_hold_is_named(value):
    with pytest.raises(ValueError, match="metadata 'some.key': .* is no (U8|I16|U32|U64|I64|F32)"):
        write_gguf(io.BytesIO(), {"some.key": value}, {})
