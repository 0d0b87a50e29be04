"""Makes small edits in a copy of the project, one at a time, and reports those that no test notices.

    python tools/mutate.py --seed 7 --sample 200                     200 mutants of all sources, drawn by a seed
    python tools/mutate.py --seed 7 --sample 200 --skip 84           the rest of it, when 84 lines were printed before
    python tools/mutate.py --sample 50 ggml_sched/planning           of a file or folder
    python tools/mutate.py --sample 50 --diff origin/main            of the lines that differ from a commit

Needs an in-place build, which is copied along: the extensions of a mutated file are rebuilt, and then restored.  Tests
of the room that name the mutant's function or file run first, then all tests of the room.  A mutant is noticed when a
test fails that passes without it; tests that fail without any mutant are left out once they are known.  A mutant that
does not compile is replaced by the next one.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutation_operators import SUFFIXES, Mutant, mutants_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("ggml_sched", "include")
COPIED = (*SOURCES, "tests", "bench", "docs", "examples", "tools", "build", "setup.py", "pyproject.toml",
          "_ggml_sched_pytest.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CONTRIBUTING.md",
          "noxfile.py", ".ci", ".github")

TESTS = {
    "include/ggml_sched": "core planning capi graph backends",
    "ggml_sched": "core planning execution backends package",
    "ggml_sched/_graph": "core graph",
    "ggml_sched/_core": "core planning",
    "ggml_sched/_capi": "capi",
    "ggml_sched/core/graph": "core graph planning capi",
    "ggml_sched/core/pack": "core planning",
    "ggml_sched/core/alloc": "core planning execution",
    "ggml_sched/core/plan": "planning capi execution",
    "ggml_sched/graph": "graph core planning",
    "ggml_sched/planning": "planning execution",
    "ggml_sched/placement": "placement cli",
    "ggml_sched/experts": "planning execution llama",
    "ggml_sched/execution": "execution planning threads",
    "ggml_sched/threads": "threads execution backends",
    "ggml_sched/remote": "remote",
    "ggml_sched/testing": "testing execution planning",
    "ggml_sched/backends": "backends graph testing",
    "ggml_sched/backends/cupy": "cupy",
    "ggml_sched/llama": "llama cli",
    "ggml_sched/llama_cpp": "llama_cpp",
    "ggml_sched/cli": "cli package",
    "ggml_sched/view": "view execution",
}
"""{prefix of source paths: folders of tests}; the longest prefix counts."""

NEAR = 5
"""Files that run first."""

BUILD_TIMEOUT = 7200
"""Seconds that a build may take: the first one compiles everything, beside whatever else the machine does."""


def folders_for(path: str) -> list[str]:
    """The folders of tests/ whose tests hold a source file."""
    beginning = max((name for name in TESTS if path.startswith(name)), key=len)
    return [f"tests/{name}" for name in TESTS[beginning].split()]


def files_near(root: Path, mutant: Mutant) -> list[str]:
    """Test files of the room that name the function or the file most often."""
    words = {word for word in (mutant.function.strip("_"), Path(mutant.path).stem.strip("_")) if len(word) > 3}
    pattern = re.compile("|".join(map(re.escape, sorted(words))) or "(?!)")
    counts = {}
    for folder in folders_for(mutant.path):
        for path in sorted((root / folder).rglob("test_*.py")):
            n = 5 * len(pattern.findall(path.name)) + len(pattern.findall(path.read_text(encoding="utf-8")))
            if n:
                counts[path.relative_to(root).as_posix()] = n
    return sorted(counts, key=counts.__getitem__, reverse=True)[:NEAR]


# -- which mutants ---------------------------------------------------------------------------------


def is_source(path: Path) -> bool:
    """Whether a file is a source, not C that Cython generated."""
    return path.suffix in SUFFIXES and not (path.suffix == ".c" and path.with_suffix(".pyx").exists())


def sources(paths: list[str]) -> Iterator[str]:
    for name in paths:
        path = (ROOT / name).resolve()
        if not path.exists():
            raise SystemExit(f"mutate: there is no {name}")
        for found in sorted(path.rglob("*")) if path.is_dir() else [path]:
            relative = found.relative_to(ROOT).as_posix()
            if is_source(found) and relative.startswith(SOURCES):
                yield relative


def changed_lines(base: str) -> dict[str, set[int]]:
    """The lines of each source file that differ from a commit."""
    diff = subprocess.run(["git", "diff", "-U0", base, "--", *SOURCES], cwd=ROOT, capture_output=True, text=True,
                          check=True).stdout
    found: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif match := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first, n = int(match[1]), int(match[2] or 1)
            found.setdefault(path, set()).update(range(first, first + n))
    return found


def candidates(paths: list[str], base: str | None) -> list[Mutant]:
    """Every mutant of the files, or of the lines that differ."""
    lines = None if base is None else changed_lines(base)
    return [mutant for path in sources(paths) if lines is None or path in lines
            for mutant in mutants_of(ROOT, path) if lines is None or mutant.line in lines[path]]


def is_built() -> bool:
    """Whether there is a build in place that copies can start from."""
    return any((ROOT / "ggml_sched" / f"_core{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES)


# -- outcome of a mutant ---------------------------------------------------------------------------


class Copy:
    """The project and its build in a folder of their own.  Invariant: between two mutants it is as it was copied."""

    def __init__(self, root: Path, timeout: int, near: bool) -> None:
        self.root, self.timeout, self.near = root / "project", timeout, near
        self.built = root / "built"
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.root / name, ignore=ignored)
            elif (ROOT / name).exists():
                shutil.copy2(ROOT / name, self.root / name)
        done = self._build()
        if done is None:
            raise SystemExit(f"mutate: the first build takes over {BUILD_TIMEOUT} s")
        if done.returncode:
            raise SystemExit(f"mutate: the project does not build: {done.stderr[-2000:]}")
        for path in self._artefacts():
            (self.built / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.root / path, self.built / path)
        self.failing: dict[tuple[str, ...], bool] = {}
        """Whether tests fail, or take too long, without any mutant."""
        self.noticed_by = ""

    def _artefacts(self) -> list[Path]:
        """Files that a build writes: libraries, objects, what stands beside these, and Cython's C.  An object left of
        a mutant is newer than the restored source, so that later builds would link it."""
        found = [path for path in (self.root / "ggml_sched").rglob("*")
                 if path.suffix == ".so" or path.suffix == ".c" and path.with_suffix(".pyx").exists()]
        found += (path for path in (self.root / "build").rglob("*") if path.is_file())
        return [path.relative_to(self.root) for path in found]

    def outcome(self, mutant: Mutant) -> str:
        """noticed, survived, "does not compile", or why it is undecided."""
        while True:
            said = self._attempt(mutant)
            if isinstance(said, str):
                return said
            is_new = said not in self.failing
            if is_new:
                self.failing[said] = self._first_failure(list(said)) is not None
            if not self.failing[said]:
                self.noticed_by = " ".join(said)
                return "noticed"
            if not is_new or said not in self._left_out():
                return f"undecided: {' '.join(said)} fails without it, too"

    def _attempt(self, mutant: Mutant) -> str | tuple[str, ...]:
        """The outcome, or the tests that fail with the mutant."""
        path = self.root / mutant.path
        source, times = path.read_bytes(), path.stat()
        for cache in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            cache.unlink()
        path.write_bytes(mutant.applied(source))
        try:
            if path.suffix not in (".py", ".cu", ".cuh"):
                done = self._build()
                if done is None:
                    return f"undecided: a build takes over {BUILD_TIMEOUT} s"
                if done.returncode:
                    return "does not compile"
            near = files_near(self.root, mutant)
            failed = self._first_failure(near) if near else None
            if failed is None and not (near and self.near):
                failed = self._first_failure(folders_for(mutant.path))
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            self._restore_build()
        return "survived" if failed is None else failed

    def _build(self) -> subprocess.CompletedProcess | None:
        return self._run(BUILD_TIMEOUT, "setup.py", "build_ext", "--inplace")

    def _restore_build(self) -> None:
        for path in self._artefacts():
            if not (self.built / path).exists():
                (self.root / path).unlink()
            elif (self.built / path).stat().st_mtime_ns != (self.root / path).stat().st_mtime_ns:
                shutil.copy2(self.built / path, self.root / path)

    def _first_failure(self, tests: list[str]) -> tuple[str, ...] | None:
        """The test that failed, or the file that cannot be collected; None if all pass.  All of `tests` where they
        exceed the time limit, or pytest names no failed test.  Of several tests those that fail without a mutant, too,
        are left out."""
        left_out = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test, in self._left_out()
                    if [test] != tests]
        done = self._run(self.timeout, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *left_out,
                         *tests)
        if done is not None and done.returncode in (0, 5):
            return None
        named = re.search(r"^(FAILED|ERROR) ([^\s\[]+)", done.stdout if done is not None else "", re.MULTILINE)
        if named is None or named[1] == "ERROR" and "::" in named[2]:    # the fixture of a session, at its last test
            return tuple(tests)
        return (named[2],)

    def _left_out(self) -> list[tuple[str, ...]]:
        """Tests and files that are known to fail without any mutant."""
        return [named for named, fails in self.failing.items()
                if fails and len(named) == 1 and ("::" in named[0] or named[0].endswith(".py"))]

    def _run(self, timeout: int, *arguments: str) -> subprocess.CompletedProcess | None:
        """None when it takes longer than `timeout` seconds."""
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.setdefault("GGML_SCHED_BUILD", "debug")
        # In a session of its own, so that children of what hangs end with it.
        with subprocess.Popen([sys.executable, *arguments], cwd=self.root, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                said = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return None
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, *said)


# -- the command -----------------------------------------------------------------------------------


def run(mutants: list[Mutant], sample: int, jobs: int, timeout: int, near: bool) -> dict[str, list[str]]:
    """Outcomes of the first `sample` mutants that compile, printed as they come: descriptions by outcome."""
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        roots = [Path(folder) / str(k) for k in range(jobs)]
        copies: queue.Queue[Copy] = queue.Queue()
        for root in roots:
            copies.put(Copy(root, timeout, near))

        def outcome(mutant: Mutant) -> None:
            if sum(len(rows) for name, rows in found.items() if name != "does not compile") >= sample:
                return
            copy, start = copies.get(), time.monotonic()
            try:
                said = copy.outcome(mutant)
                by = f"  by {copy.noticed_by}" if said == "noticed" else ""
            finally:
                copies.put(copy)
            found.setdefault(said, []).append(str(mutant))
            print(f"{said:9} {time.monotonic() - start:4.0f} s  {mutant}{by}", flush=True)

        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(outcome, mutants))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(SOURCES), help="files or folders (default: all sources)")
    parser.add_argument("--seed", type=int, help="which mutants are drawn (default: any)")
    parser.add_argument("--sample", type=int, default=50, help="how many mutants (default: 50)")
    parser.add_argument("--skip", type=int, default=0, metavar="N",
                        help="leave out the first N edits of the sample, which an equal run of the same tree has tried")
    parser.add_argument("--diff", metavar="BASE", help="only lines that differ from this commit")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the project at a time")
    parser.add_argument("--timeout", type=int, default=900, help="seconds after which tests hang (default: 900)")
    parser.add_argument("--near", action="store_true", help="only tests that name the function or file of a mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    if options.skip < 0:
        parser.error(f"--skip {options.skip} is negative")
    if options.skip and options.skip >= options.sample:
        parser.error(f"--skip {options.skip} leaves nothing of a sample of {options.sample}")
    if options.skip and options.seed is None:
        parser.error("--skip needs the --seed of the run that it continues")
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    mutants = candidates(options.paths, options.diff)
    print(f"{len(mutants)} mutants, seed {seed}", flush=True)
    random.Random(seed).shuffle(mutants)
    mutants, sample = mutants[options.skip:], options.sample - options.skip
    if options.list:
        for mutant in mutants[:sample]:
            print(mutant)
        return 0
    found = run(mutants, sample, options.jobs, options.timeout, options.near)
    survivors = [(outcome, row) for outcome, rows in found.items() if outcome not in ("noticed", "does not compile")
                 for row in rows]
    print(*(f"{outcome}: {row}" for outcome, row in sorted(survivors)), sep="\n")
    print(f"seed {seed}:", ", ".join(f"{len(rows)} {outcome}" for outcome, rows in sorted(found.items())))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
