"""Plan graphs for devices that this machine need not have, without their memory.

With --device, weights and caches go where `ggml-sched fit` puts them, and the first line says whether they fit; several
graphs share their weights and caches.  Without it, each graph file is planned for several configurations of backends:

c1: one CPU.  c2half: a GPU with the second half of the layers, and a CPU.  c2full: a GPU with all
layers, and a CPU with the embedding.  c4: three GPUs with a third of the layers each, and a CPU.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

from ggml_sched.cli.devices import add_device_arguments, devices_of
from ggml_sched.cli.fit import (
    add_model_arguments,
    answer,
    check_model_options,
    longer_than_trained,
    model_files,
    model_options,
    refused,
)
from ggml_sched.cli.run import check_file
from ggml_sched.errors import OutOfMemory
from ggml_sched.planning import report
from ggml_sched.planning.tables import seconds, table

if TYPE_CHECKING:
    from ggml_sched import Backend, Plan

CONFIGS: dict[str, tuple[str, ...]] = {"c1": ("CPU",), "c2half": ("GPU0", "CPU"), "c2full": ("GPU0", "CPU"),
                                       "c4": ("GPU0", "GPU1", "GPU2", "CPU")}
"""{configuration: the names of its backends, best first}."""
ALIGNMENT = 64
LAYER = re.compile(r"^(?:blk\.(\d+)\.|cache_[a-z]+_l(\d+))")


class _Drawn(NamedTuple):
    """What is drawn together, such as in a tab of --html: one plan, or two beside each other."""

    title: str
    plans: dict[str, Plan]
    """{name of a plan: the plan}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("inputs", nargs="+", metavar="GRAPH|MODEL",
                        help="graph files (.json, .json.gz); with --device also model files (.gguf)")
    parser.add_argument("--backends", nargs="+", choices=tuple(CONFIGS), default=tuple(CONFIGS),
                        metavar="CONFIG",
                        help=f"configurations to plan for: {', '.join(CONFIGS)} (default: all)")
    parser.add_argument("--policy", choices=("default", "seed"), default="default",
                        help="the scheduler's policy")
    parser.add_argument("--alignment", type=int, default=ALIGNMENT, metavar="BYTES",
                        help="of every backend (%(default)s)")
    parser.add_argument("--splits", action="store_true", help="list the splits")
    parser.add_argument("--steps", action="store_true", help="list what a compute does, step by step")
    parser.add_argument("--peaks", action="store_true",
                        help="list what binds each arena, and what has to shrink so that it becomes smaller")
    group = parser.add_argument_group("what is drawn")
    group.add_argument("--svg", metavar="FILE", help="draw the plan, or two beside each other: which backend computes "
                       "when, and the memory map of each arena")
    group.add_argument("--html", metavar="FILE", help="write a page that shows the plans in a browser, each in a tab, "
                       "and two beside each other with their differences; needs the extra view")
    group.add_argument("--other", choices=("default", "seed", "stock"), metavar="POLICY",
                       help="also plan with this policy, and draw that plan beside the first: default; seed; with "
                       "--device also stock, the nearest placement that llama.cpp can have, by ggml's rules")
    add_device_arguments(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plans, and draw them where asked for; returns 1 if the graphs do not fit the devices, else 0."""
    _check_options(args)
    _check_files(args)
    if args.device or args.measure is not None:
        return _on_devices(args)
    from ggml_sched import load_graph

    _check_drawn(args, len(args.inputs) * len(dict.fromkeys(args.backends)))
    drawn: list[_Drawn] = []
    for path in args.inputs:
        if path.endswith(".gguf"):
            raise ValueError(f"{path}: a model file is planned for devices, such as --device 4090")
    for path in args.inputs:
        n_layer = n_layers([t.name for t in load_graph(path).tensors])
        print(f"{path}: policy {args.policy}, alignment {args.alignment}")
        for config in dict.fromkeys(args.backends):
            drawn.append(_report(args, path, config, n_layer))
    if len(drawn) == 2 and not args.other:
        (one,), (two,) = (entry.plans for entry in drawn)
        drawn = [_Drawn("", {one: drawn[0].plans[one], two + " (2)" * (one == two): drawn[1].plans[two]})]
    _draw(args, drawn)
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
        _check_drawn(args, len(fit.plans))
        drawn: list[_Drawn] = []
        print(f"{verdict(fit)}\n\n{memory_table(fit)}")
        for plan, price in zip(fit.plans, fit.prices, strict=True):
            tokens = plan.graph.meta.get("n_tokens")
            what = f"{tokens} tokens" if isinstance(tokens, int) and tokens != 1 else "1 token" if tokens else "a graph"
            print(f"\n{what}: {len(plan.graph.nodes)} nodes, {len(plan.splits)} splits, {len(plan.copies)} copies, "
                  f"{plan.copy_bytes:,} bytes copied, {seconds(price.seconds)} by the speeds of the devices")
            _tables(args, plan)
            name = what if all(what != entry.title for entry in drawn) else f"{what} ({len(drawn)})"
            stock = {"stock llama.cpp": fit.llama_cpp().plans[len(drawn)]} if args.other == "stock" else {}
            drawn.append(_Drawn(name, {f"ours, {name}" if stock else name: plan, **(stock or _by_other(args, plan))}))
        _draw(args, drawn)
        for line in longer_than_trained(model_files(args), args.context):
            print(line)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """ValueError for an option that would change nothing: one of configurations with devices, one of a placement
    without devices, or one of model files without such."""
    placed = args.device or args.measure is not None
    unused = {"--backends": tuple(args.backends) != tuple(CONFIGS), "--policy": args.policy != "default",
              "--alignment": args.alignment != ALIGNMENT} if placed else {
        "--link": args.link, "--disk": args.disk, "--reserve": args.reserve, "--pin": args.pin,
        "--goal": args.goal != "decode", "--stream": args.stream, "--turns": args.turns, "--seconds": args.seconds,
        "--llama-cpp": args.llama_cpp, "--fill": args.fill != 1.0, "--within": args.within != "0.5%",
        **dict.fromkeys(model_options(args), True)}
    for option, is_given in unused.items():
        if is_given:
            raise ValueError(f"{option} is not for plans {'with' if placed else 'without'} --device or --measure")
    if placed:
        check_model_options(args)


def _check_files(args: argparse.Namespace) -> None:
    """Check what is needed to write the files that are drawn: OSError for one that cannot be written, ValueError for
    one that would replace another or an input, Error where --html needs Bokeh, which is not installed."""
    if args.html:
        from ggml_sched.view.page import needs_bokeh

        needs_bokeh()
    taken = {os.path.realpath(path): path for path in args.inputs}
    for option, path in (("--svg", args.svg), ("--html", args.html)):
        check_file(option, path)
        if path is None or os.path.exists(path) and not os.path.isfile(path):
            continue    # a pipe or a device may be written to twice
        other = taken.setdefault(os.path.realpath(path), option)
        if other != option:
            raise ValueError(f"{option} {path} would replace {'the file of ' * (other == '--svg')}{other}")


def _check_drawn(args: argparse.Namespace, count: int) -> None:
    """Check the options that draw, for `count` plans: ValueError for options that do not go together, and for more than
    two plans to draw with --svg."""
    if args.other and not (args.svg or args.html):
        raise ValueError("--other names a plan to draw: give --svg or --html, too")
    if args.other == "stock" and not args.device and args.measure is None:
        raise ValueError("--other stock is for a placement: give --device, too")
    if args.svg and count * (2 if args.other else 1) > 2:
        raise ValueError(f"--svg draws one plan or two, and there are {count}"
                         f"{', each by two policies' if args.other else ''}: name one graph, and one of --backends "
                         f"{' '.join(CONFIGS)}; --html has a tab for each")


def _by_other(args: argparse.Namespace, plan: Plan) -> dict[str, Plan]:
    """{name: plan of the same graph and assignments by the policy of --other}; empty without the option."""
    from ggml_sched.planning.planner import planned_by

    return {f"policy {args.other}": planned_by(plan, args.other)} if args.other else {}


def _draw(args: argparse.Namespace, drawn: Sequence[_Drawn]) -> None:
    """Write the files of --svg and --html."""
    from ggml_sched._files import write_text

    if args.svg:
        plans = {name: plan for entry in drawn for name, plan in entry.plans.items()}
        plan, *others = plans.values()
        write_text(args.svg, plan.to_svg(others[0] if others else None, [*plans]))
        print(f"\ndrawn in {args.svg}")
    if args.html:
        from ggml_sched.view.page import Shown, page

        tabs = []
        for title, plans in drawn:
            plan, *others = plans.values()
            tabs.append(Shown(title if len(drawn) > 1 else "", plan, others[0] if others else None, [*plans]))
        write_text(args.html, page(tabs))
        print(f"\n{args.html} shows it in a browser")


def _report(args: argparse.Namespace, path: str, config: str, n_layer: int) -> _Drawn:
    """Plan a graph file for a configuration and print the plan; returns it, and the plan of --other if given."""
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
    # Pages and pictures are UTF-8, names of files any bytes.
    file = os.fsencode(os.path.basename(path)).decode("utf-8", "replace")
    name = f"{file.removesuffix('.gz').removesuffix('.json')} {config}"
    return _Drawn(name, {f"policy {args.policy}" if args.other else name: plan, **_by_other(args, plan)})


def _tables(args: argparse.Namespace, plan: Plan) -> None:
    """Print the table of a plan's backends, and what --splits, --steps and --peaks list."""
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
    """The function from the name of a weight or cache to its backend in configuration `config`, for `load_graph`."""
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
