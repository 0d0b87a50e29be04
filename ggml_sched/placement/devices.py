"""Devices and links as placement sees them: bytes, speeds, and fixed prices, without what computes there.

A `Device` and a `Link` are values: equal if their numbers are, hashable, picklable.  `Links` has the price of a copy
between any two of some devices as arrays.  Bytes are bytes, times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ggml_sched._graph import Type, lone_surrogate
from ggml_sched.backend import Backend
from ggml_sched.backends.dry import DryBackend

__all__ = ["ATTENTION", "DEFAULT_LINK", "DRIVER", "Device", "Driver", "Link", "LinkLike", "Links", "PROMPT_ATTENTION",
           "Rates"]

ATTENTION, PROMPT_ATTENTION = "attention", "attention of prompts"
"""The kinds of nodes that read a cache for attention: of few tokens, and of many.  Other kinds are types of weights."""
DRIVER = "driver"
"""The name of the device for this process, which is the host where some backends are of other processes, and none is a
host."""
_HOST_LAUNCH, _LAUNCH = 4e-6, 2.5e-6
_HOST_SPLIT, _SPLIT = 5e-6, 10e-6
_FASTEST, _LONGEST = 1e30, 1e6
"""The largest rate (bytes or operations a second) and the longest time (seconds) that a device or link may have, so
that every price of a plan is finite and above 0."""


class Rates(Mapping[str, float]):
    """A rate for each of some types of weights, by the type's name ("q4_0"): a mapping that is hashable."""

    __slots__ = ("_items",)

    def __init__(self, rates: Mapping[str, float]) -> None:
        self._items: tuple[tuple[str, float], ...] = tuple(sorted(rates.items()))

    def __getitem__(self, kind: str) -> float:
        for name, rate in self._items:
            if name == kind:
                return rate
        raise KeyError(kind)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(self._items)

    def __reduce__(self) -> tuple[type[Rates], tuple[dict[str, float]]]:
        return Rates, (dict(self._items),)

    def __repr__(self) -> str:
        return repr(dict(self._items))


@dataclass(frozen=True)
class Link:
    """A way for copies: `latency` in seconds a copy, `bandwidth` in bytes a second."""

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        vars(self)["bandwidth"] = _rate("a link", "bandwidth", self.bandwidth)
        vars(self)["latency"] = _seconds("a link", "latency", self.latency)


