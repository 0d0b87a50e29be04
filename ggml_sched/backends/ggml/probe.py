"""Checks, before a library is used, that its tensors have the layout declared in `abi.h`.

ggml's structs have no version number, and their fields may move between versions.  So the library is called to make
tensors with a different value in each field, and each value must be at the offset that `abi.h` declares.
"""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ggml_sched.backends.ggml._ggml import TENSOR_SIZE, tensor_at
from ggml_sched.errors import BackendError

if TYPE_CHECKING:
    from ctypes import _CDataType as CType

__all__ = ["OLDEST", "check"]

OLDEST = "0.13"
OBJECT_SIZE = 32
"""Bytes of the header that ggml puts before each tensor of a context."""


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
    """The names of the fields of the library's tensors that are not where abi.h has them."""
    pointer = c.c_void_p

    def function(name: str, result: type[CType] | None, *arguments: type[CType]) -> Callable[..., Any]:
        return c.CFUNCTYPE(result, *arguments)(c.cast(getattr(base, f"ggml_{name}"), pointer).value or 0)

    overhead = function("tensor_overhead", c.c_size_t)()
    if overhead != TENSOR_SIZE + OBJECT_SIZE:
        return [f"{overhead - OBJECT_SIZE} bytes of a tensor, not {TENSOR_SIZE}"]
    memory = c.create_string_buffer(1 << 16)
    start = -c.addressof(memory) % 64
    ctx = function("init", pointer, _InitParams)(
        _InitParams(len(memory) - 64 - start, c.addressof(memory) + start, False))
    if not ctx:
        return ["no context"]
    try:
        a = function("new_tensor_4d", pointer, pointer, c.c_int, *[c.c_int64] * 4)(ctx, 1, 3, 5, 7, 2)
        function("set_name", pointer, pointer, c.c_char_p)(a, b"a probe")
        function("set_output", None, pointer)(a)
        b = function("view_1d", pointer, pointer, pointer, c.c_int64, c.c_size_t)(ctx, a, 4, 6)
        d = function("scale", pointer, pointer, pointer, c.c_float)(ctx, a, 0.5)
        data = function("get_data", pointer, pointer)(a)
        op_name = function("op_name", c.c_char_p, c.c_int)
        x, y, z = map(tensor_at, (a, b, d))
        checks = {
            "type": x["type"] == 1, "ne": x["ne"] == [3, 5, 7, 2], "nb": x["nb"] == [2, 6, 30, 210],
            "name": x["name"] == b"a probe", "flags": x["flags"] == 2, "data": bool(data) and x["data"] == data,
            "buffer": not x["buffer"], "extra": not x["extra"], "view_offs": y["view_offs"] == 6,
            "view_src": y["view_src"] == a, "view data": y["data"] == data + 6, "src": z["src"] == a,
            "op": 0 < z["op"] < 256 and op_name(z["op"]) == b"SCALE", "op_params": z["op_params"][0] == 0x3F000000,
        }
        return [name for name, right in checks.items() if not right]
    finally:
        function("free", None, pointer)(ctx)
