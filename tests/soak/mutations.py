"""Takes guards away, one by one: `python tests/soak/mutations.py [words]` reports those that no test misses.

Every edit that guards.py lists is made in a copy of the project, which is built again where the core has changed; then
the tests named with it must fail, which must pass without it.  An edit that no test notices is a survivor: a guard
whose removal nobody would miss.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from guards import EDITS, Edit

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("ggml_sched", "include", "tests", "bench", "docs", "examples", "setup.py", "pyproject.toml", "README.md",
          "LICENSE", "MANIFEST.in")
TIMEOUT = 900
"""Seconds for the tests of one edit; what takes longer hangs, which counts as noticed."""


class Copy:
    """The project in a folder of its own, where edits are made and taken back."""

    def __init__(self, home: Path) -> None:
        self.home = home
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "build")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, home / name, ignore=ignored)
            elif source.exists():
                shutil.copy(source, home / name)
        self.build()
        self.passing: dict[str, bool] = {}
        """Whether tests pass without an edit."""

    def build(self) -> str | None:
        """Compile; what the compiler said if it failed."""
        done = self._run("setup.py", "build_ext", "--inplace")
        self.is_built = done.returncode == 0
        return None if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:]

    def test(self, tests: str) -> bool | None:
        """Whether they pass; None when they hang."""
        try:
            done = self._run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split())
        except subprocess.TimeoutExpired:
            return None
        if done.returncode not in (0, 1, 2) and done.returncode >= 0:
            raise SystemExit(f"{tests}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.returncode == 0

    def _run(self, *arguments: str) -> subprocess.CompletedProcess:
        paths = [str(self.home), str(self.home / "tests" / "support"), str(self.home / "tests" / "soak")]
        environment = {**os.environ, "GGML_SCHED_BUILD": "debug", "PYTHONPATH": os.pathsep.join(paths)}
        # In a session of its own, so that children of what hangs end with it.
        with subprocess.Popen([sys.executable, *arguments], cwd=self.home, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                said = process.communicate(timeout=TIMEOUT)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, *said)

    def survives(self, edit: Edit) -> str | None:
        """What is wrong with an edit: nobody notices it, it does not compile, or its tests fail without it.  None if a
        test fails."""
        if edit.tests not in self.passing:
            said = None if self.is_built else self.build()
            self.passing[edit.tests] = said is None and self.test(edit.tests) is True
        if not self.passing[edit.tests]:
            return "its tests fail without it, too"
        path = self.home / edit.path
        text = path.read_text()
        path.write_text(text.replace(edit.before, edit.after))
        self.is_built &= path.suffix == ".py"
        try:
            said = None if self.is_built else self.build()
            if said is not None:
                return f"does not compile: {said}"
            return "no test failed" if self.test(edit.tests) else None
        finally:
            path.write_text(text)
            self.is_built &= path.suffix == ".py"


def misplaced(edits: list[Edit]) -> list[str]:
    """Edits whose text does not stand just once in its file."""
    counts = [(edit, (ROOT / edit.path).read_text().count(edit.before)) for edit in edits]
    return [f"{edit.path}: {edit.guard}: stands there {n} times" for edit, n in counts if n != 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only edits whose path or guard has one of these in it")
    parser.add_argument("--list", action="store_true", help="print them and stop")
    options = parser.parse_args()
    edits = [e for e in EDITS if not options.words or any(w in f"{e.path} {e.guard}" for w in options.words)]
    wrong = misplaced(edits)
    if wrong:
        print("\n".join(wrong))
        return 2
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = None if options.list else Copy(Path(folder) / "project")
        for k, edit in enumerate(edits, 1):
            print(f"{k:>3}/{len(edits)}  {edit.path}: {edit.guard}", end="", flush=True)
            if copy is None:
                print()
                continue
            said = copy.survives(edit)
            survivors += said is not None
            print(f"  ** {said}" if said else "  noticed", flush=True)
    if not options.list:
        print(f"{len(edits)} edits, {survivors} survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
