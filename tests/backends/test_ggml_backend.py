"""GgmlBackend: loading, ids that name no row, packed weights, forks, closing; models within their files' logits."""

import ctypes
import gc
import importlib.util
import pickle
import signal
import sys
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import ggml_here
import numpy as np
import pytest
from forks import in_child
from interrupting import interrupted
from processes import run_python

import ggml_sched as gs
from ggml_sched.backends.cpu import run_nodes
from ggml_sched.backends.ggml import library, probe

if not ggml_here.IS_HERE:
    pytest.skip(ggml_here.WHY_NOT, allow_module_level=True)

MODELS = sorted((Path(__file__).parents[1] / "data" / "models").glob("*.gguf"))
RNG = np.random.default_rng(4)
CPUINFO = Path("/proc/cpuinfo")


# -- the library ------------------------------------------------------------------------


def test_devices_say_what_they_are():
    devices = gs.GgmlBackend.devices(ggml_here.LIBRARY)
    assert any(device.kind == "cpu" and device.name == "CPU" for device in devices)
    with gs.GgmlBackend(library=ggml_here.LIBRARY) as backend:
        assert backend.device.kind == "cpu" and backend.is_host and backend.name == "GGML" and backend.alignment >= 64
    with pytest.raises(gs.BackendError, match="no device 'warp drive'; it has: .*CPU"):
        gs.GgmlBackend("warp drive", library=ggml_here.LIBRARY)


def test_without_ggml_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(gs.BackendError, match=r"pip install 'ggml-sched\[ggml\]'"):
        gs.GgmlBackend()
    with pytest.raises(gs.BackendError, match="no libggml-base"):
        gs.GgmlBackend(library=tmp_path)


def test_importing_the_package_loads_no_ggml():
    code = "import sys, ggml_sched; assert not any('ggml_sched.backends.ggml' in name for name in sys.modules)"
    run_python("-c", code)


def test_an_installed_library_that_does_not_load_leaves_it_to_the_next(tmp_path, monkeypatch):
    with gs.GgmlBackend(library=ggml_here.LIBRARY) as backend:
        works = backend.library.folder
    (tmp_path / "libggml-base.so").write_bytes(b"not a library")
    monkeypatch.setattr(library, "installed", lambda: [str(tmp_path), works])
    assert library.load().folder == works
    monkeypatch.setattr(library, "installed", lambda: [str(tmp_path)])
    for load in (library.load, lambda: gs.GgmlBackend(library=tmp_path)):
        with pytest.raises(gs.BackendError, match="does not load"):
            load()


