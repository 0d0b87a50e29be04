"""The content of a page about a plan, as lists for JSON: tensors, memory maps, layers, splits, copies, peaks.

Lists of tensors are indexed by id: the graph's tensors, then copies and their further slots.  Times count steps, as in
memory.py; sizes are bytes.  In place of words that repeat there is their index in the list `words`.
"""

from __future__ import annotations

from typing import Any

from ggml_sched.planning.fallbacks import Fallback, fallbacks_with_ids
from ggml_sched.planning.peaks import ArenaPeaks, series_of
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.report import shape_text
from ggml_sched.view.collapse import collapse
from ggml_sched.view.layers import Section, sections_of
from ggml_sched.view.memory import Ints, MemoryMap, clock_of, copy_times, memory_maps, split_times
from ggml_sched.view.roles import COPIES, roles_of

__all__ = ["Content", "content_of"]


class Content:
    """The content of one plan: `data`, which becomes JSON, and what the tables of the page need."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan: Plan = plan
        self.name: str = name
        self._words: dict[str, int] = {}
        self.clock: Ints = clock_of(plan)
        self.sections: list[Section] = [Section(s.label, int(self.clock[s.first]), int(self.clock[s.stop]))
                                        for s in sections_of(plan)]
        self.end: int = max(1, int(self.clock[-1]))
        self.maps: tuple[MemoryMap, ...] = memory_maps(plan)
        self.peaks: tuple[ArenaPeaks, ...] = plan.peaks()
        self._fell: list[tuple[Fallback, tuple[int, ...]]] = fallbacks_with_ids(plan)
        self.fallbacks: tuple[Fallback, ...] = tuple(fallback for fallback, _ in self._fell)
        self.data: dict[str, Any] = self._data()

    def _word(self, text: str) -> int:
        return self._words.setdefault(text, len(self._words))

    def _data(self) -> dict[str, Any]:
        """Everything that page.js reads of the plan."""
        plan = self.plan
        collapsed = [collapse(of, self.sections) for of in self.maps]
        maps = [{"backend": b, "arena": of.arena, "live": of.live, "owner": of.owner.tolist(),
                 "first": of.first.tolist(), "stop": of.stop.tolist(), "low": of.low.tolist(), "high": of.high.tolist(),
                 "role": of.role.tolist(), "section": found.section.tolist(),
                 "cells": [[c.section, c.low, c.high, c.role, round(c.part, 3), c.count, c.largest]
                           for c in found.cells],
                 "curve": [values.tolist() for values in of.curve()]}
                for b, (of, found) in enumerate(zip(self.maps, collapsed, strict=True)) if of.arena]
        return {
            "name": self.name, "end": self.end, "backends": [backend.name for backend in plan.backends],
            "sections": [list(section) for section in self.sections], "maps": maps,
            "splits": split_times(self.plan, self.clock), "copies": copy_times(self.plan, self.clock),
            "tensors": self._tensors(), "series": self._series(), "words": [*self._words],
        }

    def _tensors(self) -> dict[str, list[Any]]:
        """{property: a list indexed by id}, with exceptions: "inplace", "held" and "output" are the ids of tensors with
        this property; "fell" has a list for each fallback: the ids of its nodes, then its index in "fallbacks"."""
        plan, data = self.plan, self.plan.data
        graph = plan.graph
        count = data.n_tensors + data.n_copies + len(data.slot_copies)
        place = {i: p for p, i in enumerate(data.sequence)}
        like = [*range(data.n_tensors), *(data.copies[data.copy_of(i)][0] for i in range(data.n_tensors, count))]
        roles = [*roles_of(graph), *[COPIES] * (count - data.n_tensors)]
        word, tensors = self._word, graph.tensors
        split_of = [0] * len(graph.nodes)
        for k, (_, start, stop, _) in enumerate(data.splits):
            split_of[start:stop] = [k] * (stop - start)
        of_node = {graph.id_of(node): split_of[k] for k, node in enumerate(graph.nodes)} if data.splits else {}
        held = [t.is_resident or bool(t.resident) for t in tensors]
        columns: dict[str, list[Any]] = {
            "name": [plan.name_of(i) for i in range(count)],
            "op": [word(tensors[k].op) if i < data.n_tensors else word("COPY") for i, k in enumerate(like)],
            "type": [word(str(tensors[k].type)) for k in like],
            "shape": [word(shape_text(tensors[k])) for k in like],
            "bytes": [tensors[k].nbytes for k in like],
            "backend": [data.backend_index(i) for i in range(count)],
            "at": [int(self.clock[place[i]]) if i in place else -1 for i in range(count)],
            "split": [of_node.get(i, -1) for i in range(count)],
            "role": roles,
            "root": [data.root(i) if data.memory_index(i) >= 0 else -1 for i in range(count)],
            "inplace": [i for i in range(count) if data.is_inplace(i)],
            "why": [word(data.reason(i, plan.assigned_by)) if i < data.n_tensors else -1 for i in range(count)],
            "held": [i for i, found in enumerate(held) if found],
            "output": [i for i, t in enumerate(tensors) if "output" in graph.flags_of(t)],
            "sources": [list(data.sources(i)) if i < data.n_tensors and tensors[i].op != "NONE" else
                        [like[i]] if i >= data.n_tensors else [] for i in range(count)],
        }
        for number, (_, ids) in enumerate(self._fell):
            columns.setdefault("fell", []).append([*ids, number])
        columns["fallbacks"] = [f"{fallback.refused_by} does not support {fallback.why}" for fallback in self.fallbacks]
        return columns

    def _series(self) -> list[list[int]]:
        """For each entry of `named_series` the ids of the tensors in that series."""
        members: dict[tuple[int, Any], list[int]] = {}
        for b, of in enumerate(self.maps):
            for i in dict.fromkeys(of.owner.tolist()):
                found = series_of(self.plan, i)
                members.setdefault((b, (found.name, found.op, found.type, found.ne)), []).append(i)
        return [members.get(key, []) for key in self.named_series()]

    def named_series(self) -> list[tuple[int, tuple[str, str, str, tuple[int, ...]]]]:
        """Each series that a peak or a cap names, once: (index of its backend, its (name, op, type, extents))."""
        found = {}
        for b, of in enumerate(self.peaks):
            every = [s for peak in of.peaks for s, _, _ in peak.series] + [s for cap in of.caps for s in cap.series]
            found.update(dict.fromkeys((b, (s.name, s.op, s.type, s.ne)) for s in every))
        return [*found]


def content_of(plan: Plan, name: str) -> Content:
    """The content of a plan; `name`: its name on the page."""
    return Content(plan, name)
