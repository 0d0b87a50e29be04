# cython: language_level=3
"""Exchange of arrays by DLPack, for `Tensor.__dlpack__` and `Tensor.set`.

NumPy exchanges arrays this way, too, but has no bf16, which PyTorch, JAX and ggml have.  Layout of the structs and the
protocol: https://dmlc.github.io/dlpack/latest/.
"""

from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from math import prod

from ggml_sched.errors import no_host_memory


cdef struct DLDevice:
    int32_t device_type
    int32_t device_id


cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes


cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset


cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void *manager_ctx
    void (*deleter)(DLManagedTensor *) noexcept


cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void *manager_ctx
    void (*deleter)(DLManagedTensorVersioned *) noexcept
    uint64_t flags
    DLTensor dl_tensor


cdef enum:
    MAX_DIMS = 64
    MAJOR_VERSION = 1
    IS_READ_ONLY = 1        # DLPACK_FLAG_BITMASK_READ_ONLY
    CPU_DEVICE = 1          # kDLCPU
    CUDA_HOST_DEVICE = 3    # kDLCUDAHost: pinned memory, which the CPU reads, too

HOST = (<int>CPU_DEVICE, 0)
"""`__dlpack_device__` of memory that the CPU reads."""

PINNED_HOST = <int>CUDA_HOST_DEVICE

_CODES = {"i": 0, "u": 1, "f": 2, "bf": 4, "c": 5, "b": 6}
_KINDS = {number: kind for kind, number in _CODES.items()}

cdef const char *PLAIN = "dltensor"
cdef const char *VERSIONED = "dltensor_versioned"
cdef const char *USED = "used_dltensor"
cdef const char *USED_VERSIONED = "used_dltensor_versioned"


# -- giving -------------------------------------------------------------------------------------------


cdef struct Export:
    DLManagedTensorVersioned versioned
    DLManagedTensor plain
    Py_buffer view
    int64_t dims[2 * MAX_DIMS]      # extents, then strides in elements


def export(memory, tuple shape, tuple strides, str kind, int bits, bint versioned):
    """A capsule over `memory`, an object with the buffer protocol, which stays alive until its consumer is done.

    `shape` in elements, outermost first, and `strides` in bytes.  Elements have `bits` bits and are of a `kind`: "f",
    "i", "u", "bf" (bf16), "c" or "b".  Read-only memory takes a `versioned` capsule.
    Raises BufferError for read-only memory without `versioned`, and for strides that are no multiples of an element.
    """
    cdef Export *out
    cdef DLTensor *dl
    cdef int i, n = len(shape)
    if n > MAX_DIMS:
        raise BufferError(f"an array of {n} dimensions: at most {MAX_DIMS} are exchanged")
    for stride in strides:
        if stride * 8 % bits:
            raise BufferError(f"DLPack counts strides in elements: {stride} bytes are no multiple of {bits} bits")
    out = <Export *>calloc(1, sizeof(Export))
    if out == NULL:
        raise no_host_memory("a DLPack capsule")
    dl = &out.versioned.dl_tensor if versioned else &out.plain.dl_tensor
    try:
        PyObject_GetBuffer(memory, &out.view, PyBUF_FULL_RO)
        if out.view.readonly and not versioned:
            raise BufferError("the memory is read-only, which DLPack before version 1.0 cannot say: ask for a copy "
                              "(copy=True), or call numpy()")
        dl.data = out.view.buf
        dl.device.device_type = CPU_DEVICE
        dl.ndim = n
        dl.dtype.code, dl.dtype.bits, dl.dtype.lanes = _CODES[kind], bits, 1
        dl.shape, dl.strides = out.dims, out.dims + MAX_DIMS
        for i in range(n):
            dl.shape[i], dl.strides[i] = shape[i], strides[i] * 8 // bits
        out.versioned.major, out.versioned.manager_ctx, out.versioned.deleter = MAJOR_VERSION, out, delete_versioned
        out.versioned.flags = IS_READ_ONLY if out.view.readonly else 0
        out.plain.manager_ctx, out.plain.deleter = out, delete_plain
        if versioned:
            return PyCapsule_New(&out.versioned, VERSIONED, drop)
        return PyCapsule_New(&out.plain, PLAIN, drop)
    except BaseException:
        release(out)
        raise


