"""A process in which llama.cpp opens a model in several ways, and the buffers that it then holds: a line of JSON each.

    python allocated.py JOB

JOB is a file of JSON: `mode` ("stock", "alloc" or "sched"), `path`, `libraries` (of build.py), `devices` ([name, bytes]
of each imitated one), `pipeline`, and `ways`: settings of `ggml_sched.llama_cpp.dry_run`.  A line is {"buffers": [type,
what for, bytes] of each}, or {"failed": llama.cpp's last log}.  In mode "stock" nothing of ggml_sched is loaded before
llama.cpp; afterwards the names of settings are.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path

USAGES = {1: "weights", 2: "compute"}


def folder() -> str:
    found = importlib.util.find_spec("llama_cpp")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("needs llama-cpp-python: pip install '.[peer]'")
    return found.submodule_search_locations[0] + "/lib"


class Held:
    """The buffers that exist: from the library in front of ggml, and of those that the hook allocates from the hook."""

    def __init__(self, job: dict) -> None:
        self.library = ctypes.CDLL(job["libraries"]["buffers"], mode=ctypes.RTLD_GLOBAL)
        if self.library.buffers_open(os.fsencode(folder() + "/libggml-base.so.0")):
            raise SystemExit("ggml cannot be loaded")
        self.library.buffers_read.restype = ctypes.c_char_p

    def read(self) -> list[tuple[str, str, int]]:
        found, nbytes, usage, mapped = [], ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
        at = 0
        while name := self.library.buffers_read(at, *map(ctypes.byref, (nbytes, usage, mapped))):
            found.append(row(name.decode(), usage.value, nbytes.value))
            at += 1
        return [one for one in found if one[2]]


def row(kind: str, usage: int, nbytes: int) -> tuple[str, str, int]:
    """A buffer's type, where memory that is a mapped file has the type of its device; what it is for; its bytes."""
    return kind.removesuffix("_Mapped"), USAGES.get(usage, "other"), nbytes


def from_hook() -> list[tuple[str, str, int]]:
    """The same in a hooked process: bytes of buffers as the hook's caches hold them."""
    from ggml_sched.llama_cpp.install import hook

    found = [row(device or "CPU", 2, nbytes) for _, nbytes, _, device in hook().buffers()]
    found += [row(kind, usage, nbytes) for kind, _, nbytes, usage, *_ in hook().open_buffers()]
    return [one for one in found if one[2]]


def devices(job: dict) -> tuple[ctypes.Array, list[str]]:
    count = len(job["devices"])
    handles = (ctypes.c_void_p * (count + 1))()
    if count:
        ggml = ctypes.CDLL(folder() + "/libggml.so.0")
        ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
        cpu = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(0)))
        hosts = ctypes.CDLL(job["libraries"]["devices"])
        memory = (ctypes.c_size_t * count)(*(nbytes for _, nbytes in job["devices"]))
        hosts.devices_have(memory, count)
        if hosts.devices_open(os.fsencode(folder() + "/libggml-base.so.0"), cpu, count, 1, int(job["pipeline"]),
                              handles):
            raise SystemExit("ggml lacks what devices need")
    return handles, [name for name, _ in job["devices"]]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    if job["mode"] == "stock":
        read = Held(job).read
    else:
        import ggml_sched.llama_cpp as ours

        ours.install(level=job["mode"])
        read = from_hook
    import llama_cpp as api

    log: list[str] = []
    callback = api.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
    api.llama_log_set(callback, None)
    api.llama_backend_init()
    handles, names = devices(job)
    os.environ.setdefault("GGML_SCHED", "off")
    from ggml_sched.llama_cpp.parameters import Parameters, check_settings

    ggml = ctypes.CDLL(folder() + "/libggml-base.so.0")
    ggml.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    ggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    types = {name: ggml.ggml_backend_dev_buffer_type(ctypes.c_void_p(handles[i])) for i, name in enumerate(names)}
    types["CPU"] = ggml.ggml_backend_cpu_buffer_type()
    for way in job["ways"]:
        log.clear()
        parameters = Parameters(api, check_settings(way), types, list(handles)[:-1] if names else None)
        model = api.llama_model_load_from_file(os.fsencode(job["path"]), parameters.model)
        ctx = None
        if model:
            ctx = api.llama_init_from_model(model, parameters.context(api.llama_model_n_ctx_train(model)))
        last = next((line.strip() for line in reversed(log) if line.strip(" .\n")), "")
        print(json.dumps({"buffers": read()} if ctx else {"failed": last}), flush=True)
        if ctx:
            api.llama_free(ctx)
        if model:
            api.llama_model_free(model)


if __name__ == "__main__":
    main()
