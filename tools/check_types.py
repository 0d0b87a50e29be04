"""Refuse a package in which fewer than 98 % of the public names have complete types, as pyright counts them.

    python tools/check_types.py [PACKAGE]

A name is complete if every type that it shows (of parameters, results, attributes, base classes) is declared, or is
inferred alike by all checkers.  Names of other packages count as complete.  Prints the share, and each name that is not
complete, with its place.  Needs pyright (extra `dev`), and no build: it reads the sources and the stubs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEAST = 0.98


def completeness(package: str, root: Path) -> dict[str, Any]:
    """pyright's report about a package in the folder `root`; SystemExit if pyright finds none, or is not installed."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--verifytypes", package,
               "--ignoreexternal", "--outputjson"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    try:
        report = json.loads(done.stdout)
        found: dict[str, Any] = report["typeCompleteness"]
    except (ValueError, KeyError):
        sys.exit(f"pyright gives no report about {package}: {(done.stderr or done.stdout).strip()}")
    problems = [problem["message"] for problem in report["generalDiagnostics"]]
    if problems:
        sys.exit(f"pyright cannot read {package}: {'; '.join(problems)}")
    return found


def incomplete(report: dict[str, Any]) -> Iterator[str]:
    """A line for each place where a public name has no complete type."""
    for symbol in sorted(report["symbols"], key=lambda symbol: str(symbol["name"])):
        if symbol["isExported"] and not symbol["isTypeKnown"]:
            for found in symbol["diagnostics"]:
                message = " ".join(found["message"].split())
                if not message.startswith("No docstring"):
                    place = f"{found['file']}:{found['range']['start']['line'] + 1}: " if found.get("file") else ""
                    yield f"{place}{symbol['name']}: {message}"


def main(packages: list[str]) -> int:
    report = completeness(*(packages or ["ggml_sched"]), ROOT)
    share, counts = report["completenessScore"], report["exportedSymbolCounts"]
    for line in incomplete(report):
        print(line)
    print(f"{counts['withKnownType']} of {sum(counts.values())} public names have complete types: {share:.2%}; "
          f"{LEAST:.0%} are needed")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
