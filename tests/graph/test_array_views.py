"""Arrays over the memory of tensors (buffer protocol, `__array__`, DLPack), and arrays of other libraries in `set`."""

import contextlib
import ctypes
import gc
import importlib.util

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.graph import _dlpack as dlpack

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4) - 5


@pytest.fixture
def cpu():
    with gs.CpuBackend(n_threads=1) as backend:
        yield backend


def placed(cpu, type="f32", ne=(4, 3), values=VALUES):
    context = gs.Context("weights")
    tensor = context.tensor(type, ne, "w")
    cpu.alloc_tensors(context)
    tensor.set(values)
    return tensor


def library(name):
    """PyTorch, JAX, or ml_dtypes: `pip install` them to have these tests run."""
    return pytest.importorskip(name)


# -- views --------------------------------------------------------------------------------------------


VIEWERS = {
    "asarray": np.asarray,
    "asarray without a copy": lambda t: np.asarray(t, copy=False),
    "memoryview": lambda t: np.asarray(memoryview(t)),
    "DLPack": np.from_dlpack,
}


@pytest.mark.parametrize("viewer", VIEWERS.values(), ids=VIEWERS)
@pytest.mark.parametrize("type", ["f32", "f16", "i32", "i64", "i8"])
def test_a_weight_is_viewed_without_a_copy(cpu, viewer, type):
    w = placed(cpu, type, values=VALUES.astype(np.int32) if type.startswith("i") else VALUES)
    array = viewer(w)
    assert array.shape == (3, 4) and array.tolist() == VALUES.tolist() and not array.flags.writeable
    w.set(np.full((3, 4), 7, array.dtype))
    assert array.tolist() == np.full((3, 4), 7).tolist()


@pytest.mark.parametrize("viewer", VIEWERS.values(), ids=VIEWERS)
def test_a_view_with_gaps_has_the_strides_of_its_tensor(cpu, viewer):
    w = placed(cpu)
    ctx = gs.Context()
    columns = ctx.view_2d(w, 2, 3, 16, 4)
    assert viewer(columns).tolist() == VALUES[:, 1:3].tolist()
    assert viewer(ctx.transpose(w)).tolist() == VALUES.T.tolist()


@pytest.mark.parametrize("viewer", [*VIEWERS.values(), gs.Tensor.__array__, lambda t: memoryview(t).obj],
                         ids=[*VIEWERS, "__array__", "the object of a memoryview"])
def test_a_view_can_not_be_made_writable(cpu, viewer):
    array = viewer(placed(cpu))
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_a_view_outlives_its_buffer_and_its_backend():
    cpu = gs.CpuBackend(n_threads=1)
    w = placed(cpu)
    views = [view(w) for view in VIEWERS.values()]
    w.buffer.close()
    cpu.close()
    del w
    gc.collect()
    assert all(view.tolist() == VALUES.tolist() for view in views)


def test_a_capsule_that_nobody_takes_frees_its_tensor(cpu):
    w = placed(cpu)
    memory = w.buffer.memory
    for versioned in (None, (1, 0)):
        capsule = w.__dlpack__(max_version=versioned, copy=versioned is None)
        before = gc.get_referrers(memory)
        del capsule
        assert len(gc.get_referrers(memory)) <= len(before)


def result(cpu):
    """A scheduler, the graph that it has computed, and its output."""
    ctx = gs.Context()
    x = ctx.tensor("f32", (4, 3), "x", input=True)
    y = ctx.set_name(ctx.set_output(ctx.relu(x)), "y")
    scheduler, graph = gs.Scheduler([cpu]), gs.Graph(y)
    scheduler.alloc(graph)
    x.set(VALUES)
    scheduler.compute(graph)
    return scheduler, graph, y


@pytest.mark.parametrize("viewer", [VIEWERS["asarray without a copy"], memoryview,
                                    lambda t: np.from_dlpack(t, copy=False)], ids=["asarray", "memoryview", "DLPack"])