LOADED_BEFORE = """
import importlib.util, llama_cpp
import ggml_sched as gs
folder = importlib.util.find_spec("llama_cpp").submodule_search_locations[0] + "/lib"
with gs.GgmlBackend(n_threads=1, library=folder):
    files = {line.split()[-1] for line in open("/proc/self/maps") if "libggml-base" in line}
    assert len(files) == 1, files
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_the_libraries_that_llama_cpp_has_loaded_are_not_loaded_again():
    """Its package has copies, libggml-base.so and libggml-base.so.0, and loads the latter."""
    run_python("-c", LOADED_BEFORE)


def test_a_library_that_is_not_ggml_is_refused(tmp_path):
    import _ctypes

    for name in ("ggml-base", "ggml"):
        (tmp_path / f"lib{name}.so").symlink_to(_ctypes.__file__)
    with pytest.raises(gs.BackendError, match="do not belong together"):
        gs.GgmlBackend(library=tmp_path)


@pytest.mark.parametrize(("module", "name", "value", "match"), [
    (probe, "OLDEST", "99.1", "is older than 99.1"),
    (probe, "TENSOR_SIZE", 344, "bytes of a tensor, not 344"),
    (probe, "_differences", lambda base: ["name", "op"], "not known here: name, op"),
    (library, "NEEDED", (*library.NEEDED, "bake_a_cake"), "has no ggml_bake_a_cake"),
])
def test_a_library_that_is_older_or_lacks_a_function_is_refused(monkeypatch, module, name, value, match):
    monkeypatch.setattr(module, name, value)
    with pytest.raises(gs.BackendError, match=match):
        ggml_here.backend()


def test_types_of_other_sizes_are_not_the_librarys(monkeypatch):
    with ggml_here.backend() as backend:
        base, found = backend.library._base, library._call
    assert {int(gs.Type.Q4_0), int(gs.Type.F32)} <= set(library._types(base))
    for changed in ("ggml_type_size", "ggml_blck_size", "ggml_type_name"):
        def call(of, name, *signature, changed=changed):
            function = found(of, name, *signature)
            if name != changed:
                return function
            return lambda kind: function(kind if kind != int(gs.Type.Q4_0) else int(gs.Type.Q5_1))

        with monkeypatch.context() as patch:
            patch.setattr(library, "_call", call)
            types = library._types(base)
        assert int(gs.Type.F32) in types and (int(gs.Type.Q4_0) in types) == (changed == "ggml_blck_size")


def test_a_log_callback_of_the_process_is_kept():
    with ggml_here.backend() as backend:
        base, where = backend.library._base, backend.library.folder
    if not hasattr(base, "ggml_log_get"):
        pytest.skip("this ggml has no ggml_log_get")
    listener = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *said: None)
    theirs, now, user = ctypes.cast(listener, ctypes.c_void_p), ctypes.c_void_p(), ctypes.c_void_p()
    log_set = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(("ggml_log_set", base))
    log_get = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(("ggml_log_get", base))
    log_set(theirs, None)
    try:
        library.load(where)
        log_get(ctypes.byref(now), ctypes.byref(user))
        assert now.value == theirs.value
    finally:
        log_set(library.QUIET, None)


@pytest.mark.parametrize("n", [0, -1, 513, 1 << 40])
def test_numbers_of_threads_are_checked(n):
    with pytest.raises(ValueError, match="threads"):
        gs.GgmlBackend(n_threads=n, library=ggml_here.LIBRARY)
    with ggml_here.backend(1) as backend, pytest.raises(ValueError, match="threads"):
        backend.set_n_threads(n)


# -- ids --------------------------------------------------------------------------------


def get_rows(ctx):
    a, ids = ctx.tensor("f32", (8, 4), "a"), ctx.tensor("i32", (2,), "ids")
    return ctx.get_rows(a, ids), ids, 4


def set_rows(ctx):
    a, b, ids = ctx.tensor("f32", (8, 4), "a"), ctx.tensor("f32", (8, 2), "b"), ctx.tensor("i64", (2,), "ids")
    return ctx.set_rows(a, b, ids), ids, 4


def mul_mat_id(ctx):
    a, b, ids = ctx.tensor("f32", (8, 4, 3)), ctx.tensor("f32", (8, 1, 2)), ctx.tensor("i32", (1, 2), "ids")
    return ctx.mul_mat_id(a, b, ids), ids, 3


def add_id(ctx):
    a, b, ids = ctx.tensor("f32", (8, 1, 2)), ctx.tensor("f32", (8, 5)), ctx.tensor("i32", (1, 2), "ids")
    return ctx.add_id(a, b, ids), ids, 5


MAKERS = (get_rows, set_rows, mul_mat_id, add_id)


@pytest.fixture
def device_memory(monkeypatch):
    """ggml's CPU device, treated as one whose memory the host does not read."""
    monkeypatch.setattr(library.Library, "is_host", lambda self, buft: False)


def check_bad_id(make, bad) -> None:
    """Assert that an id is refused, wherever it is, and that the plan serves afterwards."""
    ctx = gs.Context()
    out, ids, n = make(ctx)
    ctx.set_name(out, "out")
    bad = n if bad == "n" else bad
    with ggml_here.backend() as backend:
        backend.alloc_tensors(ctx)
        plan = backend.graph_plan_create(gs.Graph(out))
        for values in ([0, bad], [bad, 0]):
            ids.set(np.array(values, np.int64 if ids.type == gs.Type.I64 else np.int32).reshape(ids.ne[1::-1]))
            with pytest.raises(gs.BackendError, match=f"'out'.*id {bad} does not name one of {n} rows"):
                backend.graph_plan_compute(plan)
        ids.set(np.array([0, n - 1]).reshape(ids.ne[1::-1]))
        backend.graph_plan_compute(plan)


