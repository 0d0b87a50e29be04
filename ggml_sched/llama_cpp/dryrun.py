"""Dry runs: the graphs, weights, caches and bytes of every buffer that llama.cpp would have for a model, without
allocating.

llama.cpp itself opens the model, in a process of its own and with a deadline, because it aborts on combinations that it
does not support.  Reads the metadata of the file and no weights.  All sizes are bytes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ggml_sched.errors import BackendError
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict
from ggml_sched.llama_cpp.held import Held
from ggml_sched.llama_cpp.parameters import check_settings

if TYPE_CHECKING:
    from ggml_sched._graph import Graph

__all__ = ["DryRun", "DryRunError", "Piece", "Resident", "compute_of", "dry_run"]

ALIGNMENT = 128
"""Bytes: every address of a tensor on an imitated device is a multiple of them, as with CUDA."""
ERROR, WARNING = 4, 3
"""llama.cpp's levels of messages."""
VIEWS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
"""Ops of nodes that compute nothing."""
LAST_WORDS = 600
"""The most characters of llama.cpp's messages that an error repeats: the last ones."""


class DryRunError(BackendError):
    """llama.cpp refused a dry run, aborted, or did not end before the deadline.

    `message` is llama.cpp's last one; `status` the exit status of its process, negative for a signal, None if the
    deadline has passed.
    """

    def __init__(self, text: str, message: str = "", status: int | None = None) -> None:
        super().__init__(text)
        self.message = message
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return DryRunError, (self.args[0], self.message, self.status)


@dataclass(frozen=True)
class Resident:
    """A weight, a cache, or a state of a recurrent layer, and the buffer type that llama.cpp chose for it."""

    name: str
    kind: str
    """"weights" or "caches"."""
    type: str
    ne: tuple[int, ...]
    nbytes: int
    buffer: str
    device: str


@dataclass(frozen=True)
class Piece:
    """The bytes of one buffer type for one purpose."""

    device: str
    buffer: str
    kind: str
    nbytes: int
    mapped: bool = False


