"""Guards, and the one-line edits that take each of them away: `python tests/soak/mutations.py` reports survivors.

Every edit is made in a copy of the project, which is built again where the core has changed; then the tests named with
it must fail.  An edit that no test notices is a survivor: a guard whose removal nobody would miss.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("ggml_sched", "include", "tests", "bench", "docs", "examples", "setup.py", "pyproject.toml", "README.md",
          "LICENSE", "MANIFEST.in")
TIMEOUT = 900
"""Seconds for the tests of one edit; what takes longer hangs, which counts as noticed."""


class Edit(NamedTuple):
    """Replace `before`, which stands once in the file, by `after`; one of the tests then fails."""

    path: str
    tests: str
    guard: str
    before: str
    after: str


def _edits() -> list[Edit]:
    found = []

    def of(path: str, tests: str, *edits: tuple[str, str, str]) -> None:
        found.extend(Edit(path, tests, *edit) for edit in edits)

    of("ggml_sched/program.py", "tests/planner/test_guards.py tests/executor",
       ("one reader of expert weights", "if read[weight] == 1}", "}"),
       ("ids computed in the same split", "None if start <= self.position[self.memory[ids]] < stop else ids", "ids"),
       ("experts of a weight in a ring or kept", "if not keeps and not self._is_placed(i):", "if True:"),
       ("ids that a node writes over", "or self.written and int(self.memory[ids]) in self.written:", "or False:"),
       ("copies ahead of what is written later",
        "if len(self.places[c]) > 1 and self._is_unwritten(self.copies[c][0])]", "if len(self.places[c]) > 1]"),
       ("keeping what others use",
        "keeps = self._is_leaf(i) and (bool(self.kept[c]) or all(self._is_exclusive(place.id) for place in places))",
        "keeps = self._is_leaf(i)"),
       ("keeping what a node computes", "keeps = self._is_leaf(i) and (", "keeps = ("),
       ("who writes a leaf first", "first_read[i] <= first_write[i]]", "True]"),
       ("what nodes keep is touched", "touched.update(int(self.memory[i]) for i in self._kept_ids())", "pass"),
       ("the waits of keepers", ", *self._accesses_of_keepers(step_at)]", "]"),
       ("the waits of write-backs", "yield step.tensor, k, 1\n                continue", "continue"),
       ("ids are read by copies of experts", "yield step.ids, k, 0", "pass"),
       ("who owns pushed copies", "pushes = len(places) > 1 and self.concurrent[backend] and owner >= 0",
        "pushes = len(places) > 1 and owner >= 0"))
    of("ggml_sched/ordering.py", "tests/planner/test_ordering.py",
       ("waits for the compute before", "_want(wanted[first], queues, Wait(second, period))", "pass"),
       ("reads do not wait for reads", " & (writes | writes[k])", ""),
       ("what is left out orders nothing", "() if keeps[i] else wanted[i].values()", "wanted[i].values()"),
       ("backends that compute or take data", "note(i, j, 1)", "pass"),
       ("the latest wait includes others", "if known is None or (wait.back, -wait.step) < (known.back, -known.step):",
        "if known is None:"))
    of("ggml_sched/core/pack/run.pxi", "tests/core/test_pack.py",
       ("proofs count in the sizes' common divisor", "grain = pack_grain(p)\n        work.out.proven",
        "grain = 1\n        work.out.proven"),
       ("the first packing is kept however large", " or work.out.method == PACK_METHOD_NONE:", ":"),
       ("joined problems prove nothing", "elif found == SEARCH_IMPOSSIBLE and p == work.p:",
        "elif found == SEARCH_IMPOSSIBLE:"),
       ("never worse than best fit", "if status == GS_OK and out.arena > out.proven and not work.fitted:", "if False:"))
    of("ggml_sched/core/pack/state.pxi", "tests/core/test_pack.py",
       ("a lift depends on what it reads", "q.reason |= changed         # all that it reads, too", "pass"),
       ("what followed from a lift follows from its reason", "q.reason |= <uint64_t>c.old", "pass"))
    of("ggml_sched/core/pack/prepare.pxi", "tests/core/test_pack.py",
       ("a shuffled problem is the same", "return p.size[a] > p.size[b]", "return False"))
    of("ggml_sched/core/pack/fill.pxi", "tests/core/test_pack.py",
       ("holes are filled", "    if seed:\n        fill_holes", "    if False:\n        fill_holes"))
    of("ggml_sched/core/pack/two_ends.pxi", "tests/core/test_pack.py",
       ("which neighbour stays longer", "return gap.below < 0 or gap.above >= 0 and stop[gap.below] >= stop[gap.above]",
        "return True"))
    of("ggml_sched/core/pack/blocks.pxi", "tests/planner/test_default_extremes.py",
       ("no chunk ends beyond 63 bits", "or gs_checked_add(offset, b.stride, &end) != GS_OK):", "):"))
    return found


EDITS = _edits()


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

    def build(self) -> str | None:
        """Compile; what the compiler said if it failed."""
        done = self._run("setup.py", "build_ext", "--inplace")
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
        paths = [str(self.home), str(self.home / "tests"), str(self.home / "tests" / "soak")]
        environment = {**os.environ, "GGML_SCHED_BUILD": "debug", "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run([sys.executable, *arguments], cwd=self.home, env=environment, capture_output=True,
                              text=True, timeout=TIMEOUT)

    def survives(self, edit: Edit) -> str | None:
        """What is wrong with an edit: nobody notices it, or it does not compile.  None if a test fails."""
        path = self.home / edit.path
        text = path.read_text()
        compiled = path.suffix in (".pxi", ".pyx", ".pxd", ".h")
        path.write_text(text.replace(edit.before, edit.after))
        try:
            said = self.build() if compiled else None
            if said is not None:
                return f"does not compile: {said}"
            return "no test failed" if self.test(edit.tests) else None
        finally:
            path.write_text(text)
            if compiled:
                os.utime(path)
                self.build()


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