@pytest.mark.parametrize(("make", "bad"), [
    *((make, bad) for make in MAKERS for bad in (-1, "n", 1 << 30, -(1 << 31))),
    *((set_rows, bad) for bad in (1 << 32, (1 << 40) + 1, -(1 << 32)))])      # whose lower half names a row
def test_an_id_that_names_no_row_is_a_typed_error(make, bad):
    check_bad_id(make, bad)


@pytest.mark.parametrize("bad", [-1, "n"])
def test_ids_in_a_devices_memory_are_fetched_and_checked(device_memory, bad):
    check_bad_id(get_rows, bad)


def test_ids_that_a_node_has_computed_are_looked_at_before_they_are_used(ctx):
    a, x = ctx.tensor("f32", (8, 4), "a"), ctx.tensor("f32", (3,), "x")
    out = ctx.scale(ctx.set_name(ctx.get_rows(a, ctx.cast(ctx.scale(x, 2.0), "i32")), "rows"), 3.0)
    with ggml_here.backend() as backend:
        backend.alloc_tensors(ctx)
        plan = backend.graph_plan_create(gs.Graph(out))
        table = np.arange(32, dtype=np.float32).reshape(4, 8)
        a.set(table)
        x.set(np.float32([0, 1.5, 0.5]))
        backend.graph_plan_compute(plan)
        assert np.array_equal(out.numpy(), 3 * table[[0, 3, 1]])
        x.set(np.float32([0, 2, 0]))
        with pytest.raises(gs.BackendError, match="'rows'.*id 4 does not name one of 4 rows"):
            backend.graph_plan_compute(plan)


def test_an_order_of_nans_is_an_order(ctx):
    x, table = ctx.tensor("f32", (300, 4)), ctx.tensor("f32", (1, 300, 4))
    order = ctx.argsort(x, "desc")
    out = ctx.get_rows(table, ctx.view_2d(order, 40, 4, order.nb[1]))
    values = RNG.normal(size=(4, 300)).astype(np.float32)
    values[RNG.random((4, 300)) < 0.7] = np.nan
    values[2] = np.nan
    with ggml_here.backend() as backend:
        backend.alloc_tensors(ctx)
        x.set(values)
        table.set(np.zeros((4, 300, 1)))
        backend.graph_compute(gs.Graph(out))
        assert np.array_equal(order.numpy(), np.negative(values).argsort(axis=-1, kind="stable"))


# -- models -------------------------------------------------------------------------------


def nmse_of_model(path, backends) -> float:
    """The error of a model's logits, those of its prompt and of single tokens."""
    reference = np.load(path.with_suffix(".logits.npz"))
    tokens, n_prompt = reference["tokens"], int(reference["n_prompt"])
    want = reference["logits"].astype(np.float64)
    with gs.llama.load(path, backends, n_ctx=64) as model:
        got = np.concatenate([model.eval(tokens[:n_prompt])] + [model.eval([t]) for t in tokens[n_prompt:]])
    return ((got - want) ** 2).sum() / (want**2).sum()


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("n_threads, repack, mixed", [(1, True, False), (2, True, False), (2, False, False),
                                                      (2, True, True)])
def test_logits_are_those_of_the_files(path, n_threads, repack, mixed):
    backends = [ggml_here.backend(n_threads, repack=repack)] + [gs.CpuBackend(1)] * mixed
    type = path.stem.split("-")[-1]
    # Where the processor has AVX512-FP16, a ggml that was built for it sums products of f16 in f16: 1e-5 off.
    sums_in_f16 = type == "f16" and CPUINFO.exists() and "avx512_fp16" in CPUINFO.read_text()
    assert nmse_of_model(path, backends) < (1e-3 if "q" in type else 3e-5 if sums_in_f16 else 1e-6)


@pytest.mark.parametrize("name", ["tiny-llama-q4_0", "tiny-qwen3-f32"])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_device_whose_memory_the_host_does_not_read(device_memory, name, mixed):
    backends = [ggml_here.backend(), *[gs.CpuBackend(1)] * mixed]
    assert not backends[0].is_host and backends[0].buffer_from_ptr is None
    assert nmse_of_model(next(path for path in MODELS if path.stem == name), backends) < 1e-3
    assert backends[0].used == 0


