"""Reports of a plan as text: a summary table, and the explanation of one tensor.

The functions read a plan and return text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from ggml_sched._graph import BufferBase, Tensor
from ggml_sched.backend import measure_buffer
from ggml_sched.planning.plan import Plan
from ggml_sched.planning.program import bank_of, describe
from ggml_sched.planning.tables import printable, table

__all__ = ["explain", "names_of", "program", "shape_text", "summary"]

_SHOWN_INPUTS = 4
"""The most inputs of a split that the table names; the others are counted."""
_SHOWN_STEPS = 24
"""The most steps of the program that the summary shows; the others are counted."""


def summary(plan: Plan) -> str:
    """The text of `print(plan)`: a table of the backends, one of the splits, and the first steps of the program."""
    n_nodes, n_splits, n_copies = len(plan.graph), len(plan.splits), len(plan.copies)
    head = (f"Plan of {n_nodes} nodes, policy {plan.policy}: {n_splits} splits, {n_copies} copies of "
            f"{plan.copy_bytes:,} bytes")
    names = names_of(plan)
    computed = dict.fromkeys(plan.backends, 0)
    for split in plan.splits:
        computed[split.backend] += sum(t.computes for t in split.nodes)
    backends = [("backend", "buffer bytes", "live bytes", "nodes")]
    for b, size, live in zip(plan.backends, plan.buffer_sizes, plan.live_bytes, strict=True):
        backends.append((b.name, f"{size:,}", f"{live:,}", f"{computed[b]:,}"))
    lines = [head, *_fused(plan), *_work(plan), *_fetched(plan), "", table(backends, "<>>>", underlined=True)]
    if plan.splits:
        rows = [("split", "backend", "nodes", "input bytes", "inputs")]
        for k, split in enumerate(plan.splits):
            inputs = tuple(dict.fromkeys(split.inputs))
            total = f"{sum(t.nbytes for t in inputs):,}" if inputs else ""
            nodes = f"{split.start}..{split.stop - 1}" if len(split) > 1 else f"{split.start}"
            named = _listed([f"{names[plan.index_of(t)]} {t.nbytes:,}" for t in inputs])
            rows.append((str(k), split.backend.name, nodes, total, named))
        lines += ["", table(rows, "><>><", underlined=True)]
    messages = plan.messages()
    if messages:
        ways = [("from", "to", "messages", "bytes")]
        ways += [(one, other, str(n), f"{size:,}") for (one, other), (n, size) in messages.items()]
        lines += ["", table(ways, "<<>>", underlined=True)]
    steps = program(plan).splitlines()
    if steps:
        rest = len(steps) - _SHOWN_STEPS
        lines += ["", "step", "----", *steps[:_SHOWN_STEPS], *([f"and {rest} more"] if rest > 0 else [])]
    return "\n".join(lines)


def _fused(plan: Plan) -> list[str]:
    """A line that counts the fusion groups by their ops; no line without groups."""
    kinds = Counter(" + ".join(t.op for t in group) for group in plan.groups)
    shown = _listed([f"{n} of {ops}" for ops, n in kinds.most_common()], "other kinds")
    n_nodes = sum(map(len, plan.groups))
    return [f"computed as one: {n_nodes} nodes in {len(plan.groups)} groups, {shown}"] if kinds else []


def _work(plan: Plan) -> list[str]:
    """A line with the work memory of backends that need any; no line if none does."""
    shown = [f"{size:,} on {b.name}" for b, size in zip(plan.backends, plan.work_sizes, strict=True) if size]
    return [f"work memory in bytes: {', '.join(shown)}"] if shown else []


def _fetched(plan: Plan) -> list[str]:
    """A line for each backend with the weights that stores fetch to it; no line for others."""
    lines = []
    for backend, window in zip(plan.backends, plan.windows, strict=True):
        here = [copy for copy in plan.fetches if copy.backend is backend]
        if here:
            lines.append(f"fetched to {backend.name} in each compute: {len(here)} weights of "
                         f"{sum(copy.nbytes for copy in here):,} bytes, at most {window:,} at one time")
    return lines


def program(plan: Plan) -> str:
    """The steps of a compute, a line for each, with the names of tensors and backends."""
    names = [*map(printable, names_of(plan))]
    name = lambda i: _plain(plan, names, i)                 # noqa: E731
    backend = lambda b: plan.backends[b].name               # noqa: E731
    return "\n".join(f"{k:>4}  {describe(step, name, backend)}" for k, step in enumerate(plan.program.steps))


def _listed(words: Sequence[str], others: str = "more") -> str:
    """The first few of `words`, and how many others there are, so that lines stay short."""
    shown, rest = ", ".join(words[:_SHOWN_INPUTS]), len(words) - _SHOWN_INPUTS
    return f"{shown}, and {rest} {others}" if rest > 0 else shown


# -- one tensor ------------------------------------------------------------------------------------


def explain(plan: Plan, t: Tensor) -> str:
    """A text: why a tensor is on its backend, its memory, why other backends were not chosen, where it is copied to."""
    i = plan.index_of(t)
    lines = [f"{_describe(plan, t)}: {_placed(plan, i)}", *_memory(plan, i), *_sharers(plan, i)]
    if t.computes:
        refused = [b.name for b in plan.backends if not b.supports_op(t)]
        if refused:
            lines.append(f"not supported by: {', '.join(refused)}")
        lines += _passed_over(plan, i)
        lines += _group(plan, i)
    lines += _copies(plan, i)
    return "\n  ".join(lines)


def _placed(plan: Plan, i: int) -> str:
    """The backend of tensor i, and the rule that chose it."""
    t, data = plan.graph.tensors[i], plan.data
    b = data.backend_index(i)
    if b < 0:
        return "no node of the graph uses it, so it has no memory"
    where = f"on {plan.backends[b].name}"
    if t.computes:
        for k, split in enumerate(plan.splits):
            if any(node is t for node in split.nodes):
                position = split.start + next(p for p, node in enumerate(split.nodes) if node is t)
                where = f"computed on {split.backend.name}, in split {k} as node {position}"
    rule = data.rule(i)
    why = data.reason(i, plan.assigned_by)
    near = _neighbours(plan, i, rule)
    return f"{where}, because {why}{': ' if near else ''}{_some(plan, near)}"


def _neighbours(plan: Plan, i: int, rule: str) -> list[int]:
    """The ids of the tensors because of which this rule chose tensor i's backend; empty where no tensor was the
    cause."""
    graph, data = plan.graph, plan.data
    t, b = graph.tensors[i], data.backend_index(i)
    sources = list(dict.fromkeys(graph.id_of(s) for s in t.src if s is not None))
    if rule in ("source", "most inputs"):
        return [s for s in sources if data.memory_index(graph.id_of(graph.tensors[s].root)) == b]
    if rule in ("weight", "offload"):
        weights = [s for s in sources if _resident_buffer(graph.tensors[s]) is not None]
        return weights if rule == "offload" else [s for s in weights if _reads(plan, b, graph.tensors[s])]
    if rule == "upgrade":
        return [s for s in sources if _reads(plan, b, graph.tensors[s])]
    if rule == "boundary":
        return _boundary(plan, i)
    if rule == "consumer":
        readers = (k for k in graph.nodes if k.computes and any(s is not None and s.root is t.root for s in k.src))
        return [graph.id_of(k) for k in islice(readers, 1)]
    if rule == "neighbour":
        position = graph.position_of(t)
        near = sorted((abs(p - position), p, graph.id_of(k)) for p, k in enumerate(graph.nodes)
                      if k is not t and k.computes and data.backend_index(graph.id_of(k)) == b)
        return [near[0][2]] if near else []
    return []


def _boundary(plan: Plan, i: int) -> list[int]:
    """The rule "boundary" has moved node i, with nodes next to it, to another backend: the ids of the nodes on both
    sides of the boundaries before the first and after the last of these."""
    data = plan.data
    work = [plan.graph.id_of(node) for node in plan.graph.nodes if node.computes]
    first = last = work.index(i)
    backend = data.backend_index(i)

    def moved(k: int) -> bool:
        return 0 <= k < len(work) and data.backend_index(work[k]) == backend and data.rule(work[k]) == "boundary"

    while moved(first - 1):
        first -= 1
    while moved(last + 1):
        last += 1
    sides = ((first - 1, first), (last, last + 1))
    return list(dict.fromkeys(
        work[k] for low, high in sides if low >= 0 and high < len(work)
        and data.backend_index(work[low]) != data.backend_index(work[high]) for k in (low, high)))


def _passed_over(plan: Plan, i: int) -> list[str]:
    """Why each better backend (earlier among the scheduler's) that supports node i was not chosen: a line for each.

    Only memory that the chosen backend can access, and the better one cannot, counts as a reason.
    """
    t, data = plan.graph.tensors[i], plan.data
    here = data.backend_index(i)
    lines = []
    for b in range(here):
        if not plan.backends[b].supports_op(t):
            continue
        against = []
        if data.rule(i) == "user":
            against.append(f"{plan.assigned_by or 'the caller'} assigned the node to {plan.backends[here].name}")
        else:
            root = t.view_src
            if root is not None and _reads(plan, here, root) and not _reads(plan, b, root):
                against.append(f"cannot reach the memory of {_whose(plan, root)}, which the node writes to")
            missing = [s for s in dict.fromkeys(t.src) if s is not None and (root is None or s.root is not root)
                       and _reads(plan, here, s) and not _reads(plan, b, s) and not _is_placed_with(plan, t, s)]
            if missing:
                against.append(f"cannot read without a copy: {_listed([_whose(plan, s) for s in missing])}")
        lines.append(f"{plan.backends[b].name} supports it, but {' and '.join(against)}" if against else
                     f"{plan.backends[b].name} supports it, too, and reads what it reads; the rule that placed the "
                     "node does not compare backends")
    return lines


def _group(plan: Plan, i: int) -> list[str]:
    """A line with the other members of node i's fusion group, and whether its result is written to memory; no line if
    node i is in no group."""
    position = plan.graph.position_of(plan.graph.tensors[i])
    members = next((group for group in plan.data.groups if position in group), None)
    if members is None:
        return []
    others = _some(plan, [plan.graph.id_of(plan.graph.nodes[k]) for k in members if k != position])
    place = f" in place of node {members[-1]}" if position != members[-1] else ""
    nowhere = "; only they read its result, so that it need not be written to memory" if plan.data.is_inner(i) else ""
    backend = plan.backends[plan.data.backend_index(i)]
    return [f"computed as one with {others}{place}, as {backend.name} offers{nowhere}"]


def _resident_buffer(t: Tensor) -> BufferBase | None:
    """The buffer of a tensor that has memory outside every plan, or None."""
    buffer, lease = t.buffer, t.lease
    return None if lease is not None and lease.transient else buffer


def _reads(plan: Plan, b: int, t: Tensor) -> bool:
    """Whether backend b can access the memory of a tensor without a copy."""
    buffer, holder = _resident_buffer(t), plan.data.memory_index(plan.index_of(t.root))
    if buffer is None:
        if holder in (b, -1):
            return True
        buffer = measure_buffer(plan.backends[holder])
    return buffer.backend is plan.backends[b] or plan.backends[b].supports_buffer(buffer)


def _is_placed_with(plan: Plan, node: Tensor, s: Tensor) -> bool:
    """Whether the root of source s is a leaf that was put on its backend because `node`, its first reader, is there.

    Then its location is a consequence of the node's, and cannot be the reason for it.
    """
    root = s.root
    if root.op != "NONE" or plan.data.rule(plan.index_of(root)) != "consumer":
        return False
    readers = (t for t in plan.graph.nodes if t.computes
               and any(p is not None and p.root is root for p in t.src))
    return next(readers, None) is node


def _whose(plan: Plan, t: Tensor) -> str:
    """The name of a tensor, and of the backend that holds its memory, for a sentence."""
    buffer = _resident_buffer(t)
    kind = "weight " if buffer is not None and buffer.usage == "weights" else ""
    owner = plan.backends[plan.data.memory_index(plan.index_of(t.root))] if buffer is None else buffer.backend
    return f"{kind}{_id_name(plan, plan.index_of(t))} on {owner.name}"


def _memory(plan: Plan, i: int) -> list[str]:
    """The memory of tensor i and its lifetime."""
    data, tensors = plan.data, plan.graph.tensors
    t = tensors[i]
    lines = []
    holder = data.memory_index(i)
    if t.view_src is not None:
        lines.append(f"a view of {_describe(plan, t.view_src)}, from byte {t.view_offs:,}")
    if holder < 0 or data.offset(i) < 0:
        bank = bank_of(t.root.buffer)
        if bank is not None:
            home = "-" if t.backend is None else t.backend.name
            lines.append(f"memory: of {t.nbytes:,} bytes on {home} those of the experts that are in slots, outside the "
                         f"plan; {bank.store.name} reads others when a node has chosen them")
        elif t.backend is not None and t.is_resident:
            lines.append(f"memory: {t.nbytes:,} bytes of its own on {t.backend.name}, outside the plan")
        return lines
    name, birth_death = plan.backends[holder].name, data.lifetime(i)
    size = data.size(i)
    took = f"{t.nbytes:,} bytes" if size in (0, t.nbytes) else f"{t.nbytes:,} bytes ({size:,} aligned)"
    if data.chunk(i):
        name += f", buffer {data.chunk(i)},"
    lines.append(f"memory: {name} at offset {data.offset(i):,}, {took}")
    if birth_death is not None:
        birth, death = birth_death
        until = "the end" if death >= len(data.sequence) else f"position {death}"
        lines.append(f"the memory is taken from position {birth} until {until}, of {len(data.sequence)}")
    if data.is_late(i):
        lines.append("loaded when first used: before that, the memory holds other tensors")
    if data.is_inplace(i):
        root = data.root(i)
        lines.append(f"written in place over {_id_name(plan, root)}, which no later node reads, as the "
                     f"kernel on {plan.backends[holder].name} allows")
    if "output" in plan.graph.flags_of(t):
        lines.append("an output: its memory stays until the next compute")
    return lines


def _sharers(plan: Plan, i: int) -> list[str]:
    """Lines with the tensors that are views of tensor i, and with those that are written in place over it."""
    data, tensors = plan.data, plan.graph.tensors
    views = [k for k, t in enumerate(tensors) if t.view_src is not None and t.view_src is tensors[i]]
    reusing = [k for k in range(data.n_tensors) if data.is_inplace(k) and data.root(k) == i]
    lines = []
    if views:
        lines.append(f"viewed by: {_some(plan, views)}")
    if reusing:
        lines.append(f"its memory is reused in place by: {_some(plan, reusing)}")
    return lines


def _some(plan: Plan, ids: list[int]) -> str:
    return _listed([_id_name(plan, k) for k in ids])


def _copies(plan: Plan, i: int) -> list[str]:
    """A line for each copy of tensor i: where it is, before which splits it is made, and what for."""
    data = plan.data
    written_back = dict(data.write_backs)
    splits: dict[int, list[int]] = {}
    for k, (_, _, _, inputs) in enumerate(data.splits):
        for c in dict.fromkeys(inputs):
            splits.setdefault(c, []).append(k)
    lines = []
    for c, (like, b) in enumerate(data.copies):
        if like != i:
            continue
        when = ", ".join(map(str, splits.get(c, ())))
        nbytes, offset = plan.graph.tensors[i].nbytes, data.offset(data.n_tensors + c)
        owner = plan.graph.tensors[i].root.backend
        if owner is not None and owner.is_store:
            reader = next((k for k, (_, start, stop, _) in enumerate(data.splits)
                           for node in plan.graph.nodes[start:stop]
                           if data.n_tensors + c in data.sources(plan.graph.id_of(node))), -1)
            begin, end = data.lifetime(data.n_tensors + c) or (0, 0)
            size = data.size(data.n_tensors + c)
            lines.append(f"fetched to {plan.backends[b].name} at offset {offset:,} in each compute: {nbytes:,} bytes "
                         f"of {size:,} taken; the fetch begins before split {when} and is awaited by split {reader}, "
                         f"and the memory is taken from position {begin} until {end}")
            continue
        purpose = "written to there and copied back" if written_back.get(i) == c else "read there"
        if data.kept[c]:
            purpose += ", kept while it does not change"
        lines.append(f"copied to {plan.backends[b].name} at offset {offset:,}: {nbytes:,} bytes before split "
                     f"{when}, {purpose}")
    return lines


# -- names -----------------------------------------------------------------------------------------


def shape_text(t: Tensor) -> str:
    """The extents of a tensor without trailing ones, such as 4096x512."""
    ne = list(t.ne)
    while len(ne) > 1 and ne[-1] == 1:
        ne.pop()
    return "x".join(map(str, ne))


def names_of(plan: Plan) -> list[str]:
    """The names of the graph's tensors, for tables: with an id only where a name is missing, or several have it."""
    tensors = plan.graph.tensors
    uses = Counter(t.name for t in tensors)
    return [f"tensor {i}" if not t.name else t.name if uses[t.name] == 1 else f"{t.name} (tensor {i})"
            for i, t in enumerate(tensors)]


def _plain(plan: Plan, names: Sequence[str], i: int) -> str:
    """The name of a graph tensor, or BACKEND#NAME for a copy, for tables."""
    data = plan.data
    if i < data.n_tensors:
        return names[i]
    like, b = data.copies[data.copy_of(i)]
    return f"{plan.backends[b].name}#{names[like]}"


def _describe(plan: Plan, t: Tensor) -> str:
    return f"{_id_name(plan, plan.index_of(t))} ({t.op} {t.type} {shape_text(t)})"


def _id_name(plan: Plan, i: int) -> str:
    """For sentences: the id and the name of a graph tensor, because names may repeat; of a copy those of its
    original."""
    data, tensors = plan.data, plan.graph.tensors
    if i < data.n_tensors:
        return f"tensor {i} {tensors[i].name!r}" if tensors[i].name else f"tensor {i}"
    like, b = data.copies[data.copy_of(i)]
    return f"the copy of {_id_name(plan, like)} on {plan.backends[b].name}"
