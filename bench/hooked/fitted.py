"""A process in which llama.cpp's own fit chooses where a model goes: a line of JSON.

    python fitted.py JOB

JOB is a file of JSON: `path`, `library` (of build.py's `build_fit`), `libraries` (of its `build`), `devices` ([name,
bytes] of each imitated one), `settings` of `ggml_sched.llama_cpp.dry_run`, and `margin`, bytes left on each device.
The line has the settings of `dry_run` that it chose, n_gpu_layers, tensor_split and override_tensor; null: nothing
fits.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

from allocated import devices, folder


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ["GGML_SCHED"] = "off"
    import llama_cpp as api

    from ggml_sched.llama_cpp.parameters import Parameters, check_settings

    callback = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(callback, None)
    api.llama_backend_init()
    handles, names = devices({**job, "pipeline": False})
    for name in ("libggml-base.so.0", "libggml.so.0", "libllama.so.0"):
        ctypes.CDLL(f"{folder()}/{name}", mode=ctypes.RTLD_GLOBAL)
    library, ggml = ctypes.CDLL(job["library"]), ctypes.CDLL(folder() + "/libggml-base.so.0")
    ggml.ggml_backend_buft_name.restype = ctypes.c_char_p
    parameters = Parameters(api, check_settings(job["settings"]), {}, list(handles)[:-1])
    model, context = parameters.model, parameters.context(job["settings"]["n_ctx"])
    model.n_gpu_layers = api.llama_model_default_params().n_gpu_layers
    split = (ctypes.c_float * api.llama_max_devices())()
    overrides = (ctypes.c_void_p * (2 * api.llama_max_tensor_buft_overrides()))()
    status = library.fit_params(os.fsencode(job["path"]), ctypes.byref(model), ctypes.byref(context), split, overrides,
                                ctypes.c_size_t(job["margin"]))
    if status > 1:
        raise SystemExit("llama.cpp's fit failed")
    found = {}
    for pattern, kind in zip(overrides[::2], overrides[1::2], strict=True):
        if not pattern:
            break
        found[ctypes.string_at(pattern).decode()] = ggml.ggml_backend_buft_name(ctypes.c_void_p(kind)).decode()
    print(json.dumps(None if status else {"n_gpu_layers": model.n_gpu_layers, "override_tensor": found,
                                          "tensor_split": list(split)[:len(names)] if any(split) else None}))


if __name__ == "__main__":
    main()