@pytest.mark.parametrize("closed", [False, True])
def test_memory_of_a_device_is_freed_once_with_its_buffer_closed_or_not(device_memory, closed):
    with ggml_here.backend() as backend:
        device, freed = backend._device, []
        backend._device = SimpleNamespace(
            allocate=device.allocate, base_of=device.base_of,
            release=lambda handle: (freed.append(handle), device.release(handle)))
        buffer = backend.alloc_buffer(64)
        handle = buffer.handle
        assert handle and backend.used == 64
        if closed:
            buffer.close()
            assert freed == [handle] and backend.used == 0
        del buffer
        gc.collect()
        assert freed == [handle] and backend.used == 0
        backend._device = device


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")     # an interrupt of a finalizer
def test_an_interrupt_leaves_no_memory_of_a_device_without_an_owner(device_memory):
    """Wherever it comes: what ggml gave is given back with the last reference, once.  Functions of C stand for ggml's,
    as no signal handler runs in these."""
    with ggml_here.backend() as backend:
        device = backend._device
        for at in count(1):
            made, freed = {}, []
            backend._device = SimpleNamespace(allocate=made.setdefault, base_of=abs, release=freed.append)
            where = interrupted(lambda: backend.alloc_buffer(64).close(), at, "backends/ggml")
            gc.collect()
            assert list(made.values()) == freed and backend.used == 0, where
            if where is None:
                break
        assert freed == [64]
        backend._device = device


def test_memory_of_a_device_is_used_inside_its_buffer_while_that_is_open(device_memory):
    with ggml_here.backend() as backend:
        buffer = backend.alloc_buffer(64)
        buffer.write(8, memoryview(bytes(range(8))))
        out = bytearray(8)
        buffer.read(8, memoryview(out))
        assert out == bytes(range(8))
        for offset, size in ((-1, 8), (57, 8), (65, 0), (0, 65)):
            for use in (buffer.write, buffer.read):
                with pytest.raises(gs.BackendError, match="outside a buffer of 64 bytes"):
                    use(offset, memoryview(bytearray(size)))
        buffer.close()
        for use in (buffer.write, buffer.read):
            with pytest.raises(gs.BackendError, match="is closed"):
                use(0, memoryview(bytearray(8)))
        assert backend.used == 0


# -- packed weights -----------------------------------------------------------------------


def packed_world(backend, usage="weights"):
    weights, ctx = gs.Context("weights"), gs.Context()
    w = weights.tensor("q4_0", (256, 64), "w")
    buffer = backend.alloc_tensors(weights, usage)
    w.set(RNG.normal(size=(64, 256)).astype(np.float32))
    x = ctx.tensor("f32", (256, 3), "x", input=True)
    return w, buffer, ctx, x, ctx.set_output(ctx.mul_mat(w, x))


def error_of_product(out, w, x) -> float:
    return ggml_here.error_of(out.numpy(), x.numpy().astype(np.float64) @ w.numpy().T.astype(np.float64))


def test_a_packed_weight_follows_its_data_and_ends_with_its_buffer():
    with ggml_here.backend() as backend, gs.Scheduler([backend]) as sched:
        w, buffer, ctx, x, out = packed_world(backend)
        row = ctx.set_output(ctx.get_rows(w, ctx.tensor("i32", (1,), "id", input=True)))
        graph = gs.Graph(out, row)
        sched.alloc(graph)
        x.set(RNG.normal(size=(3, 256)).astype(np.float32))
        row.src[1].set(np.int32([5]))
        for _ in range(2):
            sched.compute(graph)
            assert not backend.packed_bufts or any(buffer.packs.values())
            assert error_of_product(out, w, x) < 1e-3
            assert np.array_equal(row.numpy(), w.numpy()[5])
            w.set(RNG.normal(size=(64, 256)).astype(np.float32))
        buffer.close()
        assert not buffer.packs
        with pytest.raises(gs.Error):
            sched.compute(graph)


