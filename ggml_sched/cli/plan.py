"""Plan a graph file for backends of several kinds, without their memory.

c1: one CPU.  c2half: a GPU with the second half of the layers, and a CPU.  c2full: a GPU with all
layers, and a CPU with the embedding.  c4: three GPUs with a third of the layers each, and a CPU.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ggml_sched.planning import report
from ggml_sched.planning.tables import seconds, table

if TYPE_CHECKING:
    from ggml_sched import Backend

CONFIGS: dict[str, tuple[str, ...]] = {"c1": ("CPU",), "c2half": ("GPU0", "CPU"), "c2full": ("GPU0", "CPU"),
                                       "c4": ("GPU0", "GPU1", "GPU2", "CPU")}
"""{configuration: the names of its backends, best first}."""
LAYER = re.compile(r"^(?:blk\.(\d+)\.|cache_[a-z]+_l(\d+))")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("graph", metavar="GRAPH", help="a graph file, .json or .json.gz")
    parser.add_argument("--backends", nargs="+", choices=tuple(CONFIGS), default=tuple(CONFIGS),
                        metavar="CONFIG",
                        help=f"configurations to plan for: {', '.join(CONFIGS)} (default: all)")
    parser.add_argument("--policy", choices=("default", "seed"), default="default",
                        help="the scheduler's policy")
    parser.add_argument("--alignment", type=int, default=64, metavar="BYTES",
                        help="of every backend (%(default)s)")
    parser.add_argument("--splits", action="store_true", help="list the splits")
    parser.add_argument("--steps", action="store_true", help="list what a compute does, step by step")


def run(args: argparse.Namespace) -> None:
    from ggml_sched import load_graph

    n_layer = n_layers([t.name for t in load_graph(args.graph).tensors])
    print(f"{args.graph}: policy {args.policy}, alignment {args.alignment}")
    for config in dict.fromkeys(args.backends):
        _report(args, config, n_layer)


def _report(args: argparse.Namespace, config: str, n_layer: int) -> None:
    from ggml_sched import DryBackend, Scheduler, load_graph

    backends = [DryBackend(name, alignment=args.alignment) for name in CONFIGS[config]]
    place = placement(config, backends, n_layer)
    graph = load_graph(args.graph, place=lambda tensor: place(tensor.name))
    with Scheduler(backends, policy=args.policy, plan_cache=0) as scheduler:
        start = time.perf_counter()
        plan = scheduler.plan(graph)
        took = time.perf_counter() - start
    print(f"\n{config}: {len(graph.nodes)} nodes, {len(plan.splits)} splits, {len(plan.copies)} copies, "
          f"{plan.copy_bytes:,} bytes copied, planned in {seconds(took)}")
    rows: list[Sequence[object]] = [("backend", "nodes", "arena bytes", "live bytes")]
    for backend, size, live in zip(backends, plan.buffer_sizes, plan.live_bytes, strict=True):
        nodes = sum(len(split.nodes) for split in plan.splits if split.backend is backend)
        rows.append((f"  {backend.name}", nodes, size, live))
    print(table(rows))
    if args.splits:
        rows = [("  split", "backend", "first node", "last node", "start", "stop", "inputs")]
        for i, split in enumerate(plan.splits):
            first, last = (split.nodes[0].name, split.nodes[-1].name) if len(split.nodes) else ("", "")
            rows.append((f"  {i}", split.backend.name, first, last, split.start, split.stop,
                         len(split.inputs)))
        print(table(rows, "<<<<>"))
    if args.steps:
        print(report.program(plan))


def layer_of(name: str) -> int | None:
    """The layer of a weight or cache, parsed from its name in llama.cpp's style; None if the name has none."""
    found = LAYER.match(name)
    return int(found[1] or found[2]) if found else None


def n_layers(names: list[str]) -> int:
    return max((layer_of(name) or 0 for name in names), default=0) + 1


def placement(config: str, backends: Sequence[Backend], n_layer: int) -> Callable[[str], Backend]:
    """The function that `load_graph` calls with the name of each weight or cache, for its backend in `config`."""
    gpus, cpu = backends[:-1], backends[-1]

    def place(name: str) -> Backend:
        layer = layer_of(name)
        if not gpus or name.startswith("token_embd"):
            return cpu
        if layer is None:
            return gpus[-1]
        if config == "c2half":
            return cpu if layer < n_layer // 2 else gpus[0]
        return gpus[layer * len(gpus) // n_layer]

    return place
