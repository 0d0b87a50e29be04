"""`overriding`: in a with statement, gives models that `llama_cpp.Llama` opens two settings that `Llama` lacks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["overriding"]


@contextmanager
def overriding(override_tensor: Mapping[str, str], devices: Sequence[str] = ()) -> Iterator[None]:
    """Give models that `llama_cpp.Llama` opens meanwhile buffer types for their tensors, as llama.cpp's `-ot` does.

    `override_tensor`: {regular expression: name of a device}; the first that matches a tensor's name counts.
    `devices`: the devices to use, in this order, as with `--device`; (): all.  Names are llama.cpp's: "CPU", "CUDA0".
    Other threads must not open models meanwhile.  ValueError for a name that no device has, TypeError for `devices`
    that are one text.
    """
    if isinstance(devices, str):
        raise TypeError(f"devices={devices!r} is one text and no sequence of names")
    import llama_cpp.llama_cpp as api

    handles = {name: _device(Path(api.__file__).parent / "lib", name) for name in {*override_tensor.values(), *devices}}
    texts = [ctypes.create_string_buffer(pattern.encode()) for pattern in override_tensor]
    rows: list[int | None] = []
    for text, name in zip(texts, override_tensor.values(), strict=True):
        rows += [ctypes.addressof(text), handles[name][1]]
    patterns = (ctypes.c_void_p * (len(rows) + 2))(*rows, None, None)
    used = (ctypes.c_void_p * (len(devices) + 1))(*(handles[name][0] for name in devices), None)
    default = api.llama_model_default_params

    def with_overrides() -> Any:
        params = default()
        if rows:
            params.tensor_buft_overrides = ctypes.cast(patterns, ctypes.c_void_p)
        if devices:
            params.devices = ctypes.cast(used, ctypes.c_void_p)
        return params

    api.llama_model_default_params = with_overrides
    try:
        yield
    finally:
        api.llama_model_default_params = default


def _device(folder: Path, name: str) -> tuple[int, int]:
    """The addresses of a device and of its buffer type."""
    found = sorted(folder.glob("libggml.so*"))
    if not found:
        raise ValueError(f"{folder} has no libggml.so")
    library = ctypes.CDLL(str(next((path for path in found if path.name == "libggml.so.0"), found[0])))
    base = ctypes.CDLL(str(found[0].with_name(found[0].name.replace("libggml", "libggml-base"))))
    by_name = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(_address(library.ggml_backend_dev_by_name))
    type_of = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_address(base.ggml_backend_dev_buffer_type))
    device = by_name(name.encode())
    if not device:
        raise ValueError(f"llama.cpp has no device {name!r}")
    return device, type_of(device)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
