"""Say whether a model fits devices, and where each of its weights and caches should be.

MODEL.gguf needs only the file's metadata; several model files are several models that share the devices.  Graph files
are the graphs of one model, such as those of one token and of a prompt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ggml_sched.cli.devices import add_device_arguments, devices_of, link_of, pins_of
from ggml_sched.cli.llama_cpp_graphs import add_argument, graphs_of_file, source_of, stock_of
from ggml_sched.cli.run import KV_TYPES
from ggml_sched.errors import FileFormatError, OutOfMemory

if TYPE_CHECKING:
    from ggml_sched import Graph, Stock
    from ggml_sched.placement.answer import Fit

CONTEXT, BATCH = 4096, 512
ROUGHLY = 0.2
"""The gap at which a search stops that only has to find whether anything fits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("inputs", nargs="+", metavar="MODEL|GRAPH",
                        help="model files (.gguf), or graph files of one model (.json, .json.gz)")
    add_device_arguments(parser)
    add_model_arguments(parser)
    group = parser.add_argument_group("what is printed")
    group.add_argument("--json", action="store_true", help="the answer as JSON")
    group.add_argument("--explain", action="append", default=[], metavar="NAME",
                       help="also why this weight or cache is where it is; repeatable")
    group.add_argument("--svg", metavar="FILE",
                       help="draw the answer: what fills each device, where the time goes, and the bound")
    group.add_argument("--before", metavar="FILE.json",
                       help="with --svg: draw above it another answer, which --json has printed, or `stock`, the "
                       "nearest placement that llama.cpp can have")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the models and graphs, and for the goal of their placement."""
    group = parser.add_argument_group("what runs")
    group.add_argument("--context", "--n-ctx", type=int, default=CONTEXT, metavar="N",
                       help="tokens in the cache (%(default)s; 0: as many as the model was trained with)")
    group.add_argument("--batch", "--n-batch", type=int, default=BATCH, metavar="N",
                       help="prompt tokens that are evaluated together (%(default)s)")
    group.add_argument("--sequences", type=int, default=1, metavar="N", help="sequences in the cache (%(default)s)")
    group.add_argument("--kv-type", choices=KV_TYPES, default="f16", help="of the cache (%(default)s)")
    group.add_argument("--no-flash", action="store_true", help="attention as several nodes")
    add_argument(group)
    group.add_argument("--fill", type=float, default=1.0, metavar="PART",
                       help="the part of the cache that a token reads on average (%(default)s)")
    group = parser.add_argument_group("what is wanted")
    group.add_argument("--goal", default="decode", metavar="GOAL",
                       help="decode, prompt, or tokens of a prompt + tokens to generate, 512+256 (%(default)s)")
    group.add_argument("--within", default="0.5%", metavar="PART", help="a gap at which to stop (%(default)s)")
    group.add_argument("--seconds", type=float, metavar="N", help="stop the search after so many seconds")
    group.add_argument("--pin", action="append", default=[], metavar="NAME=DEVICE",
                       help="put a weight or cache on a device; NAME may have * and ?; repeatable")
    group.add_argument("--stream", action="store_true", help="weights of the host may be streamed for prompts")
    group.add_argument("--turns", action="store_true", help="several models take turns, and share their arenas")


def check_model_options(args: argparse.Namespace) -> None:
    """ValueError for an option that would change nothing: one of models, where all inputs are graph files."""
    unused = model_options(args)
    if unused and not model_files(args):
        raise ValueError(f"{unused[0]} is for model files, and graph files have their own")


def model_options(args: argparse.Namespace) -> list[str]:
    """The options given that say how the graphs of a model file are made."""
    given = {"--context": args.context != CONTEXT, "--batch": args.batch != BATCH, "--sequences": args.sequences != 1,
             "--kv-type": args.kv_type != "f16", "--no-flash": args.no_flash}
    return [option for option, is_given in given.items() if is_given]


def run(args: argparse.Namespace) -> int:
    """Print the fit; returns the exit code, which is 1 if nothing fits."""
    check_model_options(args)
    before = _before(args)
    with ExitStack() as stack:
        devices = devices_of(args, stack)
        try:
            found = answer(args, args.context, devices)
        except OutOfMemory as error:
            said = refused(args, devices, error)
            print(json.dumps({"fits": False, "why": said.splitlines(), "device": error.backend, "needed": error.needed,
                              "available": error.available}, indent=1) if args.json else said)
            return 1
        found.verify()
        explained = {name: found.explain(name) for name in args.explain}
        stocks = stocks_of(found, args) if args.llama_cpp else []
        if args.svg:
            from ggml_sched._files import write_text

            beside = found.llama_cpp() if args.before == "stock" else before
            write_text(args.svg, found.to_svg(beside, ("stock llama.cpp", "ours") if args.before == "stock" else ()))
        if args.json:
            more: dict[str, Any] = {"notes": longer_than_trained(model_files(args), args.context)}
            if stocks:
                each = [stock.to_dict() for _, stock in stocks]
                more["llama_cpp"] = each[0] if len(each) == 1 else each
            if explained:
                more["explain"] = explained
            print(json.dumps({"fits": True} | found.to_dict() | more, indent=1))
            return 0
        print("\n".join([str(found), *longer_than_trained(model_files(args), args.context)]))
        if source_of(found):
            print(source_of(found))
        for text in explained.values():
            print(f"\n{text}")
        for name, stock in stocks:
            print(f"\n{stock.describe(name)}")
        if args.svg:
            print(f"\ndrawn in {args.svg}")
    return 0


def _before(args: argparse.Namespace) -> dict[str, Any] | None:
    """The JSON of the file that --before names; None without the option and for `stock`.  FileFormatError for a file
    that `ggml-sched fit --json` has not printed."""
    if args.before and not args.svg:
        raise ValueError("--before names an answer to draw: give --svg, too")
    if not args.before or args.before == "stock":
        return None
    with open(args.before, encoding="utf-8") as file:
        try:
            found: dict[str, Any] = json.load(file)
        except ValueError as error:
            raise FileFormatError(f"{args.before}: no JSON: {error}") from None
    if isinstance(found, dict) and found.get("fits") is False:
        raise FileFormatError(f"{args.before}: the answer is that it does not fit: there is nothing to draw")
    if not isinstance(found, dict) or not {"devices", "memory", "graphs", "seconds"} <= found.keys():
        raise FileFormatError(f"{args.before}: no answer that `ggml-sched fit --json` has printed")
    return found


def answer(args: argparse.Namespace, context: int, devices: Sequence[object]) -> Fit:
    """Place the models and graphs of the command line, with `context` tokens in the cache; raises as `gs.fit` does."""
    import ggml_sched as gs

    for option, value, least in (("context", context, 0), ("batch", args.batch, 1), ("sequences", args.sequences, 1)):
        if value < least:
            raise ValueError(f"--{option} {value}: at least {least}")
    groups = graphs_of(args, context)
    return gs.fit(groups if len(groups) > 1 else groups[0], devices,  # type: ignore[arg-type]
                  link=link_of(args), goal=goal_of(args.goal, groups), pins=pins_of(args.pin),
                  within=part_of(args.within), fill=args.fill, stream=args.stream, turns=args.turns,
                  seconds=args.seconds)


def graphs_of(args: argparse.Namespace, context: int) -> list[list[Graph]]:
    """The graphs of each model: those of all graph files, if there are any, then those of each model file."""
    from ggml_sched import load_graph

    files = [name for name in args.inputs if name.endswith((".json", ".json.gz"))]
    groups = [[load_graph(name) for name in files]] if files else []
    for name in args.inputs:
        if name not in files:
            groups.append(graphs_of_file(name, args, context))
    return groups


def goal_of(text: str, models: Sequence[Sequence[Graph]]) -> str | list[float]:
    """The argument `goal` of `gs.fit` for the graphs of each model.  "512+256" gives each model's graph of one token
    the weight 256, and its graph of the longest prompt 512 / (its tokens)."""
    if text in ("decode", "prompt"):
        return text
    try:
        prompt, generated = map(int, text.split("+"))
        float(prompt + generated)       # whether these can be weights
    except (ValueError, OverflowError):
        raise ValueError(f"--goal {text}: not decode, prompt, or PROMPT+GENERATED like 512+256") from None
    tokens = [[graph.meta.get("n_tokens") for graph in graphs] for graphs in models]
    counts = [[n for n in of if isinstance(n, int) and n > 0] for of in tokens]
    every = [n for of in counts for n in of]
    if len(every) < sum(map(len, tokens)) or max(every, default=1) < 2 or min(every) > 1:
        raise ValueError(f"--goal {text} needs a graph of one token and one of a prompt, whose meta says n_tokens")
    return [float(generated) if n == 1 else prompt / n if n == max(of) else 0.0 for of in counts for n in of]


def part_of(text: str) -> float:
    """The number that a text like "0.005" or "0.5%" means."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"--within {text}: not a part like 0.5%") from None


