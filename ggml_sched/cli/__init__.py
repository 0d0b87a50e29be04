"""The command `ggml-sched`: each subcommand is a module of this folder.

A subcommand has a docstring, `add_arguments(parser)` and `run(args)`, which prints to stdout and raises errors.
Imports that only one subcommand needs are inside its functions, so that the others start quickly.
Owns the exit codes: 0 done, 1 an error (one line on stderr, no traceback), 2 wrong arguments,
130 interrupted.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from ggml_sched import __version__
from ggml_sched.cli import config, experts, fit, pack, plan, run
from ggml_sched.errors import Error
from ggml_sched.planning.tables import printable

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, ModuleType] = {"run": run, "fit": fit, "plan": plan, "pack": pack, "experts": experts,
                                   "config": config}

_ERRORS = "ggml-sched"
"""The name of the error handler of standard output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, `argv` (None: that of this process); returns the exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:      # this process was started without it, as by `ggml-sched run >&-`
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  until the process ends
    try:
        args = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help, or what is wrong with the arguments
        return int(stop.code or 0)
    try:
        with _all_names_printed():
            code = args.run(args)
            sys.stdout.flush()
        return int(code or 0)
    except BrokenPipeError:
        # The program that reads stdout, such as `| head`, has ended.  Python flushes stdout at exit, which would raise
        # again if stdout were not the null device then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except MemoryError as error:
        return _failed(error, str(error) or "out of memory")
    except (Error, OSError, ValueError, TypeError) as error:
        return _failed(error, str(error))


@contextmanager
def _all_names_printed() -> Iterator[None]:
    """Print names of files that are no text in the encoding of standard output as the bytes that they are, and other
    characters that it does not have with backslashes."""
    stdout, before = sys.stdout, getattr(sys.stdout, "errors", None)
    if not isinstance(stdout, io.TextIOWrapper) or before not in ("strict", "surrogateescape"):
        yield
        return
    codecs.register_error(_ERRORS, _encoded)
    stdout.reconfigure(errors=_ERRORS)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):     # what is not printed yet cannot be printed, or the stream is closed
            stdout.reconfigure(errors=before)


def _encoded(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes of the first character that cannot be encoded, and where the text goes on."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    first = error.object[error.start]
    if "\udc80" <= first <= "\udcff":
        return first.encode("ascii", "surrogateescape"), error.start + 1
    return first.encode("ascii", "backslashreplace").decode("ascii"), error.start + 1


def _failed(error: BaseException, message: str) -> int:
    print("ggml-sched: error:", printable(" ".join(message.split())) or type(error).__name__, file=sys.stderr)
    return 1


class _Parser(argparse.ArgumentParser):
    """Takes the value of `--option=--`, for which argparse of CPython 3.11 gives an empty list."""

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if not action.option_strings or arg_strings != ["--"]:
            return super()._get_values(action, arg_strings)
        value = self._get_value(action, "--")
        self._check_value(action, value)
        return value if action.nargs is None else [value]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ggml-sched", description="Plans where the tensors of neural networks live, and runs them.")
    parser.add_argument("--version", action="version", version=f"ggml-sched {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0].rstrip(".")
        sub = subparsers.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser
