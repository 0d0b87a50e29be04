"""Turns settings with the names of `llama_cpp.Llama`'s arguments into llama.cpp's structs of parameters, for dry runs,
which measure the bytes that llama.cpp would allocate.

Owns the names: `check_settings` refuses others before a process is started.  A setting that `Llama` lacks has the name
of its field in llama.cpp's struct.  This module does not import llama_cpp: `Parameters` is given the module.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from ggml_sched._graph import Type

__all__ = ["Parameters", "check_settings"]

SPLIT_MODES = ("none", "layer", "row", "tensor")
DEFAULTS: Mapping[str, object] = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 512, "n_gpu_layers": 0, "use_mmap": True,
                                  "flash_attn": False}
"""{setting: the default of `Llama`}, where llama.cpp has another default."""
MODEL = ("n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "use_mmap", "use_mlock", "use_extra_bufts",
         "no_host", "load_mtp", "kv_overrides", "override_tensor")
"""Settings of a model.  `override_tensor`: {regular expression: name of a device or buffer type}, as with `-ot`."""
CONTEXT = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_outputs_max", "n_outputs_max_per_seq", "rope_scaling_type",
           "pooling_type", "attention_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor",
           "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx", "type_k", "type_v", "embedding",
           "offload_kqv", "op_offload", "swa_full", "kv_unified", "flash_attn", "n_rs_seq")
"""Settings of a context.  `flash_attn`: True, False, or "auto", which leaves it to llama.cpp; `type_k` and `type_v`:
names such as "q8_0", or ggml's numbers."""
SIGNED = ("n_gpu_layers", "main_gpu", "split_mode", "rope_scaling_type", "pooling_type", "attention_type")
"""Settings whose fields are signed integers of 32 bits; `split_mode` may be a name."""
UNSIGNED = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_outputs_max", "n_outputs_max_per_seq", "yarn_orig_ctx",
            "n_rs_seq")
"""Settings whose fields are unsigned integers of 32 bits."""
POSITIVE = ("n_batch", "n_ubatch", "n_seq_max")
FLOATS = ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast",
          "yarn_beta_slow")
FLAGS = ("use_mmap", "use_mlock", "use_extra_bufts", "no_host", "load_mtp", "embedding", "offload_kqv", "op_offload",
         "swa_full", "kv_unified")
WITHOUT_EFFECT = ("n_threads", "n_threads_batch", "seed", "verbose", "no_perf", "last_n_tokens_size", "chat_format",
                  "numa", "logits_all")
"""Arguments of `Llama` that change no size of a buffer; `check_settings` leaves them out."""


def check_settings(settings: Mapping[str, object]) -> dict[str, object]:
    """The settings with defaults and without those that have no effect, as plain values, which JSON has.

    TypeError for an unknown name and for a value of another type, ValueError for a value that is not allowed or that
    llama.cpp's field does not hold.
    """
    known = {*MODEL, *CONTEXT, *WITHOUT_EFFECT}
    for name in settings:
        if name not in known:
            raise TypeError(f"{name!r} is not one of llama.cpp's settings that bytes depend on: "
                            f"{', '.join(sorted({*MODEL, *CONTEXT}))}")
    kept = {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT and value is not None}
    found = {**DEFAULTS, **kept}
    for name, value in found.items():
        found[name] = _checked(name, value)
    return found


def _checked(name: str, value: Any) -> object:
    """The plain value of a setting."""
    if name == "split_mode" and isinstance(value, str):
        if value not in SPLIT_MODES:
            raise ValueError(f"split_mode={value!r} is not one of {', '.join(SPLIT_MODES)}")
        return str(value)
    if name in ("type_k", "type_v"):
        return _number_of(name, value)
    if name in SIGNED:
        return _whole(name, value, -1 << 31, (1 << 31) - 1)
    if name in UNSIGNED:
        return _whole(name, value, int(name in POSITIVE), (1 << 32) - 1)
    if name in FLOATS:
        return _number(name, value)
    if name == "flash_attn":
        return "auto" if isinstance(value, str) and value == "auto" else _flag(name, value, "True, False or 'auto'")
    if name in FLAGS:
        return _flag(name, value, "True or False")
    if name == "tensor_split":
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise TypeError(f"tensor_split={value!r} is no sequence of numbers")
        return [_number(name, part) for part in value]
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name}={value!r} is no dict whose keys are texts")
    if name == "kv_overrides":
        return {key: _metadata_of(key, one) for key, one in value.items()}
    if not all(isinstance(one, str) for one in value.values()):
        raise TypeError(f"{name}={value!r}: a name of a device or buffer type is a text")
    return dict(value)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    """A whole number: whatever has `__index__`, except bools."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is not a whole number")
    number = operator.index(value)
    if not least <= number <= most:
        raise ValueError(f"{name}={value!r} is not between {least} and {most}")
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} is not a number")
    return float(value)


def _flag(name: str, value: Any, expected: str) -> bool:
    """A bool, also NumPy's, or 0 or 1."""
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__bool__") and not hasattr(value, "__len__")):
        raise TypeError(f"{name}={value!r} is not {expected}")
    if value not in (0, 1):
        raise ValueError(f"{name}={value!r} is not {expected}")
    return bool(value)


def _metadata_of(key: str, value: Any) -> object:
    """A value of a model's metadata: a bool, an integer of 64 bits, a float or a text."""
    if isinstance(value, (str, bool)):
        return value
    if hasattr(value, "__index__"):
        return _whole(f"kv_overrides: {key!r}", value, -1 << 63, (1 << 63) - 1)
    if type(value).__name__ in ("bool", "bool_"):       # NumPy's
        return bool(value)
    return _number(f"kv_overrides: {key!r}", value)


