"""The first generation's algorithms, written a second time: slowly, on plain Python objects.

An oracle for random graphs.  Written from the specification alone and sharing no code with
the package: tensors become `Node` records, blocks are lists, passes are loops.  Cases in
which the package differs on purpose (zero sizes, nothing decided, unsupported ops) raise
`Undefined`; flagged inputs and outputs follow the package's rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

VIEW_OPS = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
IN_PLACE_OPS = {"SCALE", "DIAG_MASK_ZERO", "DIAG_MASK_INF", "ADD", "ADD1", "SUB", "MUL", "DIV", "SQR",
                "SQRT", "LOG", "ROPE", "RMS_NORM", "SOFT_MAX"}
HALF_OF_MEMORY = 2**63 - 1


class Undefined(Exception):
    """A case in which the first generation crashed, or behaves differently on purpose."""


class DoesNotFit(Exception):
    pass


def rounded(size: int, alignment: int) -> int:
    return (size + alignment - 1) // alignment * alignment


def runs_in_place(op: str) -> bool:
    return op in IN_PLACE_OPS or op.startswith("UNARY:")


class Arena:
    """A tallocr: free blocks in address order."""

    def __init__(self, size: int = HALF_OF_MEMORY) -> None:
        self.free = [[0, size]] if size else []
        self.max_size = 0

    def alloc(self, size: int) -> int:
        if size == 0:
            raise Undefined("zero size")
        best = None
        for block in self.free[:-1]:
            if block[1] >= size and (best is None or block[1] <= best[1]):
                best = block
        if best is None:
            if not self.free or self.free[-1][1] < size:
                raise DoesNotFit
            best = self.free[-1]
        address = best[0]
        best[0] += size
        best[1] -= size
        if best[1] == 0:
            self.free = [block for block in self.free if block is not best]
        self.max_size = max(self.max_size, address + size)
        return address

    def give(self, address: int, size: int) -> None:
        for i, block in enumerate(self.free):
            if block[0] + block[1] == address:
                block[1] += size
                if i + 1 < len(self.free) and self.free[i + 1][0] == block[0] + block[1]:
                    block[1] += self.free.pop(i + 1)[1]
                return
            if address + size == block[0]:
                block[0] = address
                block[1] += size
                if i > 0 and sum(self.free[i - 1]) == address:
                    self.free[i - 1][1] += self.free.pop(i)[1]
                return
        self.free.append([address, size])
        self.free.sort()


@dataclass(eq=False)
class Node:
    """The fields of a tensor that the algorithms read."""

    name: str
    op: str
    layout: tuple
    nbytes: int
    src: list[Node] = field(default_factory=list)
    view_src: Node | None = None
    view_offs: int = 0
    protected: bool = False         # input: never overwritten in place
    kept: bool = False              # output: never overwritten, never freed
    home: int | None = None         # index of its arena; None: outside the arenas
    resident: int | None = None     # backend of the buffer it lives in
    address: int | None = None
    size: int = 0
    took_over: Node | None = None
    children: int = 0
    views: int = 0

    @property
    def shares(self) -> Node | None:
        """The node whose memory this one shares: a view's root, or the source reused in place."""
        return self.took_over or self.view_src

    @property
    def root(self) -> Node:
        return self.view_src or self


def from_tensors(tensors) -> dict:
    """{tensor: Node} for the tensors of a graph."""
    made = {}

    def node_of(t):
        if t not in made:
            made[t] = Node(t.name, t.op, (int(t.type), t.ne, t.nb), t.nbytes, protected="input" in t.flags,
                           kept="output" in t.flags, view_offs=t.view_offs)
        return made[t]

    for t in tensors:
        node = node_of(t)
        node.src = [node_of(s) for s in t.src if s is not None]
        node.view_src = None if t.view_src is None else node_of(t.view_src)
    return made


# -- graph allocation ---------------------------------------------------------------


def allocate_graph(nodes: list[Node], arenas: list[Arena], parse_seq: list[int] | None = None) -> None:
    """gallocr: allocates every node whose `home` and `size` are set."""
    for node in nodes:
        if node.view_src is not None:
            node.view_src.views += 1
        for s in node.src:
            s.children += 1
    if not parse_seq:
        for node in nodes:
            visit(node, arenas)
            leave(node, arenas)
        return
    waiting = []
    for index in parse_seq:
        if index == -1:
            for node in waiting:
                leave(node, arenas)
            waiting = []
        else:
            visit(nodes[index], arenas)
            waiting.append(nodes[index])


def visit(node: Node, arenas: list[Arena]) -> None:
    for s in node.src:
        place(s, arenas)
    place(node, arenas)