def test_memory_that_later_computes_use_again_is_not_viewed(cpu, viewer):
    scheduler, graph, y = result(cpu)
    with scheduler:
        for tensor in (*graph.leafs, y):
            with pytest.raises(gs.HazardError, match=f"'{tensor.name}'.*later computes use its memory again"):
                viewer(tensor)


@pytest.mark.parametrize("viewer", [np.asarray, np.from_dlpack], ids=["asarray", "DLPack"])
def test_a_result_is_copied(cpu, viewer):
    scheduler, graph, y = result(cpu)
    with scheduler:
        first = viewer(y)
        graph.leafs[0].set(-VALUES)
        scheduler.compute(graph)
        assert first.tolist() == np.maximum(VALUES, 0).tolist()
        assert viewer(y).tolist() == np.maximum(-VALUES, 0).tolist()


def test_bf16_and_quantised_types_are_copied_as_floats(cpu):
    b = placed(cpu, "bf16")
    q = placed(cpu, "q8_0", (32, 1), np.arange(32, dtype=np.float32).reshape(1, 32))
    for w in (b, q):
        assert np.asarray(w).dtype == np.float32 and np.array_equal(np.asarray(w), w.numpy())
        with pytest.raises(ValueError, match="NumPy has no"):
            np.asarray(w, copy=False)
        with pytest.raises(BufferError, match="NumPy has no"):
            memoryview(w)
    with pytest.raises(BufferError, match="NumPy has no q8_0"):
        q.__dlpack__(max_version=(1, 0), copy=False)


@pytest.mark.parametrize("type", ["f32", "f16", "i64", "bf16", "q8_0"])
@pytest.mark.parametrize("ne", [(), (32,), (32, 3), (32, 1, 2), (32, 2, 1, 1)])
def test_shape_and_dtype_are_those_of_the_array(cpu, type, ne):
    ctx = gs.Context()
    t = ctx.tensor(type, ne or 32)
    shape, dtype = t.shape, t.dtype         # before it has memory
    cpu.alloc_tensors(ctx)
    array = t.numpy()
    assert (array.shape, array.dtype) == (shape, dtype) == (t.shape, t.dtype)


def test_notebooks_show_the_data_or_why_there_is_none(cpu):
    ctx = gs.Context()
    t = ctx.tensor("f32", (2, 2), "<t>")
    assert t._repr_html_().startswith("<pre>&lt;Tensor ") and "has no address" in t._repr_html_()
    cpu.alloc_tensors(ctx)
    t.set(np.float32([[1, 2], [3, 4]]))
    assert "[[1. 2.]\n [3. 4.]]</pre>" in t._repr_html_()
    big = ctx.tensor("f32", (1 << 21,))
    cpu.alloc_tensors(ctx)
    assert "2097152 elements: numpy() reads them" in big._repr_html_()


def test_a_tensor_without_memory_has_no_array():
    w = gs.Context().tensor("f32", (4, 3), "w")
    for viewer in (np.asarray, memoryview, np.from_dlpack):
        with pytest.raises(gs.PlacementError, match="'w'"):
            viewer(w)


class Device(gs.CpuBackend):
    """Its memory is not the CPU's."""

    is_host = False


class Closing(gs.CpuBackend):
    """Closes a buffer while it is viewed, as another thread might."""

    buffer = None

    @property
    def is_host(self):
        if self.buffer is not None:
            self.buffer.close()
        return True


@pytest.mark.parametrize("viewer", [VIEWERS["asarray without a copy"], memoryview, VIEWERS["DLPack"]],
                         ids=["asarray", "memoryview", "DLPack"])
def test_a_view_of_a_buffer_that_is_closed_meanwhile_is_whole_or_refused(viewer):
    with Closing(1, "closing") as closing:
        w = placed(closing)
        closing.buffer = w.buffer
        with contextlib.suppress(gs.PlacementError):
            assert np.asarray(viewer(w)).tolist() == VALUES.tolist()


