"""Checks, before a library is used, that its tensors have the layout declared in `abi.h`.

ggml's structs have no version number, and their fields may move between versions.  So the library is called to make
tensors with a different value in each field, and each value must be at the offset that `abi.h` declares.
"""

from __future__ import annotations

import ctypes as c
import re

from ggml_sched.backends.ggml._ggml import TENSOR_SIZE
from ggml_sched.errors import BackendError

__all__ = ["OLDEST", "check"]

OLDEST = "0.13"
OBJECT_SIZE = 32
"""Bytes of the header that ggml puts before each tensor of a context."""


class _Tensor(c.Structure):
    pass


_Tensor._fields_ = [
    ("type", c.c_int32), ("buffer", c.c_void_p), ("ne", c.c_int64 * 4), ("nb", c.c_size_t * 4), ("op", c.c_int32),
    ("op_params", c.c_int32 * 16), ("flags", c.c_int32), ("src", c.POINTER(_Tensor) * 10),
    ("view_src", c.POINTER(_Tensor)), ("view_offs", c.c_size_t), ("data", c.c_void_p), ("name", c.c_char * 64),
    ("extra", c.c_void_p), ("padding", c.c_char * 8),
]


class _InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


def check(base: c.CDLL, where: str, version: str) -> None:
    """Raise BackendError unless the library is new enough and its tensors have the declared layout."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < tuple(map(int, OLDEST.split("."))):
        raise BackendError(f"ggml {version} in {where} is older than {OLDEST}, the oldest that is supported")
    try:
        wrong = _differences(base)
    except AttributeError as error:
        wrong = [f"a function: {error}"]
    if wrong:
        raise BackendError(f"ggml {version} in {where} is laid out in a way that is not known here: {', '.join(wrong)}")


def _differences(base: c.CDLL) -> list[str]:
    """The names of the fields of the library's tensors that are not where `_Tensor`, a copy of abi.h's, has them."""
    tensor = c.POINTER(_Tensor)

    def function(name: str, result, *arguments):
        return c.CFUNCTYPE(result, *arguments)(c.cast(getattr(base, f"ggml_{name}"), c.c_void_p).value)

    overhead = function("tensor_overhead", c.c_size_t)()
    if c.sizeof(_Tensor) != TENSOR_SIZE or overhead != TENSOR_SIZE + OBJECT_SIZE:
        return [f"{overhead - OBJECT_SIZE} bytes of a tensor, not {TENSOR_SIZE}"]
    memory = c.create_string_buffer(1 << 16)
    start = -c.addressof(memory) % 64
    ctx = function("init", c.c_void_p, _InitParams)(
        _InitParams(len(memory) - 64 - start, c.addressof(memory) + start, False))
    if not ctx:
        return ["no context"]
    try:
        a = function("new_tensor_4d", tensor, c.c_void_p, c.c_int, *[c.c_int64] * 4)(ctx, 1, 3, 5, 7, 2)
        function("set_name", tensor, tensor, c.c_char_p)(a, b"a probe")
        function("set_output", None, tensor)(a)
        b = function("view_1d", tensor, c.c_void_p, tensor, c.c_int64, c.c_size_t)(ctx, a, 4, 6)
        d = function("scale", tensor, c.c_void_p, tensor, c.c_float)(ctx, a, 0.5)
        data = function("get_data", c.c_void_p, tensor)(a)
        op_name = function("op_name", c.c_char_p, c.c_int)
        x, y, z = a.contents, b.contents, d.contents
        checks = {
            "type": x.type == 1, "ne": tuple(x.ne) == (3, 5, 7, 2), "nb": tuple(x.nb) == (2, 6, 30, 210),
            "name": x.name == b"a probe", "flags": x.flags == 2, "data": bool(data) and x.data == data,
            "buffer": not x.buffer, "extra": not x.extra, "view_offs": y.view_offs == 6,
            "view_src": c.addressof(y.view_src.contents) == c.addressof(x) if y.view_src else False,
            "view data": y.data == data + 6, "src": bool(z.src[0]) and c.addressof(z.src[0].contents) == c.addressof(x),
            "op": 0 < z.op < 256 and op_name(z.op) == b"SCALE", "op_params": z.op_params[0] == 0x3F000000,
        }
        return [name for name, right in checks.items() if not right]
    finally:
        function("free", None, c.c_void_p)(ctx)