@dataclass(frozen=True, eq=False)
class DryRun:
    """The result of `dry_run`: a value, picklable and comparable, without memory of a device.

    `memory(level)` has the bytes of every device: at level "off" those of an unmodified llama.cpp, at "alloc" and
    "sched" those with this package's allocator or scheduler behind it.
    """

    path: str
    settings: Mapping[str, object]
    """The settings with which llama.cpp opened the model, defaults included."""
    prompt: Graph
    """The graph of the largest batch that llama.cpp reserves, `n_ubatch` tokens."""
    token: Graph
    """The graph of one token of each sequence."""
    residents: tuple[Resident, ...]
    pieces: tuple[Piece, ...]
    """Buffers of weights, caches and results: the same at every level."""
    compute: Mapping[str, tuple[Piece, ...]]
    """{level of the hook: compute buffers}."""
    devices: tuple[str, ...]
    version: str
    """The version of llama-cpp-python."""

    @property
    def graphs(self) -> tuple[Graph, Graph]:
        """The graphs of a token and of a prompt, in the order of a goal (token, prompt)."""
        return self.token, self.prompt

    def memory(self, level: str = "off") -> dict[str, Held]:
        """{device: bytes} that llama.cpp allocates with these settings."""
        if level not in self.compute:
            raise ValueError(f"level={level!r} is not one of {', '.join(self.compute)}")
        fields: dict[str, dict[str, int]] = {name: {} for name in self.devices}
        for piece in (*self.pieces, *self.compute[level]):
            of = fields.setdefault(piece.device, {})
            of[piece.kind] = of.get(piece.kind, 0) + piece.nbytes
            if piece.mapped:
                of["mapped"] = of.get("mapped", 0) + piece.nbytes
        return {name: Held(**of) for name, of in fields.items()}

    def buffers(self, level: str = "off") -> dict[tuple[str, str], int]:
        """{(buffer type, what it is for): bytes}, as llama.cpp allocates them."""
        if level not in self.compute:
            raise ValueError(f"level={level!r} is not one of {', '.join(self.compute)}")
        found: dict[tuple[str, str], int] = {}
        for piece in (*self.pieces, *self.compute[level]):
            if piece.nbytes:
                key = (piece.buffer, piece.kind)
                found[key] = found.get(key, 0) + piece.nbytes
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the graphs as `save_graph` writes them."""
        return {"path": self.path, "settings": dict(self.settings), "version": self.version,
                "devices": list(self.devices),
                "memory": {level: {name: vars(held) | {"total": held.total} for name, held in
                                   self.memory(level).items()} for level in self.compute},
                "residents": [vars(one) | {"ne": list(one.ne)} for one in self.residents],
                "pieces": [vars(piece) for piece in self.pieces],
                "compute": {level: [vars(piece) for piece in pieces] for level, pieces in self.compute.items()},
                "prompt": graph_to_dict(self.prompt), "token": graph_to_dict(self.token)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> DryRun:
        """The DryRun from which `to_dict` made these values."""
        return DryRun(values["path"], values["settings"], graph_from_dict(values["prompt"]),
                      graph_from_dict(values["token"]),
                      tuple(Resident(**{**one, "ne": tuple(one["ne"])}) for one in values["residents"]),
                      tuple(Piece(**piece) for piece in values["pieces"]),
                      {level: tuple(Piece(**piece) for piece in pieces)
                       for level, pieces in values["compute"].items()},
                      tuple(values["devices"]), values["version"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DryRun) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.path, self.residents, self.pieces))

    def __reduce__(self) -> tuple[Any, ...]:
        return DryRun.from_dict, (self.to_dict(),)

    def __str__(self) -> str:
        from ggml_sched.planning.tables import table

        rows = [["device", "weights", "caches", "compute", "work", "total"],
                *([name, *(f"{n:,}" for n in (held.weights, held.caches, held.compute, held.work, held.total))]
                  for name, held in self.memory().items())]
        return f"{self.path}: bytes with llama-cpp-python {self.version}\n\n{table(rows, underlined=True)}"


def dry_run(path: str | bytes | os.PathLike[Any], *, devices: Iterable[object] | None = None, pipeline: bool = False,
            deadline: float = 60.0, **settings: object) -> DryRun:
    """Let llama.cpp open a model without its weights, and return what it would allocate and compute.

    `settings` are arguments of `llama_cpp.Llama`, with its defaults, and fields of llama.cpp's structs of parameters:
    `n_ctx`, `n_ubatch`, `n_seq_max`, `n_gpu_layers`, `tensor_split`, `type_k`, `flash_attn` (True, False, "auto"),
    `override_tensor` ({regular expression: device}), ...

    `devices`: imitated devices, which llama.cpp sees beside the CPU instead of those of this machine: a name, a pair of
    name and bytes, or a `Device` each; hosts among them are left out.  They support what the CPU supports, and do not
    pad tensors as some real devices do.  `pipeline`: whether they have events, as CUDA's do.  `deadline`: seconds after
    which the process of the dry run is killed.

    Raises DryRunError with llama.cpp's last message if it refuses, aborts or exceeds the deadline; TypeError and
    ValueError for settings that it does not have, or whose fields do not hold the value; FileNotFoundError without the
    file.
    """
    given = check_settings(settings)
    if not 0 < deadline < 86400:
        raise ValueError(f"deadline={deadline!r} is not between 0 and 86400 seconds")
    path = os.path.abspath(os.fsdecode(path))
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    with tempfile.TemporaryDirectory(prefix="ggml-sched-") as folder:
        job = {"path": path, "settings": given, "devices": None if devices is None else _described(devices),
               "pipeline": bool(pipeline), "deadline": float(deadline), "log": os.path.join(folder, "log"),
               "result": os.path.join(folder, "result.json")}
        Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
        if not sys.executable:
            raise DryRunError("this Python does not say where its program is, which a dry run starts again")
        status, printed = _start(folder, deadline)
        if status != 0:
            raise _failure(path, Path(folder, "log"), status, printed, deadline)
        found = json.loads(Path(job["result"]).read_text(encoding="utf-8"))  # type: ignore[arg-type]
    return _made(path, given, found)


def compute_of(path: str | bytes | os.PathLike[Any], **settings: object) -> Callable[[Any], dict[str, int]]:
    """A function that returns, for a `Stock`, {device: bytes of its compute buffers} of an unmodified llama.cpp.  Given
    it as argument `compute`, `Fit.llama_cpp` keeps the budgets to the byte.

    `settings` are those of `dry_run` that a `Stock` does not have.  Raises what `dry_run` raises.
    """
    def measured(stock: Any) -> dict[str, int]:
        run = dry_run(path, devices=stock.order, **{**settings, **stock.settings})
        return {name: held.compute for name, held in run.memory().items()}

    return measured


def _described(devices: Iterable[object]) -> list[tuple[str, int, int]]:
    """(name, bytes, alignment) of each device that is to be imitated."""
    if isinstance(devices, (str, bytes)):
        raise TypeError(f"devices={devices!r} is one text and no list of devices")
    made: list[tuple[str, int, int]] = []
    for device in devices:
        if isinstance(device, str):
            made.append((device, 1 << 40, ALIGNMENT))
        elif isinstance(device, Sequence) and len(device) == 2 and isinstance(device[0], str):
            made.append((device[0], _memory_of(device[0], device[1]), ALIGNMENT))
        elif hasattr(device, "memory") and hasattr(device, "host"):
            if not device.host:
                made.append((str(device.name), _memory_of(device.name, device.memory), ALIGNMENT))  # type: ignore[attr-defined]
        else:
            raise TypeError(f"devices: {device!r} is not a name, a pair of name and bytes, or a Device")
    names = [name for name, *_ in made]
    if len({*names, "CPU"}) <= len(names) or "" in names:
        raise ValueError(f"devices: names are different, not empty and not 'CPU': {', '.join(names)}")
    if any("\0" in name for name in names):
        raise ValueError(f"devices: a name has a zero byte: {names!r}")
    if len(made) > 15:
        raise ValueError(f"{len(made)} devices: ggml's scheduler takes 15 at most beside the CPU")
    return made


def _memory_of(name: str, memory: Any) -> int:
    """The bytes of a device, checked."""
    if isinstance(memory, (str, bytes, bool)):
        raise TypeError(f"devices: {name!r} has memory={memory!r}, which is no number of bytes")
    if not 0 <= memory < 1 << 64:
        raise ValueError(f"devices: {name!r} has memory={memory!r}, which is no number of bytes in 64 bits")
    return int(memory)


def _start(folder: str, deadline: float) -> tuple[int | None, str]:
    """Run the process of a dry run.  Returns its exit status, None if the deadline has passed, and its stderr."""
    packages = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join([packages, *filter(None, sys.path)])
    # GGML_NO_BACKTRACE: a backtrace, for which an aborting ggml starts a debugger, takes seconds.
    environment = os.environ | {"GGML_SCHED": "alloc", "GGML_NO_BACKTRACE": "1", "PYTHONPATH": path,
                                "PYTHONSAFEPATH": "1"}
    with open(os.path.join(folder, "stderr"), "w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "ggml_sched.llama_cpp.dryrun_child", os.path.join(folder, "job.json")],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=printed, env=environment,
            start_new_session=True)
        try:
            status: int | None = process.wait(deadline)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        return status, printed.read()


def _failure(path: str, log: Path, status: int | None, printed: str, deadline: float) -> DryRunError:
    """The error of a process that did not succeed, with llama.cpp's assertion, else its last errors, else its last
    warning, else the last line of stderr."""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors, warnings = ([line[2:] for line in said if line.startswith(f"{level} ")] for level in (ERROR, WARNING))
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    asserted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
    message = "; ".join(asserted or errors[-2:] or warnings[-1:] or lines[-1:])[-LAST_WORDS:]
    how = (f"did not end within {deadline:g} s" if status is None else
           f"was ended by {_signal_name(-status)}" if status < 0 else "refused")
    return DryRunError(f"{path}: llama.cpp {how}: {message or 'no message'}", message, status)


def _signal_name(number: int) -> str:
    """SIGABRT, ...; of the real-time signals only the first and the last have names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _made(path: str, settings: Mapping[str, object], found: Mapping[str, Any]) -> DryRun:
    pairs = found["pairs"]
    residents = tuple(Resident(name, pair["kind"], kind, tuple(ne), nbytes, pair["buffer"], pair["device"])
                      for pair in pairs for name, kind, ne, nbytes in pair["tensors"])
    pieces = (*(Piece(pair["device"], pair["buffer"], pair["kind"], nbytes, pair["mapped"])
                for pair in pairs for nbytes in pair["nbytes"] if nbytes),
              *(Piece(device, buffer, "work", nbytes) for device, buffer, nbytes in found["work"]))
    compute = {level: tuple(Piece(device, buffer, "compute", nbytes) for device, buffer, nbytes in rows)
               for level, rows in found["compute"].items()}
    prompt, token = (_graph(values, path, settings, found) for values in found["graphs"])
    return DryRun(path, {**settings, "n_ctx": found["n_ctx"], "n_ubatch": found["n_ubatch"]}, prompt, token, residents,
                  pieces, compute, tuple(found["devices"]), found["version"])