@dataclass(frozen=True, init=False)
class Device:
    """The numbers of one device that placement depends on: how much it holds, and how fast it computes.

    `memory`: bytes left on it; `reserve`: those of them that are never used.  `bandwidth` in bytes a second, `flops` in
    operations a second; `bandwidths` and `flops_of` replace these two for nodes that read a weight of a type, such as
    {"q4_0": 40e12}, or caches ("attention", and "attention of prompts" for many tokens).  `launch`: seconds that a
    node takes at least (default 4 us on a host, 2.5 us elsewhere); `split`: seconds to begin a split (default 5 us on a
    host, 10 us elsewhere).  `host`: whether this is the processor that has the inputs, and through which other devices
    exchange data.  `alignment`: every address on it is a multiple of so many bytes.  `measured`: the names of the
    fields that were measured; the others are assumed.  `fetch`: the disk of a host, as a `Link` or as bytes a second:
    where weights do not fit all devices together, each evaluation fetches some from there; None: all weights have to
    fit.  `backend`: the real backend that it describes; without one a `DryBackend` of this name and budget, made when
    it is first used.

    Raises TypeError and ValueError, which name the device, for numbers that no device can have.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    host: bool
    launch: float
    split: float
    reserve: int
    bandwidths: Rates
    flops_of: Rates
    alignment: int
    measured: frozenset[str]
    fetch: Link | None
    _backend: Backend | None = field(init=False, compare=False, repr=False)

    def __init__(self, name: str, memory: int, bandwidth: float, flops: float, host: bool = False,
                 launch: float | None = None, split: float | None = None, reserve: int = 0,
                 bandwidths: Mapping[str, float] | None = None, flops_of: Mapping[str, float] | None = None,
                 alignment: int = 64, measured: Iterable[str] = frozenset(), backend: Backend | None = None,
                 fetch: Link | float | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a device is a text that is not empty, not {name!r}")
        what = f"device {name!r}"
        if found := lone_surrogate(name):
            raise ValueError(f"{what}: the name has the lone surrogate {found}")
        if launch is None:
            launch = _HOST_LAUNCH if host else _LAUNCH
        if split is None:
            split = _HOST_SPLIT if host else _SPLIT
        known = frozenset(measured)
        unknown = sorted(known.difference(_FIELDS))
        values: dict[str, object] = {
            "name": name, "memory": _bytes(what, "memory", memory),
            "bandwidth": _rate(what, "bandwidth", bandwidth), "flops": _rate(what, "flops", flops), "host": bool(host),
            "launch": _seconds(what, "launch", launch), "split": _seconds(what, "split", split),
            "reserve": _bytes(what, "reserve", reserve), "bandwidths": _rates(what, "bandwidths", bandwidths),
            "flops_of": _rates(what, "flops_of", flops_of), "alignment": _bytes(what, "alignment", alignment),
            "measured": known, "fetch": _disk(what, fetch), "_backend": backend}
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{what}: an alignment of {alignment} bytes is not a power of two")
        if unknown:
            raise ValueError(f"{what}: measured names {unknown}, which are no fields")
        if backend is not None and not isinstance(backend, Backend):
            raise TypeError(f"{what}: backend is a Backend, not {backend!r}")
        if fetch is not None and not host:
            raise ValueError(f"{what} is no host: only a host fetches weights in each evaluation")
        vars(self).update(values)

    @property
    def budget(self) -> int:
        """Bytes that a placement may use: `memory` without `reserve`."""
        return max(0, self.memory - self.reserve)

    @property
    def backend(self) -> Backend:
        """The real backend that this describes, or a `DryBackend` with this name, alignment and budget."""
        if self._backend is not None:
            return self._backend
        made = vars(self).get("_dry")
        if made is None:
            made = DryBackend(self.name, alignment=self.alignment, memory=self.budget)
            made.is_host = self.host
            made.concurrent_copies = self.fetch is not None     # as of backends over host memory
            made = vars(self).setdefault("_dry", made)      # another thread may have stored one: both get the same
        backend: Backend = made
        return backend

    def on(self, backend: Backend) -> Self:
        """This device with `backend` as its backend, and with that backend's alignment."""
        return self.replace(alignment=backend.alignment, backend=backend)

    def replace(self, **fields: Any) -> Self:
        """This device with other values of some fields, named as in `Device(...)`."""
        return type(self)(**{**{name: getattr(self, name) for name in _FIELDS}, "backend": self._backend, **fields})

    def rates(self, kind: str | None) -> tuple[float, float]:
        """Bytes and operations a second for nodes of a kind: the type of their weight, "attention", "attention of
        prompts", or None."""
        if kind is None:
            return self.bandwidth, self.flops
        return self.bandwidths.get(kind, self.bandwidth), self.flops_of.get(kind, self.flops)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        disk = None if self.fetch is None else {"bandwidth": self.fetch.bandwidth, "latency": self.fetch.latency}
        return {**fields, "bandwidths": dict(self.bandwidths), "flops_of": dict(self.flops_of),
                "measured": sorted(self.measured), "fetch": disk}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The device of which `to_dict` gave these fields.  ValueError for an unknown or a missing field."""
        unknown, missing = set(fields) - set(_FIELDS), {"name", "memory", "bandwidth", "flops"} - set(fields)
        if unknown or missing:
            raise ValueError(f"device {fields.get('name')!r}: unknown fields {sorted(unknown)}, missing fields "
                             f"{sorted(missing)}")
        disk = fields.get("fetch")
        return cls(**{**fields, "measured": frozenset(fields.get("measured", ())),
                      "fetch": Link(**disk) if isinstance(disk, Mapping) else disk})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the device without its backend."""
        return type(self).from_dict, (self.to_dict(),)


_FIELDS = ("name", "memory", "bandwidth", "flops", "host", "launch", "split", "reserve", "bandwidths", "flops_of",
           "alignment", "measured", "fetch")


class Driver(Device):
    """The host that `fit` adds where some backends are of other processes, and none is a host: this process.

    Its `memory` is not what this process has, but what inputs and outputs need, so that little else is placed here.  It
    bounds no evaluation; the memory of a device that the caller gives and names "driver" does.
    """


