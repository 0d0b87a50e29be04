"""Tensors as values of a message, and back.

A layout is sent without strides: as its axes from the innermost to the outermost, each with its stride as a multiple of
that of the axis before it (of those with several elements).  The receiver multiplies them with checked arithmetic, so
that no two elements of a tensor can lie at one place, and checks that the result lies in its buffer.

    tensor     {"t": type, "ne": [ne0, ne1, ne2, ne3]}, and fields that may be left out, for:
               "axes": [[axis, steps], ...]     a contiguous tensor
               "at": [buffer, offset]           a tensor without a place
               "op", "p", "s", "v", "n", "f"    op NONE; no parameters, sources, [root, offset], name, flags

Sources and roots are positions of tensors that stand before in the same list, -1 for a source that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggml_sched._graph import Context, Tensor, Type, bind_resident
from ggml_sched.errors import Error, PlacementError
from ggml_sched.remote.messages import MAX_NUMBER, MessageError, fields_of, natural, text

if TYPE_CHECKING:
    from ggml_sched.backend import Buffer

__all__ = ["Described", "bytes_at", "described", "layout_values", "strides", "tensors_of", "values_of"]

TYPES = {str(kind): kind for kind in Type}
MAX_TENSORS = 1 << 20
FLAGS = ("input", "output")


def layout_values(t: Tensor) -> dict[str, Any]:
    """Type, extents and, unless the tensor is contiguous, axes.

    PlacementError for strides that are no multiples of each other, which no op of a language model makes.
    """
    values: dict[str, Any] = {"t": str(t.type), "ne": list(t.ne)}
    if t.nb == strides(t.type, t.ne, None) or not t.n_elements:
        return values
    unit, axes = t.type.type_size, []
    counts = [t.ne[0] // t.type.block_size, *t.ne[1:]]
    reach = 1
    for stride, has_more, axis in sorted((t.nb[axis], counts[axis] > 1, axis) for axis in range(4)):
        if stride % unit or stride // unit < reach:
            if not has_more:
                continue        # an axis of one element: its stride has no meaning
            raise PlacementError(f"{t!r} with strides {t.nb}: axis {axis} advances by no whole number of the steps of "
                                 "the axis inside it, which a remote backend does not take")
        axes.append([axis, stride // unit])
        if has_more:
            unit, reach = stride, counts[axis]
    values["axes"] = axes
    return values


def strides(kind: Type, ne: Sequence[int], axes: Any) -> tuple[int, ...]:
    """The strides in bytes that `axes` give (None: those of a contiguous tensor); MessageError for axes that do not fit
    `ne`."""
    counts = [ne[0] // kind.block_size, *ne[1:]]
    nb = [0] * 4
    if axes is None:
        nb[0] = kind.type_size
        for axis in range(1, 4):
            nb[axis] = nb[axis - 1] * counts[axis - 1]
        if nb[3] * max(counts[3], 1) >= MAX_NUMBER:
            raise MessageError(f"a tensor of extents {list(ne)} exceeds 62 bits")
        return tuple(nb)
    unit, reach = kind.type_size, 1
    for pair in fields_of(axes, "axes"):
        axis, steps = (natural(value, "an axis or its steps") for value in fields_of(pair, "an axis", 2))
        if axis > 3 or nb[axis] or steps < max(reach, 1):
            raise MessageError(f"axes {axes!r} of a tensor of extents {list(ne)}")
        nb[axis] = unit * steps
        if nb[axis] >= MAX_NUMBER:
            raise MessageError(f"axes {axes!r} of a tensor of extents {list(ne)} exceed 62 bits")
        if counts[axis] > 1:
            unit, reach = nb[axis], counts[axis]
    for axis in range(4):
        if not nb[axis]:        # an axis of one element: its stride has no meaning
            if counts[axis] > 1:
                raise MessageError(f"axes {axes!r} leave out axis {axis} of {counts[axis]} elements")
            nb[axis] = kind.type_size if axis == 0 else nb[axis - 1] * max(counts[axis - 1], 1)
    return tuple(nb)


# -- what is sent ----------------------------------------------------------------------------------


class Described:
    """A growing list of tensors as values; `place(buffer)` is the number of a buffer that the receiver has, or None."""

    def __init__(self, place: Callable[[Buffer], int | None]) -> None:
        self.values: list[dict[str, Any]] = []
        self._place = place
        self._known: dict[Tensor, int] = {}

    def leaf(self, t: Tensor) -> int:
        """The position of a tensor in the list; it is appended, without sources, if it is not there yet."""
        if t not in self._known:
            self._add(t, self._placed(t))
        return self._known[t]

    def node(self, t: Tensor, wired: Mapping[Tensor, object]) -> int:
        """The position of a node in the list.  It is appended with its sources: nodes of `wired` and views with their
        own sources, other tensors as leafs."""
        if t in self._known:
            return self._known[t]
        root, start = self._root(t)
        sources = [-1 if s is None else self.source(s, wired) for s in t.src]
        values = self._placed(t) if root is None else layout_values(t)
        if root is not None:
            values["v"] = [self.source(root, wired), start]
        if t.op != "NONE":
            values["op"] = t.op
        if sources:
            values["s"] = sources
        if t.op_params:
            values["p"] = list(t.op_params)
        self._add(t, values)
        return self._known[t]

    @staticmethod
    def _root(t: Tensor) -> tuple[Tensor | None, int]:
        """(the tensor whose memory a view has, the byte of that tensor at which the view begins); (None, 0) for a
        tensor that is no view.

        A node may be given with a copy in place of its source, and then computes into the copy.
        """
        root = t.view_src
        if root is None or root in t.src or any(s is not None and s.view_src is root for s in t.src):
            return root, t.view_offs
        for s in t.src:
            if s is not None and s.buffer is t.buffer and s.buffer is not None and \
                    s.offset <= t.offset and t.offset + t.nbytes <= s.offset + s.nbytes:
                owner = s if s.view_src is None else s.view_src
                return owner, t.offset - s.offset + (0 if owner is s else s.view_offs)
        return root, t.view_offs

    def source(self, t: Tensor, wired: Mapping[Tensor, object]) -> int:
        if t in self._known:
            return self._known[t]
        if t in wired or t.view_src is not None and not t.computes:
            return self.node(t, wired)
        if t.view_src is None:
            return self.leaf(t)
        # A node outside `wired` whose result is in the memory of its root: described as a view of that root.
        root = self.source(t.view_src, wired)
        self._add(t, {**layout_values(t), "op": "VIEW", "s": [root], "v": [root, t.view_offs]})
        return self._known[t]

    def _placed(self, t: Tensor) -> dict[str, Any]:
        values = layout_values(t)
        number = None if t.buffer is None else self._place(t.buffer)
        if number is not None:
            values["at"] = [number, t.offset]
        return values

    def _add(self, t: Tensor, values: dict[str, Any]) -> None:
        if t.name:
            values["n"] = t.name[:200]
        if t.flags:
            values["f"] = [FLAGS.index(flag) for flag in sorted(t.flags)]
        self._known[t] = len(self.values)
        self.values.append(values)


def described(nodes: Iterable[Tensor], place: Callable[[Buffer], int | None]) -> tuple[list[dict[str, Any]], list[int]]:
    """Nodes with their sources as values, and the position of each node among them."""
    found = Described(place)
    wired = dict.fromkeys(nodes)
    return found.values, [found.node(node, wired) for node in wired]


def values_of(t: Tensor, buffer: int) -> dict[str, Any]:
    """A tensor without its sources, as values of a message; it is in buffer number `buffer`."""
    return {**layout_values(t), "at": [buffer, t.offset]}


def bytes_at(buffer: int, offset: int, size: int) -> dict[str, Any]:
    """Bytes [offset, offset + size) of buffer number `buffer`, as a tensor."""
    return {"t": "i8", "ne": [size, 1, 1, 1], "at": [buffer, offset]}


# -- what is received ------------------------------------------------------------------------------


def tensors_of(values: Any, buffers: Mapping[int, Buffer], ctx: Context | None = None) -> list[Tensor]:
    """New tensors of `values`, at their places in `buffers`.

    MessageError for what is no tensor, lies outside its buffer, or has sources that its op cannot have.
    """
    ctx = ctx or Context("remote")
    made: list[Tensor] = []
    if len(fields_of(values, "tensors")) > MAX_TENSORS:
        raise MessageError(f"{len(values)} tensors, at most {MAX_TENSORS}")
    for i, fields in enumerate(values):
        if not isinstance(fields, dict):
            raise MessageError(f"tensor {i} is no object")
        try:
            made.append(_tensor(ctx, fields, made, buffers))
        except MessageError as error:
            raise MessageError(f"tensor {i}: {error}") from error
        except (Error, TypeError, ValueError, OverflowError, KeyError) as error:
            raise MessageError(f"tensor {i}: {type(error).__name__}: {error}") from error
    return made


def _tensor(ctx: Context, fields: dict[str, Any], made: list[Tensor], buffers: Mapping[int, Buffer]) -> Tensor:
    name = text(fields.get("t"), "the type")
    if name not in TYPES:
        raise MessageError(f"{name!r} is no type")
    kind = TYPES[name]
    ne = [natural(n, "an extent", 1 << 48) for n in fields_of(fields.get("ne"), "extents", 4)]
    sources = [_earlier(k, made, "a source") for k in fields_of(fields.get("s", []), "sources")]
    params = fields_of(fields.get("p", []), "parameters")
    if any(type(word) is not int for word in params):
        raise MessageError("a parameter is no integer")
    root, start = None, 0
    if "v" in fields:
        pair = fields_of(fields["v"], "a view", 2)
        root, start = _earlier(pair[0], made, "a root"), natural(pair[1], "the offset of a view")
        if root is None:
            raise MessageError("a view without a root")
    flags = [FLAGS[natural(k, "a flag", len(FLAGS))] for k in fields_of(fields.get("f", []), "flags")]
    t = ctx.restore(text(fields.get("op", "NONE"), "the op"), kind, ne, strides(kind, ne, fields.get("axes")), sources,
                    root, start, params, flags, text(fields.get("n", ""), "the name"))
    if "at" in fields:
        number, offset = (natural(n, "a place") for n in fields_of(fields["at"], "a place", 2))
        if root is not None:
            raise MessageError("a view has the place of its root")
        if number not in buffers:
            raise MessageError(f"there is no buffer {number}")
        bind_resident(t, buffers[number], offset)
    return t


def _earlier(k: Any, made: Sequence[Tensor], what: str) -> Tensor | None:
    if type(k) is not int or not -1 <= k < len(made):
        raise MessageError(f"{what} is {k!r}, not the position of a tensor before it")
    return None if k < 0 else made[k]