def test_memory_of_a_device_is_copied_and_not_viewed():
    with Device(1, "device") as device:
        w = placed(device)
        assert np.asarray(w).tolist() == np.from_dlpack(w).tolist() == VALUES.tolist()
        for viewer in (VIEWERS["asarray without a copy"], memoryview):
            with pytest.raises(gs.BackendError, match="'device' has no memory that the CPU reads"):
                viewer(w)


def test_numpy_converts_and_copies_as_it_is_asked(cpu):
    w = placed(cpu)
    assert np.asarray(w, np.float64).dtype == np.float64
    copied = np.array(w)
    assert copied.flags.writeable and not np.shares_memory(copied, np.asarray(w))


def test_dlpack_refuses_streams_devices_and_read_only_memory_of_old_consumers(cpu):
    w = placed(cpu)
    with pytest.raises(BufferError, match="stream 1"):
        w.__dlpack__(stream=1)
    with pytest.raises(BufferError, match=r"device \(2, 0\)"):
        w.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="read-only"):
        w.__dlpack__(copy=False)
    for copy in (None, True):
        taken = np.asarray(dlpack.take(Old(w.__dlpack__(copy=copy))))
        assert taken.flags.writeable and taken.tolist() == VALUES.tolist()
        assert not np.shares_memory(taken, np.asarray(w))


def test_an_uneven_stride_is_refused():
    with pytest.raises(BufferError, match="6 bytes are no multiple of 32 bits"):
        dlpack.export(np.zeros(3, np.float32), (2,), (6,), "f", 32, True)


# -- set ----------------------------------------------------------------------------------------------


class Old:
    """A producer of DLPack before 1.0."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, stream=None):
        return self.capsule

    def __dlpack_device__(self):
        return dlpack.HOST


class Gives:
    """An object that gives an array by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("given", [
    VALUES.tolist(),
    memoryview(VALUES),
    bytearray(VALUES.astype(np.int8).tobytes()),
    Gives(VALUES.copy()),
    Gives(VALUES.astype(np.float64)),
    Gives(VALUES.T.copy().T),
], ids=["lists", "memoryview", "bytearray", "DLPack", "DLPack f64", "DLPack strided"])
def test_set_takes_what_gives_an_array(cpu, given):
    w = placed(cpu, values=np.zeros(12, np.float32))
    w.set(given)
    expected = VALUES % 256 if isinstance(given, bytearray) else VALUES
    assert w.numpy().tolist() == expected.tolist()


def test_set_takes_another_tensor(cpu):
    for type in ("f32", "bf16", "f16"):
        w = placed(cpu, values=np.zeros(12, np.float32))
        w.set(placed(cpu, type))
        assert w.numpy().tolist() == VALUES.tolist()


def test_set_takes_a_read_only_and_an_empty_dlpack(cpu):
    w = placed(cpu, values=np.zeros(12, np.float32))
    frozen = VALUES.copy()
    frozen.flags.writeable = False
    w.set(Gives(frozen))
    assert w.numpy().tolist() == VALUES.tolist()
    empty = placed(cpu, ne=(0, 1), values=np.zeros(0, np.float32))
    empty.set(Gives(np.zeros((1, 0), np.float32)))


def test_set_reports_cuda_memory_without_cupy(cpu):
    class Cuda:
        __cuda_array_interface__ = {"shape": (12,), "typestr": "<f4", "data": (1, False), "version": 3}

    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed: tests/cupy has such arrays")
    w = placed(cpu)
    with pytest.raises(TypeError, match="'w'.*copied by CuPy, which is not installed"):
        w.set(Cuda())
    assert w.numpy().tolist() == VALUES.tolist()


