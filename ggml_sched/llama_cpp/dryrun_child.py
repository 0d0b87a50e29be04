"""The process of a dry run: llama.cpp opens a model and contexts, allocates nothing, and is measured.

    python -m ggml_sched.llama_cpp.dryrun_child JOB

JOB is a file of JSON that dryrun.py wrote: `path`, `settings`, `devices` (None or [name, bytes, alignment] each),
`pipeline`, `deadline` in seconds, `result`: the file that is written last, and `log`: the file to which each message of
llama.cpp's is written at once, so that it is there when llama.cpp aborts.  Nothing else of the machine is changed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from ggml_sched.llama_cpp.imitated import Imitated, imitate
from ggml_sched.llama_cpp.install import check, hook
from ggml_sched.llama_cpp.parameters import Parameters

__all__ = ["main"]

WEIGHTS = 1
"""ggml's number of the usage of buffers that hold weights."""
PROPERTIES = 256
"""More bytes than ggml's struct of a device's properties has."""
FROM_HOST_POINTER = 50
"""The offset, in ggml's struct of a device's properties, of the flag for making buffers over existing memory."""


class Ggml:
    """ggml's functions that a dry run calls, from the libraries beside llama.cpp's."""

    def __init__(self, folder: Path) -> None:
        self.base: ctypes.CDLL = ctypes.CDLL(str(_library(folder, "ggml-base")))
        self._all = self.base, ctypes.CDLL(str(_library(folder, "ggml")))

    def function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        for library in self._all:
            found = getattr(library, name, None)
            if found is not None:
                # A function object of our own: the library's, with its types, is shared by all code that looks it up.
                pointer = ctypes.cast(found, ctypes.c_void_p).value or 0
                return ctypes.CFUNCTYPE(result, *arguments)(pointer)
        raise AttributeError(f"no library of ggml's has {name}")

    def devices(self) -> dict[str, int]:
        """The addresses of the devices that ggml finds on this machine, by name."""
        count = self.function("ggml_backend_dev_count", ctypes.c_size_t)
        get = self.function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        name = self.function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        return {name(get(i)).decode(): get(i) for i in range(count())}

    def is_mapped(self, device: int) -> bool:
        """Whether a device makes buffers of a file that is mapped."""
        properties = ctypes.create_string_buffer(PROPERTIES)
        self.function("ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.c_void_p)(
            device, ctypes.addressof(properties))
        return properties.raw[FROM_HOST_POINTER] != 0


def _library(folder: Path, name: str) -> Path:
    """The file of one of ggml's libraries in a folder: with a version where there is one, as llama.cpp names it."""
    found = sorted(folder.glob(f"lib{name}.so*"))
    if not found:
        raise SystemExit(f"{folder} has no lib{name}.so")
    return next((path for path in found if path.name == f"lib{name}.so.0"), found[0])


