"""A plan for Graphviz: nodes coloured by backend, a cluster for each split, copies as dashed edges.

A drawing of a thousand nodes takes minutes and is too large to read, so each layer of a large graph is drawn as boxes:
one for its nodes in each split.  Only layers that `expand` names are drawn node by node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ggml_sched._graph import Tensor
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.report import names_of, shape_text
from ggml_sched.planning.tables import memory_text, printable
from ggml_sched.view.layers import sections_of

__all__ = ["dot"]

_COLOURS = ("#8ecae6", "#ffb703", "#95d5b2", "#f4acb7", "#cdb4db", "#e9c46a", "#a8dadc", "#d4a373")
_LARGE = 100
"""The layers of a graph with more nodes than this become boxes."""


def dot(plan: Plan, expand: Iterable[int | str] | bool | None = None) -> str:
    """The result of `Plan.to_dot`."""
    opened = {str(label) for label in expand} if isinstance(expand, Iterable) else None
    known = {section.label for section in sections_of(plan)}
    if opened is not None and not opened <= known:
        raise ValueError(f"expand: no layer {min(opened - known)!r}; layers are {', '.join(sorted(known, key=_order))}")
    everything = expand is True or (expand is None and (len(plan.graph) <= _LARGE or len(known) < 2))
    return _Drawing(plan, None if everything else opened or set()).text()


def _order(label: str) -> tuple[bool, int, str]:
    return not label.isdigit(), int(label) if label.isdigit() else 0, label


class _Drawing:
    """One drawing; `opened`: the labels of the layers that are drawn node by node; None: all layers are."""

    def __init__(self, plan: Plan, opened: set[str] | None) -> None:
        self.plan, self.graph, self.data = plan, plan.graph, plan.data
        self.ids: dict[Tensor, int] = {t: i for i, t in enumerate(plan.graph.tensors)}
        self.names: Sequence[str] = names_of(plan)
        self.fused = {self.ids[self.graph.nodes[k]]: n for n, group in enumerate(self.data.groups) for k in group}
        self.box: dict[int, str] = {}
        """{id of a tensor: name of the box that stands for it}; tensors without a box are drawn by themselves."""
        self.members: dict[str, list[int]] = {}
        if opened is not None:
            self._collapse(opened)

    def _collapse(self, opened: set[str]) -> None:
        """Put nodes into boxes by layer and split, except nodes of `opened` layers.  Put the leafs that no node of an
        opened layer reads into two boxes: one of weights and caches, and one of inputs."""
        place = {i: p for p, i in enumerate(self.data.sequence)}
        split_of = {node: k for k, (_, start, stop, _) in enumerate(self.data.splits) for node in range(start, stop)}
        layers = iter(sections := sections_of(self.plan))
        at, number = next(layers), 0
        for position, node in enumerate(self.graph.nodes):
            i = self.ids[node]
            while place[i] >= at.stop:
                at, number = next(layers), number + 1
            if at.label not in opened:
                self._put(i, f"s{number}_{split_of[position]}")
        shown = {i for i in range(self.data.n_tensors) if i not in self.box}
        read = {self.ids[s] for t in self.graph.nodes if self.ids[t] in shown for s in t.src if s is not None}
        for t in self.graph.leafs:
            if self.ids[t] not in read:
                self._put(self.ids[t], "weights" if t.is_resident or t.resident else "inputs")
        self.labels = {f"s{k}": f"layer {s.label}" if s.label.isdigit() else s.label for k, s in enumerate(sections)}

    def _put(self, i: int, box: str) -> None:
        self.box[i] = box
        self.members.setdefault(box, []).append(i)

    # -- statements ---------------------------------------------------------------------------

    def text(self) -> str:
        """The whole file."""
        lines = ["digraph plan {", "  rankdir=TB; node [style=filled, fontname=Helvetica, fontsize=10]; "
                 "edge [fontname=Helvetica, fontsize=9];"]
        drawn: set[str] = set()
        for k, split in enumerate(self.plan.splits):
            lines.append(f"  subgraph cluster_{k} {{")
            lines.append(f"    label={_quoted(f'split {k}: {split.backend.name}')};")
            lines += [f"    {line}" for line in self._statements((self.ids[t] for t in split.nodes), drawn)]
            lines.append("  }")
        lines += [f"  {line}" for line in self._statements(range(self.data.n_tensors), drawn)]
        lines += self._edges()
        return "\n".join([*lines, "}"]) + "\n"

    def _statements(self, ids: Iterable[int], drawn: set[str]) -> Iterator[str]:
        """The statements of these tensors, or of their boxes, that are not in `drawn` yet.  The box "weights" is not
        drawn: the boxes of nodes give the bytes of the weights that they read."""
        for i in ids:
            key = self._key(i)
            if key not in drawn and key != "weights":
                drawn.add(key)
                yield self._tensor(i) if key == f"t{i}" else self._box(key)

    def _key(self, i: int) -> str:
        return self.box.get(i, f"t{i}")

    def _colour(self, i: int) -> str:
        b = self.data.backend_index(i)
        return "#eeeeee" if b < 0 else _COLOURS[b % len(_COLOURS)]

    def _tensor(self, i: int) -> str:
        t = self.graph.tensors[i]
        shape = "box" if t.computes else "ellipse" if t.op == "NONE" else "plaintext"
        label = f"{self.names[i]}\n{t.op} {t.type} {shape_text(t)}"
        if i in self.fused:
            label += f"\ngroup {self.fused[i]}"
        return f't{i} [label={_quoted(label)}, shape={shape}, fillcolor="{self._colour(i)}"];'

    def _box(self, key: str) -> str:
        """The statement of a box: its layer, how many nodes it has, the bytes of weights and caches that they read."""
        members = self.members[key]
        if key == "inputs":
            total = sum(self.graph.tensors[i].nbytes for i in members)
            return f'{key} [label={_quoted(f"{len(members)} inputs{chr(10)}{memory_text(total)}")}, shape=ellipse, ' \
                   'fillcolor="#eeeeee"];'
        tensors = [self.graph.tensors[i] for i in members]
        held = {s.root for t in tensors for s in t.src if s is not None and (s.root.is_resident or s.root.resident)}
        count = sum(t.computes for t in tensors)
        lines = [self.labels[key.partition("_")[0]], f"{count} node{'s' if count != 1 else ''}"]
        if held:
            lines.append(f"weights, caches {memory_text(sum(t.nbytes for t in held))}")
        label = _quoted("\n".join(lines))
        return f'{key} [label={label}, shape=box, peripheries=2, fillcolor="{self._colour(members[0])}"];'

    def _edges(self) -> Iterator[str]:
        """The edges from sources to nodes; from one box to another there is a single edge, with all bytes that are
        copied from the one to the other."""
        graph, data = self.graph, self.data
        joined: dict[tuple[str, str], dict[int, str]] = {}
        for t in graph.nodes:
            i = self.ids[t]
            present = [self.ids[s] for s in t.src if s is not None]
            for s, p in zip(present, data.sources(i), strict=True):
                one, other = self._key(s), self._key(i)
                copied = ""
                if p >= data.n_tensors:
                    like, b = data.copies[data.copy_of(p)]
                    copied = f"{self.plan.backends[b].name}: {graph.tensors[like].nbytes:,} bytes"
                if one == f"t{s}" and other == f"t{i}":
                    style = f" [style=dashed, label={_quoted(copied)}]" if copied else ""
                    yield f"  t{s} -> t{i}{style};"
                elif one not in (other, "weights"):
                    joined.setdefault((one, other), {})[p] = copied
            for s in (self.ids[s] for s in graph.deps.get(t, ())):
                if self._key(s) != self._key(i):
                    yield f"  {self._key(s)} -> {self._key(i)} [style=dotted];"
        yield from self._joined(joined)

    def _joined(self, joined: dict[tuple[str, str], dict[int, str]]) -> Iterator[str]:
        """The edges from or to boxes; `joined`: {(from, to): {source: text of its copy, or ""}}.  A copy counts in the
        edge to its first reader.  From a leaf, or the box of inputs, an edge without copies leads only to the first box
        of each backend."""
        leafs = {"inputs", *(f"t{self.ids[t]}" for t in self.graph.leafs)}
        led: set[tuple[str, int]] = set()
        made: set[int] = set()
        for (one, other), reads in joined.items():
            home = self.data.backend_index(self.members[other][0]) if other in self.members else -1
            copies = [p for p, copied in reads.items() if copied and p not in made]
            made.update(copies)
            if copies:
                nbytes = sum(self.graph.tensors[self.data.copies[self.data.copy_of(p)][0]].nbytes for p in copies)
                words = f"{len(copies)} cop{'y' if len(copies) == 1 else 'ies'}, {memory_text(nbytes)}"
                yield f"  {one} -> {other} [style=dashed, label={_quoted(words)}];"
            elif (one, home) not in led:
                yield f"  {one} -> {other};"
            if one in leafs and other in self.members:
                led.add((one, home))


def _quoted(text: str) -> str:
    """`text` as a quoted Graphviz string.  Other control characters than the ends of lines are escaped: Graphviz reads
    no NUL, and writes others into SVG, which cannot have them."""
    lines = map(printable, text.replace("\r", " ").split("\n"))
    return '"' + "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines) + '"'
