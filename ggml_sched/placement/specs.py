"""Reads devices and links as a command line gives them.

A device is `NAME:24GiB:1000GB/s:80TF`, or the name of a well-known device (`4090`), or a well-known device under
another name and with other numbers (`GPU0=4090:20GiB`).  The parts after the name may be in any order, as their units
tell them apart; `host` marks the host (a device named CPU is a host anyway), and `reserve=300MiB`, `launch=2.5us` and
`split=10us` set other fields.  A link is `25GB/s:8us` for all pairs, or `GPU0,GPU1=50GB/s:5us` for one pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ggml_sched.placement.devices import Device, Link
from ggml_sched.placement.known import Known, known_device

__all__ = ["read_bytes", "read_device", "read_devices", "read_link", "read_links", "with_host"]

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))?"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_BYTES = re.compile(rf"{_NUMBER}\s*([kmgtp]?)(i?)b?", re.I)
_BANDWIDTH = re.compile(rf"{_NUMBER}\s*([kmgtp]?)(i?)b/s", re.I)
_FLOPS = re.compile(rf"{_NUMBER}\s*([kmgtp])(?:flops?(?:/s)?|f|op/s|ops)", re.I)
_SECONDS = re.compile(rf"{_NUMBER}\s*(s|ms|us|µs|ns)")
_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_HOSTS = re.compile(r"(?:cpu|host)\d*", re.I)


def read_bytes(text: str, what: str = "memory") -> int:
    """A size such as `24GiB`, `300MiB`, `24GB` (10^9) or `1024`, in bytes; for other texts a ValueError with `what`."""
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{what} {text!r} is no size; sizes are 24GiB, 300MiB or 24GB")
    return int(_scaled(found))


def read_device(text: str) -> Device:
    """The device that `text` describes; ValueError, with the text, where it cannot be read."""
    head, *parts = (part.strip() for part in text.split(":"))
    name, given, model = (part.strip() for part in head.partition("="))
    fields: dict[str, Any] = {}
    for part in parts:
        field, value = _field(part, text)
        if field in fields:
            raise ValueError(f"device {text!r}: {part!r} is a second {field}")
        fields[field] = value
    if not name:
        raise ValueError(f"device {text!r} has no name")
    known: Known | None = None
    if given or not {"memory", "bandwidth", "flops"} <= set(fields):
        try:
            known = known_device(model if given else name)
        except ValueError as error:
            missing = {"memory", "bandwidth", "flops"} - set(fields)
            if given or not parts or len(missing) == 3:
                raise ValueError(f"device {text!r}: {error}") from None
            raise ValueError(f"device {text!r}: {_listed(missing)} missing, and no well-known device is called "
                             f"{name!r}") from None
    if known is not None:
        return known.device(name, fields.pop("memory", None)).replace(**fields)
    return Device(name, **{"host": _HOSTS.fullmatch(name) is not None, **fields})


def read_devices(texts: Iterable[str]) -> tuple[Device, ...]:
    """The devices of several texts.  Equal names of well-known devices get numbers: `4090.0` and `4090.1`.

    ValueError for two devices of one name.
    """
    given = list(texts)
    devices = [read_device(text) for text in given]
    plain = [text.partition(":")[0].strip() for text in given]
    unnamed = {name for name in plain if "=" not in name and plain.count(name) > 1 and _is_known(name)}
    for name in unnamed:
        same = [i for i, device in enumerate(devices) if device.name == name]
        for number, i in enumerate(same):
            devices[i] = devices[i].replace(name=f"{name}.{number}")
    names = [device.name for device in devices]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two devices have the name {name!r}: give them names, as in GPU0=...")
    return tuple(devices)


def with_host(devices: Iterable[Device]) -> tuple[Device, ...]:
    """The devices and, if none of them is the host, a usual desktop computer as the host."""
    given = tuple(devices)
    if any(device.host for device in given):
        return given
    name = next(name for name in ("CPU", "host", "the host") if all(device.name != name for device in given))
    return *given, known_device("desktop DDR5").device(name)


def read_link(text: str) -> Link:
    """The link that `text` describes, `25GB/s:8us` or `25GB/s`; ValueError, with the text, where it cannot be read."""
    bandwidth: float | None = None
    latency: float | None = None
    for part in text.split(":"):
        rate, time = _BANDWIDTH.fullmatch(part.strip()), _SECONDS.fullmatch(part.strip())
        if rate is not None and bandwidth is None:
            bandwidth = _scaled(rate)
        elif time is not None and latency is None:
            latency = _time(time)
        else:
            raise ValueError(f"link {text!r}: {part!r} is neither a bandwidth such as 25GB/s nor a time such as 8us")
    if bandwidth is None:
        raise ValueError(f"link {text!r} has no bandwidth; links are 25GB/s:8us")
    return Link(bandwidth, latency or 0.0)


def read_links(texts: Iterable[str]) -> Link | dict[tuple[str, str], Link] | None:
    """The links of several texts, as the argument `link` of `fit` accepts them; None if there are no texts."""
    links: dict[tuple[str, str], Link] = {}
    for text in texts:
        names, given, way = text.rpartition("=")
        pair = tuple(name.strip() for name in names.split(",")) if given else ("*", "*")
        if len(pair) != 2:
            raise ValueError(f"link {text!r}: {names!r} is not a pair of names, such as GPU0,GPU1")
        if pair in links:
            raise ValueError(f"link {text!r}: a second link of {'all' if pair[0] == '*' else ', '.join(pair)}")
        links[pair[0], pair[1]] = read_link(way)
    return links.get(("*", "*")) if set(links) <= {("*", "*")} else links


def _field(part: str, text: str) -> tuple[str, object]:
    """(The field of Device that `part` gives, its value); `text`: the whole description, for errors."""
    name, given, value = (piece.strip() for piece in part.partition("="))
    if given and name == "reserve":
        return name, read_bytes(value, f"device {text!r}: reserve")
    if given and name in ("launch", "split"):
        time = _SECONDS.fullmatch(value)
        if time is not None:
            return name, _time(time)
        raise ValueError(f"device {text!r}: {name} {value!r} is no time such as 2.5us")
    if part.lower() == "host":
        return "host", True
    for field, pattern in (("bandwidth", _BANDWIDTH), ("flops", _FLOPS)):
        found = pattern.fullmatch(part)
        if found is not None:
            return field, _scaled(found)
    found = _BYTES.fullmatch(part)
    if found is not None and part[-1] in "bB":
        return "memory", int(_scaled(found))
    raise ValueError(f"device {text!r}: {part!r} is none of a memory (24GiB), a bandwidth (1000GB/s), operations a "
                     "second (80TF), host, reserve=, launch= and split=")


def _scaled(found: re.Match[str]) -> float:
    """The value of a number with its unit."""
    base = 1024 if found.re.groups > 3 and found[4] else 1000
    return _bounded(found) * float(base ** _POWERS[found[3].lower()])


def _time(found: re.Match[str]) -> float:
    """The seconds of a time with its unit."""
    return _bounded(found) / _A_SECOND[found[3]]


def _bounded(found: re.Match[str]) -> float:
    """The number in front of a unit; ValueError if it is not below 10^40, so that products of it are finite."""
    value = float(f"{found[1]}e{found[2] or 0}")
    if value >= 1e40:
        raise ValueError(f"{found[0]!r} is out of range")
    return value


def _is_known(name: str) -> bool:
    try:
        return known_device(name) is not None
    except ValueError:
        return False


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return f"{', '.join(found)} {'is' if len(found) == 1 else 'are'}"