def _number_of(name: str, kind: object) -> int:
    """ggml's number of a type."""
    numbers = {str(known): int(known) for known in Type}
    if isinstance(kind, str):
        if kind not in numbers:
            raise ValueError(f"{name}={kind!r} is not one of the types {', '.join(numbers)}")
        return numbers[kind]
    return _whole(name, kind, 0, (1 << 31) - 1)


class Parameters:
    """llama.cpp's structs for some settings, and the arrays that they point into.

    `api` is the module llama_cpp; `buffer_types`: addresses of buffer types by the names that `override_tensor` may
    have; `devices`: addresses of the devices to use, None for those that llama.cpp finds.
    """

    def __init__(self, api: ModuleType, settings: Mapping[str, Any], buffer_types: Mapping[str, int],
                 devices: list[int] | None = None) -> None:
        self._api, self._settings = api, settings
        self._kept: list[object] = []
        self.model: Any = self._model(buffer_types, devices)

    def _keep(self, array: Any) -> Any:
        self._kept.append(array)
        return array

    def _model(self, buffer_types: Mapping[str, int], devices: list[int] | None) -> Any:
        api, given = self._api, self._settings
        params = api.llama_model_default_params()
        layers = given["n_gpu_layers"]
        params.n_gpu_layers = 0x7FFFFFFF if layers == -1 else layers
        mode = given.get("split_mode")
        if mode is not None:
            params.split_mode = SPLIT_MODES.index(mode) if isinstance(mode, str) else mode
        for name in ("main_gpu", "use_extra_bufts", "no_host", "load_mtp"):
            if name in given:
                setattr(params, name, given[name])
        mapped, locked = given["use_mmap"], given.get("use_mlock", False)
        params.load_mode = (api.LLAMA_LOAD_MODE_MMAP_MLOCK if mapped and locked else api.LLAMA_LOAD_MODE_MLOCK if locked
                            else api.LLAMA_LOAD_MODE_MMAP if mapped else api.LLAMA_LOAD_MODE_NONE)
        if given.get("tensor_split"):
            most = api.llama_max_devices()
            if len(given["tensor_split"]) > most:
                raise ValueError(f"tensor_split has {len(given['tensor_split'])} parts; llama.cpp has {most} devices "
                                 "at most")
            params.tensor_split = self._keep((ctypes.c_float * most)(*given["tensor_split"]))
        if devices is not None:
            array = self._keep((ctypes.c_void_p * (len(devices) + 1))(*devices, None))
            params.devices = ctypes.cast(array, ctypes.c_void_p)
        if given.get("override_tensor"):
            params.tensor_buft_overrides = self._overrides(given["override_tensor"], buffer_types)
        if given.get("kv_overrides"):
            params.kv_overrides = self._metadata(given["kv_overrides"])
        return params

    def _overrides(self, patterns: Mapping[str, str], buffer_types: Mapping[str, int]) -> Any:
        most = self._api.llama_max_tensor_buft_overrides()
        if len(patterns) >= most:
            raise ValueError(f"{len(patterns)} overrides of tensors; llama.cpp takes {most - 1} at most")
        for pattern, name in patterns.items():
            if name not in buffer_types:
                raise ValueError(f"override_tensor: {pattern!r}: no buffer type has the name {name!r}; names are "
                                 f"{', '.join(buffer_types)}")
        texts = self._keep([ctypes.create_string_buffer(pattern.encode()) for pattern in patterns])
        flat: list[int | None] = []
        for text, name in zip(texts, patterns.values(), strict=True):
            flat += [ctypes.addressof(text), buffer_types[name]]
        return ctypes.cast(self._keep((ctypes.c_void_p * (len(flat) + 2))(*flat, None, None)), ctypes.c_void_p)

    def _metadata(self, values: Mapping[str, object]) -> Any:
        api = self._api
        array = self._keep((api.llama_model_kv_override * (len(values) + 1))())
        for row, (key, value) in zip(array, values.items(), strict=False):
            row.key = key.encode()
            if isinstance(value, bool):
                row.tag, row.value.val_bool = api.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
            elif isinstance(value, int):
                row.tag, row.value.val_i64 = api.LLAMA_KV_OVERRIDE_TYPE_INT, value
            elif isinstance(value, float):
                row.tag, row.value.val_f64 = api.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
            else:
                row.tag = api.LLAMA_KV_OVERRIDE_TYPE_STR
                text = str(value).encode()
                if len(text) >= ctypes.sizeof(row.value):
                    raise ValueError(f"kv_overrides: {key!r} has {len(text)} bytes; llama.cpp takes "
                                     f"{ctypes.sizeof(row.value) - 1} at most")
                ctypes.memmove(ctypes.addressof(row.value), text + b"\0", len(text) + 1)
        return array

    def context(self, n_ctx_train: int) -> Any:
        """The struct of a context."""
        api, given = self._api, self._settings
        params = api.llama_context_default_params()
        n_ctx = given["n_ctx"] or n_ctx_train
        params.n_ctx = n_ctx
        params.n_batch = min(n_ctx, given["n_batch"])
        params.n_ubatch = min(params.n_batch, given["n_ubatch"])
        flash = given["flash_attn"]
        params.flash_attn_type = -1 if flash == "auto" else int(flash)
        if given.get("embedding"):
            params.embeddings = params.kv_unified = True
            params.n_seq_max = min(params.n_batch, api.llama_max_parallel_sequences())
        for name in CONTEXT:
            if name in given and name not in ("n_ctx", "n_batch", "n_ubatch", "flash_attn", "embedding"):
                setattr(params, name, given[name])
        return params