def _graph(values: dict[str, Any], path: str, settings: Mapping[str, object], found: Mapping[str, Any]) -> Graph:
    """A graph of llama.cpp's, whose weights and caches are marked as residents."""
    for key, usage in values.pop("residents").items():
        values["tensors"][int(key)]["resident"] = "weight" if usage == "weights" else "kv"
    _drop_keepers(values)
    tokens = next((tensor["ne"][0] for tensor in values["tensors"] if tensor["name"] == "inp_tokens"), 0)
    values["meta"] = {"model": os.path.basename(path), "source": f"llama-cpp-python {found['version']}",
                      "n_ctx": found["n_ctx"], "n_tokens": tokens, "n_seqs": found["n_seq"],
                      "n_layer": found["n_layer"],
                      "flash_attn": any(tensor["op"] == "FLASH_ATTN_EXT" for tensor in values["tensors"])}
    return graph_from_dict(values, where=path)


def _drop_keepers(values: dict[str, Any]) -> None:
    """Remove the hook's keepers: nodes without elements, which no backend supports.  They keep the memory of leafs that
    no node reads (graph_reader.c), and come last among the tensors.  The next node that computes, or the last one,
    keeps these leafs instead."""
    tensors, nodes = values["tensors"], values["nodes"]
    keepers = {i for i in nodes if tensors[i]["op"] == "CUSTOM" and not tensors[i]["name"] and not tensors[i]["ne"][0]}
    computing = [(at, i) for at, i in enumerate(nodes) if i not in keepers and tensors[i]["op"] not in VIEWS]
    for at, i in enumerate(nodes):
        if i in keepers and computing:
            by = next((node for position, node in computing if position > at), computing[-1][1])
            tensors[by].setdefault("deps", []).extend(tensors[i]["src"])
    values["nodes"] = [i for i in nodes if i not in keepers]
    del tensors[min(keepers, default=len(tensors)):]
