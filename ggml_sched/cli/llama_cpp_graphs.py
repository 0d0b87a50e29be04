"""The option --llama-cpp of `ggml-sched fit`: graphs of the installed llama.cpp, and its settings for the answer.

Without the option, this package's own architectures make the graphs; llama.cpp is then imported only for an
architecture that this package does not have.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from types import ModuleType
from typing import TYPE_CHECKING

from ggml_sched.errors import FileFormatError

if TYPE_CHECKING:
    from ggml_sched import Fit, Graph, Stock

__all__ = ["add_argument", "graphs_of_file", "source_of", "stock_of"]


def add_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--llama-cpp", action="store_true",
                       help="graphs of the installed llama.cpp; fit then says what to give it unmodified: name devices "
                       "as it does, --device CUDA0=4090")


def graphs_of_file(name: str, args: argparse.Namespace, context: int) -> list[Graph]:
    """The graphs of a model file: llama.cpp's if --llama-cpp is given, or if only the installed llama.cpp has the
    architecture; else this package's own."""
    from ggml_sched.llama import model_graphs

    if args.llama_cpp:
        return _llama_cpp_graphs(name, args, context)
    try:
        return model_graphs(name, context, args.batch, kv_type=args.kv_type, n_seq=args.sequences,
                            flash=False if args.no_flash else None)
    except FileFormatError as error:
        if "unknown architecture" not in str(error) or importlib.util.find_spec("llama_cpp") is None:
            raise
        return _llama_cpp_graphs(name, args, context)


def _llama_cpp_graphs(name: str, args: argparse.Namespace, context: int) -> list[Graph]:
    run = _room().dry_run(name, **_settings(args, context))
    return [run.token] if args.batch <= args.sequences else [run.token, run.prompt]


def source_of(found: Fit) -> str:
    """A text with the version of llama.cpp, if it made the graphs of a fit; else ""."""
    sources = {str(plan.graph.meta.get("source", "")) for plan in found.plans}
    return next((f"graphs of {source}" for source in sources if source.startswith("llama-cpp-python")), "")


def stock_of(found: Fit, name: str) -> Stock:
    """The settings of an unmodified llama.cpp for a fit of a model file, with exact bytes of compute buffers."""
    # Without extra buffer types: how weights on the host are repacked does not change the bytes of compute buffers.
    return found.llama_cpp(compute=_room().compute_of(name, use_extra_bufts=False))


def _settings(args: argparse.Namespace, context: int) -> dict[str, object]:
    return {"n_ctx": context, "n_batch": args.batch, "n_seq_max": args.sequences, "type_k": args.kv_type,
            "type_v": args.kv_type, "flash_attn": not args.no_flash, "use_extra_bufts": False}


def _room() -> ModuleType:
    """Import ggml_sched.llama_cpp without hooking this process: GGML_SCHED is "off" meanwhile, unless it is set."""
    given = os.environ.get("GGML_SCHED")
    os.environ["GGML_SCHED"] = given or "off"
    try:
        from ggml_sched import llama_cpp
    finally:
        if given is None:
            del os.environ["GGML_SCHED"]
    return llama_cpp
