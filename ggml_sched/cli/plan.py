"""Plan graphs for devices that this machine need not have, without their memory.

With --device, weights and caches go where `ggml-sched fit` puts them, and the first line says whether they fit; several
graphs share their weights and caches.  Without, each graph file is planned for backends of several kinds:

c1: one CPU.  c2half: a GPU with the second half of the layers, and a CPU.  c2full: a GPU with all
layers, and a CPU with the embedding.  c4: three GPUs with a third of the layers each, and a CPU.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ggml_sched.cli.devices import add_device_arguments, devices_of
from ggml_sched.cli.fit import add_model_arguments, answer, longer_than_trained, model_files, refused
from ggml_sched.errors import OutOfMemory
from ggml_sched.planning import report
from ggml_sched.planning.tables import seconds, table

if TYPE_CHECKING:
    from ggml_sched import Backend, Plan

CONFIGS: dict[str, tuple[str, ...]] = {"c1": ("CPU",), "c2half": ("GPU0", "CPU"), "c2full": ("GPU0", "CPU"),
                                       "c4": ("GPU0", "GPU1", "GPU2", "CPU")}
"""{configuration: the names of its backends, best first}."""
LAYER = re.compile(r"^(?:blk\.(\d+)\.|cache_[a-z]+_l(\d+))")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("inputs", nargs="+", metavar="GRAPH|MODEL",
                        help="graph files (.json, .json.gz); with --device also model files (.gguf)")
    parser.add_argument("--backends", nargs="+", choices=tuple(CONFIGS), default=tuple(CONFIGS),
                        metavar="CONFIG",
                        help=f"configurations to plan for: {', '.join(CONFIGS)} (default: all)")
    parser.add_argument("--policy", choices=("default", "seed"), default="default",
                        help="the scheduler's policy")
    parser.add_argument("--alignment", type=int, default=64, metavar="BYTES",
                        help="of every backend (%(default)s)")
    parser.add_argument("--splits", action="store_true", help="list the splits")
    parser.add_argument("--steps", action="store_true", help="list what a compute does, step by step")
    parser.add_argument("--peaks", action="store_true",
                        help="list what binds each arena, and what has to shrink so that it becomes smaller")
    add_device_arguments(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plans; 1 if the graphs do not fit the devices."""
    if args.device or args.measure is not None:
        return _on_devices(args)
    from ggml_sched import load_graph

    for path in args.inputs:
        if path.endswith(".gguf"):
            raise ValueError(f"{path}: a model file is planned for devices, such as --device 4090")
    for path in args.inputs:
        n_layer = n_layers([t.name for t in load_graph(path).tensors])
        print(f"{path}: policy {args.policy}, alignment {args.alignment}")
        for config in dict.fromkeys(args.backends):
            _report(args, path, config, n_layer)
    return 0


def _on_devices(args: argparse.Namespace) -> int:
    from ggml_sched.placement.report import memory_table, verdict

    with ExitStack() as stack:
        devices = devices_of(args, stack)
        try:
            fit = answer(args, args.context, devices)
        except OutOfMemory as error:
            print(refused(args, devices, error))
            return 1
        print(f"{verdict(fit)}\n\n{memory_table(fit)}")
        for plan, price in zip(fit.plans, fit.prices, strict=True):
            tokens = plan.graph.meta.get("n_tokens")
            what = f"{tokens} tokens" if isinstance(tokens, int) and tokens != 1 else "1 token" if tokens else "a graph"
            print(f"\n{what}: {len(plan.graph.nodes)} nodes, {len(plan.splits)} splits, {len(plan.copies)} copies, "
                  f"{plan.copy_bytes:,} bytes copied, {seconds(price.seconds)} by the speeds of the devices")
            _tables(args, plan)
        for line in longer_than_trained(model_files(args), args.context):
            print(line)
    return 0


def _report(args: argparse.Namespace, path: str, config: str, n_layer: int) -> None:
    from ggml_sched import DryBackend, Scheduler, load_graph

    backends = [DryBackend(name, alignment=args.alignment) for name in CONFIGS[config]]
    place = placement(config, backends, n_layer)
    graph = load_graph(path, place=lambda tensor: place(tensor.name))
    with Scheduler(backends, policy=args.policy, plan_cache=0) as scheduler:
        start = time.perf_counter()
        plan = scheduler.plan(graph)
        took = time.perf_counter() - start
    print(f"\n{config}: {len(graph.nodes)} nodes, {len(plan.splits)} splits, {len(plan.copies)} copies, "
          f"{plan.copy_bytes:,} bytes copied, planned in {seconds(took)}")
    _tables(args, plan)


def _tables(args: argparse.Namespace, plan: Plan) -> None:
    """The backends of a plan, and what else the command line wants to see of it."""
    rows: list[Sequence[object]] = [("backend", "nodes", "arena bytes", "live bytes")]
    for backend, size, live in zip(plan.backends, plan.buffer_sizes, plan.live_bytes, strict=True):
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
    if args.peaks:
        print("\n" + "\n\n".join(map(str, plan.peaks())))


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
