"""Run the Python of a Markdown page in this process, block after block in one namespace.

    python page_code.py PAGE        # prints [[line, "passed" | "skipped" | "failed", why], ...] as JSON

A fence ```python is run; a fence ```output after it is what it prints, where `...` stands for any text.  A comment
`<!-- skip: next if(missing("tokenizers"), reason="needs tokenizers") -->` before a block skips it where a module is
missing, and with it its output.  Python in a fence ```py is run by another test, together with other files.
"""

from __future__ import annotations

import doctest
import importlib.util
import io
import json
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import dedent
from unittest import SkipTest

from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

PRINTED = "__printed__"
"""The name under which a page's namespace has what its last block printed; None if that block was skipped."""
run_python = PythonEvaluator()


def missing(*modules: str) -> bool:
    """Whether one of some modules is not installed."""
    return any(importlib.util.find_spec(module) is None for module in modules)


def evaluate(example: Example) -> None:
    example.namespace[PRINTED] = None
    with redirect_stdout(io.StringIO()) as out:
        run_python(example)
    example.namespace[PRINTED] = out.getvalue()


def compare(example: Example) -> None:
    if PRINTED not in example.namespace:
        raise AssertionError("no code stands before this output")
    printed = example.namespace[PRINTED]
    if printed is None:
        raise SkipTest("its code was not run")
    # The block is indented as little as its least indented line.
    if not doctest.OutputChecker().check_output(example.parsed, dedent(printed), doctest.ELLIPSIS):
        raise AssertionError(f"the page has\n{example.parsed}\nthe code printed\n{printed}")


def results(page: str) -> list[tuple[int, str, str]]:
    """(line, outcome, reason) of each block of a page, in order."""
    parsers = (SkipParser(), CodeBlockParser("python", evaluate), CodeBlockParser("output", compare))
    found = []
    document = Sybil(parsers).parse(Path(page))
    document.namespace["missing"] = missing
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as skipped:
            document.namespace[PRINTED] = None
            found.append((example.line, "skipped", str(skipped)))
        except BaseException:
            document.namespace[PRINTED] = None
            found.append((example.line, "failed", traceback.format_exc(limit=-2)))
        else:
            if isinstance(example.parsed, str):    # a block of code or its output, not a comment
                found.append((example.line, "passed", ""))
    return found


if __name__ == "__main__":
    print(json.dumps(results(sys.argv[1])))