def test_a_packed_weight_follows_what_is_written_to_its_buffer():
    with ggml_here.backend() as backend, gs.Scheduler([backend]) as sched:
        w, buffer, _, x, out = packed_world(backend)
        graph = gs.Graph(out)
        sched.alloc(graph)
        x.set(RNG.normal(size=(3, 256)).astype(np.float32))
        sched.compute(graph)
        first = out.numpy().copy()
        kept = bytearray(w.nbytes)
        buffer.read(w.offset, memoryview(kept))
        buffer.clear()
        sched.compute(graph)
        assert not out.numpy().any()
        buffer.write(w.offset, memoryview(kept))
        sched.compute(graph)
        assert first.any() and np.array_equal(out.numpy(), first)


@pytest.fixture
def written_weight():
    """(backend, w, fresh, x, a node that copies fresh to w, the product of that node and x, the product of w and x)"""
    with ggml_here.backend() as backend:
        weights, ctx = gs.Context(), gs.Context()
        w, fresh = weights.tensor("q4_0", (256, 64), "w"), weights.tensor("f32", (256, 64), "fresh")
        x = weights.tensor("f32", (256, 2), "x")
        copied = ctx.cpy(fresh, w)
        products = ctx.mul_mat(copied, x), ctx.mul_mat(w, x)
        with backend.alloc_tensors(weights), backend.alloc_tensors(ctx):
            for t in (w, fresh, x):
                t.set(RNG.normal(size=t.ne[1::-1]).astype(np.float32))
            yield backend, w, fresh, x, copied, *products


def test_what_a_node_writes_to_is_never_packed(written_weight):
    backend, w, _, x, _, out, again = written_weight
    w.set(np.zeros((64, 256)))
    plan = backend.graph_plan_create(gs.Graph(again))
    backend.graph_plan_compute(plan)
    assert not again.numpy().any()
    backend.graph_compute(gs.Graph(out))
    backend.graph_plan_compute(plan)        # packed before the write, and not stale
    assert error_of_product(out, w, x) < 1e-3 and error_of_product(again, w, x) < 1e-3


def test_a_weight_that_a_node_before_writes_is_read_as_it_is_then(written_weight):
    backend, w, _, x, copied, _, out = written_weight
    backend.graph_compute(gs.GraphView([out]))      # packed, where the backend packs
    before = out.numpy()
    backend.graph_compute(gs.GraphView([copied, out]))
    want = x.numpy().astype(np.float64) @ w.numpy().T.astype(np.float64)
    assert error_of_product(out, w, x) < 1e-3 < ggml_here.error_of(before, want)


def test_other_memory_is_not_packed():
    with ggml_here.backend() as backend, gs.Scheduler([backend]) as sched:
        _, buffer, _, x, out = packed_world(backend, "any")
        sched.alloc(gs.Graph(out))
        x.set(np.zeros((3, 256)))
        sched.compute(gs.Graph(out))
        assert not buffer.packs


def test_pages_of_a_file_come_back(ctx, tmp_path):
    w, x = ctx.tensor("q4_0", (256, 640), "w"), ctx.tensor("f32", (256, 1), "x")
    out, row = ctx.mul_mat(w, x), ctx.get_rows(w, ctx.tensor("i32", (1,), "id"))
    blocks = RNG.integers(0, 255, w.nbytes).astype(np.uint8)
    blocks.reshape(-1, 18)[:, 1] = 0x2C
    blocks.tofile(tmp_path / "weights")
    mapped = np.memmap(tmp_path / "weights", np.uint8, "r")
    with ggml_here.backend() as backend:
        buffer = backend.buffer_from_ptr(mapped, usage="weights")
        buffer.file_backed = True
        gs.bind_resident(w, buffer, 0)
        backend.alloc_tensors(ctx)
        x.set(RNG.normal(size=256).astype(np.float32))
        row.src[1].set(np.int32([639]))
        backend.graph_compute(gs.Graph(out, row))
        assert np.array_equal(buffer.memory, blocks)
        want = w.numpy().astype(np.float64) @ x.numpy().astype(np.float64)
        assert ggml_here.error_of(out.numpy(), want) < 1e-3 and np.array_equal(row.numpy(), w.numpy()[639])


# -- memory that tensors share ------------------------------------------------------------


