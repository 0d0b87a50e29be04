"""Print what a compiler or a build system needs to find the headers of the C and Cython APIs.

For a compiler: `cc $(ggml-sched config --cflags) program.c`.
"""

from __future__ import annotations

import argparse
import os
import shlex


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cflags", action="store_true", help="compiler options: -I and the folder of the headers")
    what.add_argument("--include", action="store_true", help="the folder of the headers")
    what.add_argument("--cython", action="store_true", help="the folder to add to Cython's include path (cython -I)")
    what.add_argument("--pkgconfig", action="store_true", help="the folder for PKG_CONFIG_PATH")
    what.add_argument("--cmake", action="store_true", help="the folder for ggml-sched_DIR")


def run(args: argparse.Namespace) -> int:
    """Print the one line that the option asks for."""
    from ggml_sched import get_cython_path, get_include

    include = get_include()
    if args.cflags:
        print(shlex.quote(f"-I{include}"))
    elif args.cython:
        print(get_cython_path())
    else:
        print(include if args.include else os.path.join(include, "pkgconfig" if args.pkgconfig else "cmake"))
    return 0