cdef void release(Export *out) noexcept with gil:
    PyBuffer_Release(&out.view)     # does nothing for a view that was not taken
    free(out)


cdef void delete_versioned(DLManagedTensorVersioned *dl) noexcept nogil:
    release(<Export *>dl.manager_ctx)


cdef void delete_plain(DLManagedTensor *dl) noexcept nogil:
    release(<Export *>dl.manager_ctx)


cdef void drop(object capsule) noexcept:
    """The capsule's destructor: frees what no consumer has taken."""
    if PyCapsule_IsValid(capsule, VERSIONED):
        delete_versioned(<DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, VERSIONED))
    elif PyCapsule_IsValid(capsule, PLAIN):
        delete_plain(<DLManagedTensor *>PyCapsule_GetPointer(capsule, PLAIN))


# -- taking -------------------------------------------------------------------------------------------


cdef class Import:
    """Memory that another library gave by DLPack: NumPy makes an array over it (`__array_interface__`).

    `kind` and `bits` of the elements as in `export`.  In NumPy's array bf16 elements are uint16 with the same bits.
    """

    cdef DLManagedTensorVersioned *versioned
    cdef DLManagedTensor *plain
    cdef readonly str kind
    cdef readonly int bits
    cdef readonly dict __array_interface__

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.plain != NULL and self.plain.deleter != NULL:
            self.plain.deleter(self.plain)


def take(given):
    """The `Import` of an object with `__dlpack__`, in memory that the CPU reads.

    Raises what the object's `__dlpack__` raises; BufferError for a capsule that was consumed before, for memory of a
    device, for elements of more than one lane, and for a newer major version of DLPack.
    """
    cdef Import found = Import.__new__(Import)
    cdef DLTensor *dl
    cdef uint64_t flags = 0
    try:
        capsule = given.__dlpack__(max_version=(<int>MAJOR_VERSION, 0))
    except TypeError:
        capsule = given.__dlpack__()        # `given` knows only DLPack before version 1.0
    if PyCapsule_IsValid(capsule, VERSIONED):
        found.versioned = <DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, VERSIONED)
        PyCapsule_SetName(capsule, USED_VERSIONED)
        if found.versioned.major > MAJOR_VERSION:
            raise BufferError(f"{type(given).__name__} gives DLPack {found.versioned.major}.{found.versioned.minor}; "
                              f"versions up to {MAJOR_VERSION} are understood")
        dl, flags = &found.versioned.dl_tensor, found.versioned.flags
    elif PyCapsule_IsValid(capsule, PLAIN):
        found.plain = <DLManagedTensor *>PyCapsule_GetPointer(capsule, PLAIN)
        PyCapsule_SetName(capsule, USED)
        dl = &found.plain.dl_tensor
    else:
        raise BufferError(f"{type(given).__name__}.__dlpack__ gives {capsule!r}: no DLPack capsule, or one that was "
                          "consumed before")
    if dl.device.device_type not in (CPU_DEVICE, CUDA_HOST_DEVICE):
        raise BufferError(f"{type(given).__name__} gives memory of DLPack's device type {dl.device.device_type}, which "
                          "the CPU does not read: copy it to the host first")
    found.kind, found.bits = _KINDS.get(dl.dtype.code, ""), dl.dtype.bits
    if dl.dtype.lanes != 1 or not found.kind or found.bits % 8:
        raise BufferError(f"{type(given).__name__} gives elements of DLPack's type code {dl.dtype.code} with "
                          f"{found.bits} bits in {dl.dtype.lanes} lanes, which NumPy has not")
    # Integers of Python, because a product of extents may exceed 64 bits: NumPy refuses an array that is too large.
    shape = [<object>dl.shape[i] for i in range(dl.ndim)]
    if dl.strides == NULL:
        strides = [found.bits // 8 * prod(shape[i + 1:]) for i in range(dl.ndim)]
    else:
        strides = [found.bits // 8 * <object>dl.strides[i] for i in range(dl.ndim)]
    found.__array_interface__ = {
        "version": 3,
        "shape": tuple(shape),
        "strides": tuple(strides),
        "typestr": f"{'|' if found.bits == 8 else '<'}{'u' if found.kind == 'bf' else found.kind}{found.bits // 8}",
        "data": (<size_t>dl.data + dl.byte_offset, bool(flags & IS_READ_ONLY)),
    }
    return found
