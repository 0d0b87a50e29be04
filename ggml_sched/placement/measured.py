"""Keeps measured devices and links in a file that a user can read and edit: JSON; bytes, seconds, rates a second.

    {"format": "ggml-sched devices", "version": 1,
     "devices": [{"name": "CPU", "memory": 67000000000, "bandwidth": 6.1e10, "flops": 1.2e12, "host": true, ...}],
     "links": [{"from": "CPU", "to": "CUDA0", "bandwidth": 2.5e10, "latency": 8e-06}]}

Fields are those of `Device`; for fields that are left out its assumptions hold.  Files are not trusted: a defect is a
FileFormatError that names the file and the entry.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ggml_sched._files import write_text
from ggml_sched.backend import Backend
from ggml_sched.errors import FileFormatError
from ggml_sched.placement.devices import Device, Link
from ggml_sched.placement.measure import TYPES, measure, measure_links, memory_left

__all__ = ["NotKept", "default_path", "load_devices", "measured_devices", "save_devices"]

_FORMAT, _VERSION = "ggml-sched devices", 1
_MAX_BYTES = 1 << 20


class NotKept(RuntimeWarning):
    """What was measured is not kept, because the system does not let this process read or write the file."""


def default_path() -> Path:
    """Where measured devices are kept: `ggml-sched/devices.json` in the user's folder for configuration."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return Path(folder, "ggml-sched", "devices.json")


def save_devices(path: str | os.PathLike[str], devices: Sequence[Device],
                 links: Mapping[tuple[str, str], Link] | None = None) -> None:
    """Write devices and links; an existing file is replaced atomically, of a symbolic link the file that it names, and
    missing folders of the path are made."""
    data = {"format": _FORMAT, "version": _VERSION, "devices": [device.to_dict() for device in devices],
            "links": [{"from": a, "to": b, "bandwidth": way.bandwidth, "latency": way.latency}
                      for (a, b), way in (links or {}).items()]}
    os.makedirs(os.path.dirname(os.path.realpath(path)), exist_ok=True)
    write_text(path, json.dumps(data, indent=1) + "\n")


def load_devices(path: str | os.PathLike[str]) -> tuple[tuple[Device, ...], dict[tuple[str, str], Link]]:
    """The devices and links of a file; FileFormatError, with the entry, where it cannot be read."""
    with open(path, "rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise FileFormatError(f"{path}: more than {_MAX_BYTES} bytes")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
        raise FileFormatError(f"{path}: not a file of {_FORMAT!r}, version {_VERSION}")
    devices = tuple(_device(path, i, row) for i, row in enumerate(_rows(path, data, "devices")))
    names = [device.name for device in devices]
    if len(set(names)) < len(names):
        raise FileFormatError(f"{path}: two devices have one name")
    return devices, dict(_link(path, i, row, names) for i, row in enumerate(_rows(path, data, "links")))


def measured_devices(backends: Sequence[Backend], path: str | os.PathLike[str] | None = None,
                     types: Sequence[str] = TYPES,
                     again: bool = False) -> tuple[tuple[Device, ...], dict[tuple[str, str], Link]]:
    """The devices of real backends, and the links between them: from the file where it has them, else measured.

    What is measured is added to the file (`path`, default `default_path()`); `again` measures everything anew.  The
    `memory` of a device is what is left on it at this call.  A device of the file stands for a backend of the same
    name.  Backends of other processes, and links to them, are measured each time, because their names may stand for
    other machines next time.  A file that the system does not let this process read or write is a warning, NotKept:
    what was measured is returned, and not kept.  Raises as `measure`, and FileFormatError for a file that is none of
    these.
    """
    path = default_path() if path is None else Path(path)
    known: tuple[Device, ...] = ()
    links: dict[tuple[str, str], Link] = {}
    is_there, is_kept = True, True
    try:
        known, links = load_devices(path)
    except (FileNotFoundError, NotADirectoryError):
        is_there = False
    except OSError as error:
        is_kept = False     # the file may hold what its user has written
        warnings.warn(f"{path} cannot be read: {error.strerror}: what is measured is not kept", NotKept, stacklevel=2)
    by_name = {device.name: device for device in known}
    here = [backend for backend in backends if backend.worker is None]
    found = {}
    for backend in backends:
        kept = by_name.get(backend.name) if backend.worker is None else None
        if kept is None or again:
            kept = measure(backend, types)
        found[backend] = kept.on(backend).replace(memory=memory_left(backend))
    wanted = {(a.name, b.name) for a in here for b in here if a is not b}
    measures_links = again or not wanted <= set(links)
    if measures_links:
        links = {**links, **measure_links(here)}
    kept_here = [found[backend] for backend in here]
    if is_kept and here and (measures_links or any(device.name not in by_name for device in kept_here)
                             or not is_there):
        names = {device.name for device in kept_here}
        try:
            save_devices(path, [*(device for device in known if device.name not in names), *kept_here], links)
        except OSError as error:
            warnings.warn(f"{path} cannot be written: {error.strerror}: what was measured is not kept", NotKept,
                          stacklevel=2)
    ways = {pair: way for pair, way in links.items() if pair in wanted}
    if len(here) < len(backends):
        ways = measure_links(backends, known=ways)
    return tuple(found.values()), ways


def _rows(path: str | os.PathLike[str], data: dict[str, Any], field: str) -> list[Any]:
    rows = data.get(field, [])
    if not isinstance(rows, list):
        raise FileFormatError(f"{path}: {field} is not a list")
    return rows


def _device(path: str | os.PathLike[str], i: int, row: Any) -> Device:
    if not isinstance(row, dict):
        raise FileFormatError(f"{path}: device {i} is not an object")
    try:
        return Device.from_dict(row)
    except (TypeError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{path}: device {i}: {error}") from error


def _link(path: str | os.PathLike[str], i: int, row: Any, names: list[str]) -> tuple[tuple[str, str], Link]:
    try:
        pair, way = (row["from"], row["to"]), Link(row["bandwidth"], row.get("latency", 0.0))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise FileFormatError(f"{path}: link {i}: {error!r}") from error
    for name in pair:
        if name not in names:
            raise FileFormatError(f"{path}: link {i}: no device has the name {name!r}")
    return pair, way