def side_by_side(ctx: gs.Context, buffer: gs.Buffer) -> None:
    at = 0
    for t in ctx.tensors:
        if t.view_src is None:
            gs.bind_resident(t, buffer, at)
            at += -(-t.nbytes // 64) * 64


def test_ids_that_a_tensor_over_them_has_overwritten_are_checked():
    def attack():
        ctx = gs.Context()
        table, ids, over, new = (ctx.tensor("f32", (8, 4)), *(ctx.tensor("i32", (2,)) for _ in range(3)))
        write, read = ctx.cpy(new, over), ctx.get_rows(table, ids)
        with ggml_here.backend() as backend, backend.alloc_buffer(4096) as buffer:
            side_by_side(ctx, buffer)
            gs.bind_resident(over, buffer, ids.offset)
            ids.set(np.int32([0, 1]))
            new.set(np.int32([2, 1 << 30]))
            with pytest.raises(gs.BackendError, match=f"id {1 << 30} does not name one of 4 rows"):
                backend.graph_compute(gs.GraphView([write, read]))

    assert in_child(attack) == 0


def test_results_of_argsort_are_checked_only_where_they_may_be_out_of_range():
    """What ARGSORT gives is not looked at where it must be in range, and only there."""
    def attack():
        ctx = gs.Context()
        scores, table, longer = ctx.tensor("f32", (6,)), ctx.tensor("f32", (8, 4)), ctx.tensor("f32", (8, 6))
        order, given = ctx.argsort(scores), ctx.tensor("i32", (6,))
        rows, too_few, changed = ctx.get_rows(longer, order), ctx.get_rows(table, order), ctx.cpy(given, order)
        with ggml_here.backend() as backend:
            backend.alloc_tensors(ctx)
            scores.set(np.float32([3, 1, 2, 0, 5, 4]))
            longer.set(np.arange(48, dtype=np.float32))
            given.set(np.int32([0, 1, 2, 1 << 20, 3, 0]))
            backend.graph_compute(gs.GraphView([order, rows]))
            assert rows.numpy()[:, 0].tolist() == [24, 8, 16, 0, 40, 32]
            with pytest.raises(gs.BackendError, match="id 5 does not name one of 4 rows"):
                backend.graph_compute(gs.GraphView([order, too_few]))
            with pytest.raises(gs.BackendError, match=f"id {1 << 20} does not name one of 6 rows"):
                backend.graph_compute(gs.GraphView([order, changed, rows]))

    assert in_child(attack) == 0


def test_a_compute_that_failed_half_way_leaves_no_packed_weight_of_before(ctx):
    weight, new = ctx.tensor("q4_0", (64, 32)), ctx.tensor("q4_0", (64, 32))
    x, table, given = ctx.tensor("f32", (64,)), ctx.tensor("f32", (8, 4)), ctx.tensor("i32", (2,))
    y, change, ids = ctx.mul_mat(weight, x), ctx.cpy(new, weight), ctx.dup(given)
    read = ctx.get_rows(table, ids)
    with ggml_here.backend(1) as backend, backend.alloc_buffer(1 << 16) as buffer:
        buffer.usage = "weights"
        side_by_side(ctx, buffer)
        values = RNG.standard_normal((32, 64)).astype(np.float32)
        weight.set(values)
        new.set(-3 * values)
        x.set(np.ones(64))
        given.set(np.int32([0, 9]))
        backend.graph_compute(gs.GraphView([y]))
        before = np.array(y.numpy())
        with pytest.raises(gs.BackendError, match="id 9"):
            backend.graph_compute(gs.GraphView([change, ids, read]))
        backend.graph_compute(gs.GraphView([y]))
        np.testing.assert_allclose(y.numpy(), -3 * before, rtol=1e-2, atol=1e-2)


# -- threads, forks, ends -----------------------------------------------------------------


def product(backend):
    ctx = gs.Context()
    a, b = ctx.tensor("f32", (256, 128)), ctx.tensor("f32", (256, 9))
    out = ctx.scale(ctx.mul_mat(a, b), 0.5)
    backend.alloc_tensors(ctx)
    a.set(RNG.normal(size=(128, 256)).astype(np.float32))
    b.set(RNG.normal(size=(9, 256)).astype(np.float32))
    return out


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_a_fork_after_use_computes_in_both_processes(n_threads):
    with ggml_here.backend(n_threads) as backend:
        out = product(backend)
        plan = backend.graph_plan_create(gs.Graph(out))
        backend.graph_plan_compute(plan)
        want = out.numpy()

        def again():
            out.set(np.zeros(want.shape))
            backend.graph_plan_compute(plan)
            assert np.array_equal(out.numpy(), want)
            with ggml_here.backend(n_threads) as other:
                result = product(other)
                other.graph_compute(gs.Graph(result))
            assert in_child(lambda: backend.graph_plan_compute(plan)) == 0

        assert in_child(again) == 0
        out.set(np.zeros(want.shape))
        backend.graph_plan_compute(plan)
        assert np.array_equal(out.numpy(), want)


def test_an_interrupt_waits_for_what_computes_after_a_fork(monkeypatch):
    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    def compute_twice():
        ctx = gs.Context()
        a, b = ctx.tensor("f32", (512, 512)), ctx.tensor("f32", (512, 256))
        node = b
        for _ in range(300):
            node = ctx.mul_mat(a, node)
        with ggml_here.backend(2) as backend, backend.alloc_tensors(ctx):
            monkeypatch.setattr(backend.library, "uses_openmp", True)
            a.set(RNG.standard_normal((512, 512)).astype(np.float32) / 512**0.5)
            b.set(RNG.standard_normal((256, 512)).astype(np.float32))
            plan = backend.graph_plan_create(gs.Graph(node))
            backend.graph_plan_compute(plan)
            want = node.numpy().tobytes()
            node.buffer.memory[node.offset :][: node.nbytes] = 0
            signal.signal(signal.SIGVTALRM, interrupt)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.01)
            with pytest.raises(Interrupt):
                backend.graph_plan_compute(plan)
            assert node.numpy().tobytes() == want

    assert in_child(compute_twice) == 0