def place(node: Node, arenas: list[Arena]) -> None:
    if node.address is not None or (node.view_src is None and node.home is None):
        return
    if node.view_src is not None:
        place(node.view_src, arenas)
        if node.view_src.address is not None:
            node.address = node.view_src.address + node.view_offs
        return
    if runs_in_place(node.op):
        for s in node.src:
            if may_take(node, s):
                root = s.shares
                if root is None:
                    node.took_over = s
                elif root.views == 1 and root.children == 0 and root.address == s.address:
                    node.took_over = root
                else:
                    continue
                node.took_over.views += 1
                node.address = node.took_over.address
                return
    node.address = arenas[node.home].alloc(node.size)


def may_take(node: Node, s: Node) -> bool:
    if s.address is None or s.root.home != node.home:
        return False
    if s.protected or s.kept or (s.shares is not None and (s.shares.protected or s.shares.kept)):
        return False
    return s.children == 1 and s.views == 0 and s.layout == node.layout


def leave(node: Node, arenas: list[Arena]) -> None:
    for s in node.src:
        s.children -= 1
        if s.children or s.views or s.kept:
            continue
        owner = s
        if s.shares is not None:
            owner = s.shares
            owner.views -= 1
            if owner.children or owner.views:
                continue
        release(owner, arenas)


def release(node: Node, arenas: list[Arena]) -> None:
    while not node.kept and node.shares is not None:
        node = node.shares
    if node.kept or node.home is None or node.address is None:
        return
    arenas[node.home].give(node.address, node.size)


# -- the scheduler ------------------------------------------------------------------


def best_source(sources: list[tuple[int | None, int]]) -> int | None:
    """The source that wins by (priority, bytes): strictly better priority than the best so far, and at least as many
    bytes."""
    best, size = None, 0
    for backend, nbytes in sources:
        if backend is not None and (best is None or backend < best) and nbytes >= size:
            best, size = backend, nbytes
    return best


def assign(leafs: list[Node], nodes: list[Node]) -> dict[Node, int]:
    where: dict[Node, int | None] = {}
    for t in leafs + nodes:
        if t.root.resident is not None:
            where[t] = t.root.resident
        else:
            where[t] = best_source([(s.root.resident, s.nbytes) for s in t.src])
    for t in nodes:
        if where[t] is None:
            where[t] = best_source([(where[s], s.nbytes) for s in t.src])
    for t in nodes:
        for s in t.src:
            if where[s] is None:
                where[s] = where[t]
    for t in nodes:
        if where[t] is None or where[t.root] is None or any(where[s] is None for s in t.src):
            raise Undefined("no backend")
        if where[t] != where[t.root]:
            raise Undefined("a view away from its root")
    return where


@dataclass
class Split:
    backend: int
    start: int
    stop: int
    inputs: list[Node]      # originals, one entry for each use
    copies: list[Node]


def split(nodes: list[Node], where: dict[Node, int]) -> tuple[list[Split], dict[tuple[Node, int], Node]]:
    """Cut splits and let nodes read copies: changes `src`."""
    splits: list[Split] = []
    known: dict[tuple[Node, int], Node] = {}
    for i, node in enumerate(nodes):
        if node.op in VIEW_OPS:
            continue
        here = where[node]
        if not splits:
            splits.append(Split(here, 0, len(nodes), [], []))
        elif splits[-1].backend != here:
            splits[-1].stop = i
            splits.append(Split(here, i, len(nodes), [], []))
        rewired = []
        for s in node.src:
            if where[s.root] != here:
                copy = known.get((s, here))
                if copy is None:
                    copy = Node(f"copy of {s.name}", "NONE", s.layout, s.nbytes, [s])
                    known[s, here] = copy
                splits[-1].inputs.append(s)
                splits[-1].copies.append(copy)
                s = copy
            rewired.append(s)
        node.src = rewired
    if not splits:
        raise Undefined("nothing to compute")
    return splits, known


def schedule(leafs: list[Node], nodes: list[Node], alignments: list[int]):
    """(assignment, splits, copies, arenas) of the measuring pass; offsets stand in the nodes."""
    where = assign(leafs, nodes)
    splits, known = split(nodes, where)
    arenas = [Arena() for _ in alignments]
    for (_, backend), copy in known.items():
        where[copy] = backend
    for t, backend in where.items():
        if backend is not None and t.root.resident is None:
            t.home = backend
            t.size = rounded(t.nbytes, alignments[backend])
    order: list[Node] = []
    for part in splits:
        order += part.copies + nodes[part.start:part.stop]
    allocate_graph(order, arenas)
    return where, splits, known, arenas