def _number(what: str, name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{what}: {name} is a number, not {value!r}") from None
    except OverflowError:
        return math.inf


def _rate(what: str, name: str, value: object) -> float:
    rate = _number(what, name, value)
    if not 1 <= rate <= _FASTEST:
        raise ValueError(f"{what}: {name} is {rate:g} a second; a rate is at least 1 and at most {_FASTEST:g}")
    return rate


def _disk(what: str, fetch: Link | float | None) -> Link | None:
    return fetch if fetch is None or isinstance(fetch, Link) else Link(_rate(what, "fetch", fetch))


def _rates(what: str, name: str, given: Mapping[str, float] | None) -> Rates:
    known = {ATTENTION, PROMPT_ATTENTION, *map(str, Type)}
    for kind in given or ():
        if kind not in known:
            raise ValueError(f"{what}: {name} names the type {kind!r}; types are {', '.join(sorted(known))}")
    return Rates({kind: _rate(what, f"{name} of {kind}", rate) for kind, rate in (given or {}).items()})


def _seconds(what: str, name: str, value: object) -> float:
    seconds = _number(what, name, value)
    if not 0 <= seconds <= _LONGEST:
        raise ValueError(f"{what}: {name} is {seconds:g} seconds; a time is at least 0 and at most {_LONGEST:g}")
    return seconds


def _bytes(what: str, name: str, value: Any) -> int:
    try:
        nbytes = index(value)
    except TypeError:
        raise TypeError(f"{what}: {name} is a whole number of bytes, not {value!r}") from None
    if not 0 <= nbytes < 1 << 63:
        raise ValueError(f"{what}: {name} of {nbytes} bytes is negative or too large")
    return nbytes


LinkLike: TypeAlias = "Link | Mapping[tuple[str, str], Link] | None"
"""What `link=` accepts: one link for all, links by the names of two devices, or None for `DEFAULT_LINK`."""

DEFAULT_LINK = Link(25e9, 8e-6)
"""16 lanes of PCIe 4.0 as copies from pinned memory reach them: what is assumed where nothing is given."""


class Links:
    """The price of a copy from each device to each other: `latency` [from, to] in seconds a copy, `per_byte` [from, to]
    in seconds a byte; both are 0 on the diagonal.

    `link` is a `Link` between the host and every other device, or a mapping {(from, to): Link} by names.  A link that
    is given in one direction alone holds for both, and the pair ("*", "*") stands for all pairs of the host and
    another device that are not given.  Two devices that are no hosts and have no link of their own exchange data
    through the host: the price is the sum of both copies.
    """

    def __init__(self, devices: Sequence[Device], link: LinkLike = None) -> None:
        names = [device.name for device in devices]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two devices have the name {twice!r}")
        given = _by_pair(link, names)
        n = len(devices)
        self.latency: NDArray[np.float64] = np.zeros((n, n))
        self.per_byte: NDArray[np.float64] = np.zeros((n, n))
        host = next((i for i, device in enumerate(devices) if device.host), None)
        for i, a in enumerate(devices):
            for j, b in enumerate(devices):
                if i == j:
                    continue
                own = given.get((a.name, b.name), given.get((b.name, a.name)))
                if own is not None or a.host or b.host:
                    parts = [own or given["*", "*"]]
                elif host is None:
                    parts = [given["*", "*"]] * 2
                else:
                    through = devices[host].name
                    parts = [given.get((a.name, through), given.get((through, a.name), given["*", "*"])),
                             given.get((through, b.name), given.get((b.name, through), given["*", "*"]))]
                self.latency[i, j] = sum(part.latency for part in parts)
                self.per_byte[i, j] = sum(1 / part.bandwidth for part in parts)

    def __repr__(self) -> str:
        return f"<Links of {len(self.latency)} devices>"


def _by_pair(link: LinkLike, names: Sequence[str]) -> dict[tuple[str, str], Link]:
    if link is None or isinstance(link, Link):
        return {("*", "*"): link or DEFAULT_LINK}
    if not isinstance(link, Mapping):
        raise TypeError(f"link is a Link, a mapping of pairs of names to Link, or None, not {link!r}")
    for pair, way in link.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(way, Link)):
            raise TypeError(f"link: {pair!r}: {way!r} is not a pair of names and its Link")
        unknown = [name for name in pair if name not in names and pair != ("*", "*")]
        if unknown:
            raise ValueError(f"link {pair!r}: no device has the name {unknown[0]!r}; names are {', '.join(names)}")
        if pair[0] == pair[1] and pair != ("*", "*"):
            raise ValueError(f"link {pair!r} goes from a device to itself")
    return {("*", "*"): DEFAULT_LINK, **link}