def test_threads_may_compute_on_backends_of_their_own():
    results = []

    def work():
        with ggml_here.backend(2) as backend:
            out = product(backend)
            plan = backend.graph_plan_create(gs.Graph(out))
            for _ in range(50):
                backend.graph_plan_compute(plan)
            results.append(np.isfinite(out.numpy()).all())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


def test_the_number_of_threads_may_change_under_a_plan():
    with ggml_here.backend(1) as backend:
        out = product(backend)
        plan = backend.graph_plan_create(gs.Graph(out))
        backend.graph_plan_compute(plan)
        want = out.numpy()
        for n in (3, 2, 1):
            backend.set_n_threads(n)
            assert backend.n_threads == n
            backend.graph_plan_compute(plan)
            assert np.array_equal(out.numpy(), want)


def test_steady_is_deprecated():
    with pytest.warns(DeprecationWarning, match="steady"):
        ggml_here.backend(1, steady=True).close()


def test_a_plan_uses_as_many_threads_as_there_are_now():
    with ggml_here.backend(1) as backend, gs.Context() as ctx:
        x = ctx.tensor("f32", (4096, 8), name="x")
        out = ctx.soft_max(x)
        backend.alloc_tensors(ctx)
        x.set(np.zeros((8, 4096), np.float32))
        plan = backend.graph_plan_create(gs.Graph(out))
        backend.graph_plan_compute(plan)
        before = backend._device.work_size
        backend.set_n_threads(4)
        backend.graph_plan_compute(plan)
        assert backend._device.work_size >= before + 3 * 4096 * 4       # a row for each thread


def test_after_an_end_there_are_errors():
    backend = ggml_here.backend()
    out = product(backend)
    plan, freed = (backend.graph_plan_create(gs.Graph(out)) for _ in range(2))
    backend.graph_plan_free(freed)
    backend.graph_plan_free(freed)
    with pytest.raises(gs.BackendError, match="freed"):
        backend.graph_plan_compute(freed)
    out.buffer.close()
    with pytest.raises(gs.PlacementError, match="closed"):
        backend.graph_plan_compute(plan)
    backend.close()
    for use in (lambda: backend.graph_plan_compute(plan), lambda: backend.alloc_buffer(8),
                lambda: backend.graph_plan_create(gs.Graph(out))):
        with pytest.raises(gs.BackendError, match="closed"):
            use()


