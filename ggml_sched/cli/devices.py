"""The options that describe devices and links, for every command that places: --device, --link, --measure."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggml_sched import Backend, Device, Link
    from ggml_sched.placement.devices import LinkLike

__all__ = ["add_device_arguments", "devices_of", "link_of", "measure_apart", "measured", "pins_of", "with_disk"]


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--device", action="append", default=[], metavar="NAME:MEMORY:BANDWIDTH:FLOPS",
                       help="a device, such as GPU0:24GiB:1000GB/s:80TF, or the name of a well-known one, such as "
                            "4090; repeatable; one named CPU is the host (default: that of a usual desktop)")
    group.add_argument("--link", action="append", default=[], metavar="BANDWIDTH:LATENCY",
                       help="the link between devices, such as 25GB/s:8us, or GPU0,GPU1=50GB/s:5us for a pair")
    group.add_argument("--disk", metavar="BANDWIDTH:LATENCY",
                       help="the disk of the host, such as 2GB/s:100us: where the weights do not fit, each evaluation "
                            "fetches some from it while it computes with others")
    group.add_argument("--reserve", metavar="SIZE", help="bytes of each device but the host that are never used")
    group.add_argument("--measure", nargs="*", metavar="BACKEND",
                       help="these backends of this machine, too (default: cpu): measured once, in seconds, and kept "
                            "in a file (docs/fit.md)")


def devices_of(args: argparse.Namespace, stack: ExitStack) -> tuple[Device, ...]:
    """The devices of a command line; `stack` closes the backends that were opened to be measured.  The links that were
    measured between them become `args.measured_links`, for `link_of`."""
    from ggml_sched.llama.defaults import named_backends
    from ggml_sched.placement.specs import read_bytes, read_devices, with_host

    devices = list(read_devices(args.device))
    links: dict[tuple[str, str], Link] = {}
    if args.measure is not None or not devices:
        backends = [stack.enter_context(backend) for backend in named_backends(args.measure or ["cpu"])]
        found, links = measured(backends)
        devices += found
    devices = list(with_host(devices))
    names = {device.name for device in devices}
    args.measured_links = {pair: way for pair, way in links.items() if names.issuperset(pair)}
    if args.reserve is not None:
        size = read_bytes(args.reserve, "--reserve")
        devices = [device if device.host else device.replace(reserve=size) for device in devices]
    return with_disk(devices, args.disk)


def with_disk(devices: Sequence[Device], disk: str | None) -> tuple[Device, ...]:
    """The devices, with the disk that --disk describes at the host, if there is one."""
    from ggml_sched.placement.specs import read_link

    if disk is None:
        return tuple(devices)
    try:
        link = read_link(disk)
    except ValueError as error:
        raise ValueError(f"--disk {disk}: {error}") from None
    return tuple(device.replace(fetch=link) if device.host else device for device in devices)


def measured(backends: Sequence[Backend]) -> tuple[tuple[Device, ...], dict[tuple[str, str], Link]]:
    """The devices and links of `measured_devices`; why they are not kept, if so, is printed to standard error;
    other warnings, such as NumPy's, are not."""
    from ggml_sched.placement.measured import NotKept, measured_devices

    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", NotKept)
        found = measured_devices(backends)
    for warning in raised:
        if issubclass(warning.category, NotKept):
            print("ggml-sched:", warning.message, file=sys.stderr, flush=True)
    return found


def measure_apart(backends: Sequence[Backend], names: Sequence[str], threads: int | None) -> None:
    """Measure local backends in a process of its own, if the file of devices does not have all of them: to measure
    takes hundreds of MiB, which would exceed a limit of this process.  Where that fails, or the file cannot be written,
    `measured` measures them in this process.  `names`: those of `named_backends`, none for the default backend."""
    import subprocess

    from ggml_sched.errors import FileFormatError
    from ggml_sched.placement.measured import default_path, load_devices

    try:
        known = {device.name for device in load_devices(default_path())[0]}
    except (OSError, FileFormatError):
        known = set()
    if not known >= {backend.name for backend in backends if backend.worker is None}:
        code = "import sys; from ggml_sched.cli.devices import measure_named as run; run(*sys.argv[1:])"
        subprocess.run([sys.executable, "-c", code, str(threads or ""), *names], capture_output=True, check=False)


def measure_named(threads: str, *names: str) -> None:
    """What the process of `measure_apart` does."""
    from ggml_sched.llama.defaults import default_backend, named_backends

    n_threads = int(threads) if threads else None
    with ExitStack() as stack:
        opened = named_backends(names, n_threads) if names else [default_backend(n_threads)]
        measured([stack.enter_context(backend) for backend in opened])


def link_of(args: argparse.Namespace) -> LinkLike:
    """The argument `link` of `gs.fit`: from --link, which counts more, and from what `devices_of` has measured; None
    without both.  A link without names is that of all pairs, so that no measured one is used beside it."""
    from ggml_sched import Link
    from ggml_sched.placement.specs import read_links

    given, known = read_links(args.link) or {}, args.measured_links
    if isinstance(given, Link) or ("*", "*") in given:
        return given
    return {pair: way for pair, way in known.items() if pair[::-1] not in given} | given or None


def pins_of(texts: Sequence[str]) -> dict[str, str]:
    """{name or pattern of weights and caches: name of a device}, from texts like `token_embd*=CPU`."""
    pins: dict[str, str] = {}
    for text in texts:
        name, found, device = text.rpartition("=")
        if not found or not name or not device:
            raise ValueError(f"--pin {text}: not NAME=DEVICE")
        if pins.setdefault(name, device) != device:
            raise ValueError(f"--pin {text}: {name} is pinned to {pins[name]}, too")
    return pins