def refused(args: argparse.Namespace, devices: Sequence[object], error: OutOfMemory) -> str:
    """The text for a refused fit: the proof, whether the pins are the cause, and the largest context that would fit.
    """
    lines = [f"it does not fit: {str(error).removeprefix('nothing fits: ')}"]
    if args.pin and _fits(args, args.context, devices, ()):
        return "\n".join([*lines, "without the pins it fits"])
    if model_files(args):
        lines[0] = lines[0].partition("; so would a context")[0]
        largest = largest_context(args, devices)
        lines.append(f"a context of {largest} tokens fits" if largest else
                     "no context fits, not even of 32 tokens: the devices need more memory, or the model fewer bits")
    return "\n".join([*lines, *longer_than_trained(model_files(args), args.context)])


def stocks_of(found: Fit, args: argparse.Namespace) -> list[tuple[str, Stock]]:
    """(model file, llama.cpp's settings for it) for each model file; the settings leave room for the other models."""
    names = model_files(args)
    first = 1 + max(found.models) - len(names)      # all graph files together are one model, the first
    parts = [found.model(first + k) for k in range(len(names))] if max(found.models) else [found] * len(names)
    return [(name, stock_of(part, name)) for name, part in zip(names, parts, strict=True)]


def model_files(args: argparse.Namespace) -> list[str]:
    """The inputs that are model files; the others are graph files."""
    return [name for name in args.inputs if not name.endswith((".json", ".json.gz"))]