class Managed(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = [("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("offset", ctypes.c_uint64)]


def capsule_of(shape, strides=None):
    """A capsule that NumPy did not check, and the object that keeps it alive."""
    held = [(ctypes.c_int64 * len(values))(*values) for values in (shape, strides or ())]
    managed = Managed(version=(1, 0), device=(1, 0), code=2, bits=32, lanes=1, ndim=len(shape),
                      shape=ctypes.addressof(held[0]), strides=ctypes.addressof(held[1]) if strides else None)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(managed), b"dltensor_versioned", None), (held, managed)


@pytest.mark.parametrize("field, value, message", [
    ("version", (2, 0), "gives DLPack 2.0; versions up to 1"),
    ("device", (2, 0), "device type 2, which the CPU does not read"),
    ("lanes", 4, "4 lanes"),
    ("code", 99, "type code 99"),
    ("bits", 4, "4 bits"),
])
def test_a_capsule_that_can_not_be_read_is_refused(field, value, message):
    capsule, (_, managed) = capsule_of(())
    setattr(managed, field, value if isinstance(value, int) else type(getattr(managed, field))(*value))
    with pytest.raises(BufferError, match=message):
        dlpack.take(Old(capsule))


def test_a_capsule_is_taken_once_and_must_be_one(cpu):
    w = placed(cpu)
    for capsule in (w.__dlpack__(max_version=(1, 0)), w.__dlpack__()):
        w.set(Old(capsule))
        with pytest.raises(BufferError, match="consumed before"):
            w.set(Old(capsule))
    with pytest.raises(BufferError, match="Old.__dlpack__ gives 3: no DLPack capsule"):
        w.set(Old(3))
    assert w.numpy().tolist() == VALUES.tolist()


@pytest.mark.parametrize("shape, strides", [((1 << 40, 1 << 40), None), ((2, 2), (1 << 62, 1)), ((-1, 4), None)])
def test_extents_and_strides_beyond_all_memory_are_refused(cpu, shape, strides):
    w = placed(cpu)
    capsule, _alive = capsule_of(shape, strides)
    with pytest.raises((ValueError, OverflowError)):
        w.set(Old(capsule))
    assert w.numpy().tolist() == VALUES.tolist()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4", "uint4"])
def test_set_takes_the_dtypes_of_ml_dtypes(cpu, name):
    dtype = np.dtype(getattr(library("ml_dtypes"), name))
    given = np.array([[0, 1, 2, 3]] * 3, dtype)
    for type in ("f32", "bf16", "f16", *(("i32",) if "int" in name else ())):
        w = placed(cpu, type, values=np.zeros(12, np.int32 if type == "i32" else np.float32))
        w.set(given)
        assert w.numpy().tolist() == [[0, 1, 2, 3]] * 3


# -- other libraries ----------------------------------------------------------------------------------


def test_pytorch_reads_and_gives_tensors(cpu):
    torch = library("torch")
    for type in ("f32", "f16", "bf16", "i32"):
        values = VALUES.astype(np.int32) if type == "i32" else VALUES
        w = placed(cpu, type, values=values)
        seen = torch.from_dlpack(w)
        assert str(seen.dtype) == {"f32": "torch.float32", "f16": "torch.float16", "bf16": "torch.bfloat16",
                                   "i32": "torch.int32"}[type]
        assert seen.tolist() == VALUES.tolist()
        other = placed(cpu, type, values=values * 0)
        other.set(seen)
        assert other.numpy().tolist() == VALUES.tolist()
        w.set(values * 2)
        assert seen.tolist() == (VALUES * 2).tolist()       # a view
    with pytest.raises(BufferError):
        w.set(torch.ones(12, requires_grad=True))


def test_jax_reads_and_gives_arrays(cpu):
    jax = library("jax")
    for type in ("f32", "f16", "bf16", "i32"):
        w = placed(cpu, type, values=VALUES.astype(np.int32) if type == "i32" else VALUES)
        seen = jax.dlpack.from_dlpack(w)
        assert seen.tolist() == VALUES.tolist()
        other = placed(cpu, type, values=VALUES.astype(np.int32) * 0)
        other.set(seen * 1)
        assert other.numpy().tolist() == VALUES.tolist()