def test_what_ggml_does_not_compute_is_a_typed_error_that_names_it(ctx):
    out = ctx.set_name(ctx.silu(ctx.transpose(ctx.tensor("f32", (8, 4)))), "strange")
    with ggml_here.backend() as backend:
        backend.alloc_tensors(ctx)
        assert not backend.supports_op(out)
        with pytest.raises(gs.UnsupportedOp, match="'strange'"):
            backend.graph_compute(gs.Graph(out))
        with pytest.raises(gs.UnsupportedOp) as caught:
            other = gs.Context()
            gs.Scheduler([backend]).plan(gs.Graph(other.silu(other.transpose(other.tensor("f32", (8, 4))))))
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), gs.UnsupportedOp)


def test_memory_that_may_not_be_written_is_refused(ctx):
    memory = np.zeros(4096, np.uint8)
    memory.flags.writeable = False
    out = ctx.set_name(ctx.scale(ctx.tensor("f32", (8,)), 2.0), "out")
    with ggml_here.backend() as backend:
        for i, t in enumerate(ctx.tensors):
            gs.bind_resident(t, backend.buffer_from_ptr(memory), 64 * i)
        with pytest.raises(gs.BackendError, match="'out'.*read-only"):
            backend.graph_compute(gs.Graph(out))


def test_tensors_without_an_address_here_are_named(ctx):
    x, y = ctx.tensor("f32", (16,), "x"), ctx.tensor("f32", (16,), "y")
    out = ctx.set_name(ctx.add(x, y), "sum")
    with ggml_here.backend() as backend:
        mine, other = backend.alloc_buffer(4096), gs.DryBackend("elsewhere").alloc_buffer(64)
        gs.bind_resident(x, mine, 0)
        for buffer, match in ((None, "'y' has no address"), (other, "'y' is on backend 'elsewhere'")):
            if buffer is not None:
                gs.bind_resident(y, buffer, 0)
            gs.bind_resident(out, mine, 64)
            with pytest.raises(gs.PlacementError, match=f"'sum'.*{match}"):
                backend.graph_compute(gs.GraphView([out]))


def test_a_result_over_its_source_is_computed_as_if_read_before_written(ctx):
    a = ctx.tensor("f32", (8, 8), "a")
    flipped = ctx.cpy(ctx.transpose(a), a)
    shifted = ctx.cpy(ctx.view_1d(a, 56), ctx.view_1d(a, 56, 32))
    values = RNG.normal(size=(8, 8)).astype(np.float32)
    with ggml_here.backend() as backend:
        backend.alloc_tensors(ctx)
        for node, want in ((flipped, values.T), (shifted, np.concatenate([values[:1], values[:7]]))):
            a.set(values)
            backend.graph_compute(gs.GraphView([node]))
            assert np.array_equal(a.numpy(), want)


def test_nothing_is_printed():
    code = ("import sys, numpy as np; sys.path.insert(0, sys.argv[1]); import ggml_here, ggml_sched as gs\n"
            "b = ggml_here.backend(); c = gs.Context(); w = c.tensor('q4_0', (256, 64)); x = c.tensor('f32', (256,))\n"
            "y = c.mul_mat(w, x); b.alloc_tensors(c); w.set(np.ones((64, 256))); x.set(np.ones(256))\n"
            "b.graph_compute(gs.Graph(y)); assert y.numpy().all()")
    done = run_python("-c", code, str(Path(ggml_here.__file__).parent))
    assert done.stdout == done.stderr == ""


def test_a_subclass_that_overrides_compute_node_computes_by_it():
    class ByNode(gs.GgmlBackend):
        def compute_node(self, node):
            seen.append(node)
            run_nodes([node], lambda buffer: buffer.memory)

    seen = []
    ctx = gs.Context()
    x = ctx.tensor("f32", 8, "x", input=True)
    graph = gs.Graph(ctx.set_output(ctx.sqr(ctx.neg(x))))
    with ByNode(library=ggml_here.LIBRARY) as backend, gs.Scheduler([backend]) as scheduler:
        scheduler.alloc(graph)
        x.set(np.arange(8, dtype=np.float32))
        scheduler.compute(graph)
        assert seen == list(graph.nodes) and graph.nodes[-1].numpy().tolist() == [k * k for k in range(8)]