def longer_than_trained(files: Sequence[str], context: int) -> list[str]:
    """A line for each model file whose model was trained with fewer tokens than the context has."""
    from ggml_sched.llama.gguf import open_gguf

    lines = []
    for name in files:
        with open_gguf(name) as file:
            trained = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
        if isinstance(trained, int) and context > trained:
            lines.append(f"{name} was trained with {trained} tokens: a context of {context} is longer")
    return lines


def _fits(args: argparse.Namespace, context: int, devices: Sequence[object], pins: Sequence[str]) -> bool:
    """Whether anything fits with this context and these pins: a search that stops at a gap of ROUGHLY."""
    try:
        answer(argparse.Namespace(**vars(args) | {"pin": pins, "within": str(ROUGHLY)}), context, devices)
    except OutOfMemory:
        return False
    return True


def largest_context(args: argparse.Namespace, devices: Sequence[object]) -> int:
    """The largest context that fits, in tokens: a multiple of 32, at most 1/32 too small; 0 if none fits.  It is below
    the context of the command line, which does not fit."""
    low, high = 0, -(-(args.context or 1 << 17) // 32)      # rounded up: all multiples below the context are tried
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        if _fits(args, 32 * middle, devices, args.pin):
            low = middle
        else:
            high = middle
    return 32 * low