class Opened:
    """A model that llama.cpp has opened without its weights."""

    def __init__(self, job: dict[str, Any], log: IO[str]) -> None:
        hook().record_contexts(True)
        import llama_cpp as api

        check()
        self.api: ModuleType = api
        self.settings: dict[str, Any] = job["settings"]

        def write(level: int, text: bytes, data: object) -> None:
            log.write(f"{level} {text.decode(errors='replace').rstrip()}\n")
            log.flush()

        self._written = api.llama_log_callback(write)
        api.llama_log_set(self._written, None)
        api.llama_backend_init()
        self.ggml: Ggml = Ggml(Path(api.__file__).parent / "lib")
        found = self.ggml.devices()
        self.imitated: list[Imitated] = []
        if job["devices"] is not None:
            self.imitated = imitate(self.ggml.base, found["CPU"], job["devices"], job["pipeline"])
            found = {**{device.name: device.handle for device in self.imitated}, "CPU": found["CPU"]}
        self.devices = found
        self._buffer_type = self.ggml.function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
        self._type_name = self.ggml.function("ggml_backend_buft_name", ctypes.c_char_p, ctypes.c_void_p)
        types = {name: self._buffer_type(handle) for name, handle in found.items()}
        types |= {self._type_name(kind).decode(): kind for kind in types.values()}
        handles = [device.handle for device in self.imitated] if job["devices"] is not None else None
        self.parameters: Parameters = Parameters(api, self.settings, types, handles)
        params = self.parameters.model
        params.no_alloc, params.load_mode = True, api.LLAMA_LOAD_MODE_NONE
        self.model: Any = api.llama_model_load_from_file(os.fsencode(job["path"]), params)
        if not self.model:
            raise SystemExit("llama.cpp did not open the model")

    def contexts(self) -> dict[str, Any]:
        """Open a context at each level, and measure it.  Returns plain values: the bytes of compute buffers by level,
        and from level "sched" two graphs, the tensors of weights and caches, and the buffers of results."""
        api, library = self.api, hook()
        params = self.parameters.context(api.llama_model_n_ctx_train(self.model))
        weights = {row[0] for row in library.simulated_tensors()}
        levels: dict[str, dict[tuple[str, str], int]] = {}
        found: dict[str, Any] = {"levels": levels}
        for level in ("off", "alloc", "sched"):
            library.pass_through(level == "off")
            library.schedule(level == "sched")
            most: dict[tuple[str, str], int] = {}
            graphs: list[dict[str, Any]] = []

            def measured(rows: list[tuple[str, str | None, int]], most: dict[tuple[str, str], int] = most,
                         graphs: list[dict[str, Any]] = graphs, level: str = level) -> None:
                held: dict[tuple[str, str], int] = {}
                for kind, device, nbytes in rows:
                    key = (device or "CPU", kind)
                    held[key] = held.get(key, 0) + nbytes
                for key, nbytes in held.items():
                    most[key] = max(most.get(key, 0), nbytes)
                if level == "sched" and len(graphs) < 2:
                    graphs.append(library.last_planned()[-1])

            library.measure(measured)
            failed = library.served()["failed"]
            ctx = api.llama_init_from_model(self.model, params)
            library.measure(None)
            if not ctx:
                raise SystemExit("llama.cpp did not open a context")
            # llama.cpp opens a context also where a graph was refused, and then there is nothing measured.
            if library.served()["failed"] != failed:
                raise SystemExit(f"a graph was refused at level {level}: {library.last_error()}")
            levels[level] = most
            if level == "sched":
                found |= {"graphs": graphs, "n_ctx": api.llama_n_ctx(ctx), "n_ubatch": api.llama_n_ubatch(ctx),
                          "n_seq": api.llama_n_seq_max(ctx),
                          "tensors": [(row, row[0] in weights) for row in library.simulated_tensors()],
                          "work": [row for row in library.open_buffers() if row[2]]}
            api.llama_free(ctx)
        return found

    def file_ranges(self, path: str, names: set[str]) -> int:
        """Bytes of a file from the first to the last of these tensors: what llama.cpp maps as one buffer."""
        ggml = self.ggml
        pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p

        class Init(ctypes.Structure):
            _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]

        file = ggml.function("gguf_init_from_file", pointer, text, Init)(os.fsencode(path), Init(True, None))
        if not file:
            raise SystemExit(f"{path} cannot be read")
        name = ggml.function("gguf_get_tensor_name", text, pointer, number)
        offset = ggml.function("gguf_get_tensor_offset", ctypes.c_size_t, pointer, number)
        size = ggml.function("gguf_get_tensor_size", ctypes.c_size_t, pointer, number)
        count = ggml.function("gguf_get_n_tensors", number, pointer)(file)
        spans = [(offset(file, i), offset(file, i) + size(file, i)) for i in range(count)
                 if name(file, i).decode(errors="replace") in names]
        ggml.function("gguf_free", None, pointer)(file)
        return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0

    def parts(self, path: str) -> list[str]:
        """The files of a model: one, or all parts of a split one."""
        get = self.api.llama_model_meta_val_str
        buffer = ctypes.create_string_buffer(32)
        count = int(buffer.value) if get(self.model, b"split.count", buffer, 32) > 0 else 1
        if count < 2:
            return [path]
        prefix, made = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(4096)
        if self.api.llama_split_prefix(prefix, 4096, os.fsencode(path), 0, count) == 0:
            return [path]
        found = []
        for i in range(count):
            self.api.llama_split_path(made, 4096, prefix.value, i, count)
            found.append(os.fsdecode(made.value))
        return found


def run(job: dict[str, Any], log: IO[str]) -> dict[str, Any]:
    """Open the model and its contexts; returns the measurements as plain values."""
    opened = Opened(job, log)
    found = opened.contexts()
    pairs: dict[int, dict[str, Any]] = {}
    for row, is_weight in found["tensors"]:
        context, name, kind, ne, nbytes, usage, buffer, device, total = row
        pair = pairs.setdefault(context, {"kind": "weights" if is_weight or usage == WEIGHTS else "caches",
                                          "buffer": buffer, "device": device or "CPU", "nbytes": [total],
                                          "mapped": False, "tensors": []})
        pair["tensors"].append((name, kind, ne, nbytes))
    if job["settings"]["use_mmap"]:
        map_weights(opened, job["path"], list(pairs.values()))
    api = opened.api
    return {"pairs": list(pairs.values()),
            "compute": {level: [(*key, nbytes) for key, nbytes in held.items()]
                        for level, held in found["levels"].items()},
            "work": [(device or "CPU", kind, nbytes) for kind, device, nbytes, *_ in found["work"]],
            "graphs": [planned["graph"] | {"residents": {str(i): usage for i, (usage, _)
                                                         in planned["residents"].items()}}
                       for planned in found["graphs"]],
            "devices": list(opened.devices), "n_ctx": found["n_ctx"], "n_ubatch": found["n_ubatch"],
            "n_seq": found["n_seq"], "n_layer": api.llama_model_n_layer(opened.model), "version": api.__version__}


def map_weights(opened: Opened, path: str, pairs: list[dict[str, Any]]) -> None:
    """For weights that llama.cpp leaves in the mapped file, replace their buffers' bytes by those of the mapping."""
    parts = opened.parts(path)
    for pair in pairs:
        handle = opened.devices.get(pair["device"])
        if pair["kind"] != "weights" or handle is None or not opened.ggml.is_mapped(handle):
            continue
        if opened._type_name(opened._buffer_type(handle)).decode() == pair["buffer"]:
            names = {name for name, *_ in pair["tensors"]}
            pair["nbytes"] = [opened.file_ranges(part, names) for part in parts]    # a buffer for each file
            pair["mapped"] = True


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # If the parent is killed, this process ends by itself.
    signal.alarm(int(job["deadline"]) + 2)
    with open(job["log"], "w", encoding="utf-8") as log:
        found = run(job, log)
        Path(job["result"]).write_text(json.dumps(found), encoding="utf-8")
    # Ends without freeing what llama.cpp has opened, which takes time: the system takes it back.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
