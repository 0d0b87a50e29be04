"""Makes small edits in a copy of the project, one at a time, and reports those that no test notices.

    python tools/mutate.py --seed 7 --sample 200                     200 mutants of all sources, drawn by a seed
    python tools/mutate.py --sample 50 ggml_sched/planning           of a file or folder
    python tools/mutate.py --sample 50 --diff origin/main            of the lines that differ from a commit

Needs an in-place build, which is copied along: the extensions of a mutated file are rebuilt, and then restored.  Tests
of the room that name the mutant's function or file run first, then all tests of the room.  A mutant is noticed when a
test fails that passes without it; a mutant that does not compile is replaced by the next one.
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
          "_ggml_sched_pytest.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md")

TESTS = {
    "include/ggml_sched": "core planning capi graph backends",
    "ggml_sched": "core planning execution backends package",
    "ggml_sched/_graph": "core graph",
    "ggml_sched/_core": "core planning",
    "ggml_sched/_capi": "capi",
    "ggml_sched/core/graph": "core graph planning",
    "ggml_sched/core/pack": "core planning",
    "ggml_sched/core/alloc": "core planning execution",
    "ggml_sched/core/plan": "planning capi execution",
    "ggml_sched/graph": "graph core planning",
    "ggml_sched/planning": "planning execution",
    "ggml_sched/execution": "execution planning threads",
    "ggml_sched/threads": "threads execution backends",
    "ggml_sched/testing": "testing execution planning",
    "ggml_sched/backends": "backends graph testing",
    "ggml_sched/backends/cupy": "cupy",
    "ggml_sched/llama": "llama cli",
    "ggml_sched/llama_cpp": "llama_cpp",
    "ggml_sched/cli": "cli package",
}
"""{prefix of source paths: folders of tests}; the longest prefix counts."""

NEAR = 5
"""Files that run first."""


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

    def __init__(self, home: Path, timeout: int, near: bool) -> None:
        self.home, self.timeout, self.near = home / "project", timeout, near
        self.built = home / "built"
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.o")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.home / name, ignore=ignored)
            elif (ROOT / name).exists():
                shutil.copy2(ROOT / name, self.home / name)
        done = self._run("setup.py", "build_ext", "--inplace")
        if done is None or done.returncode:
            raise SystemExit(f"mutate: the project does not build: {'' if done is None else done.stderr[-2000:]}")
        for path in self._artefacts():
            (self.built / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.home / path, self.built / path)
        self.failing: dict[str, bool] = {}
        """Whether a test fails without any mutant."""

    def _artefacts(self) -> list[Path]:
        """Files that a build writes: libraries, and Cython's C."""
        found = [path for path in (self.home / "ggml_sched").rglob("*")
                 if path.suffix == ".so" or path.suffix == ".c" and path.with_suffix(".pyx").exists()]
        found += (self.home / "build").rglob("*.so")
        return [path.relative_to(self.home) for path in found]

    def outcome(self, mutant: Mutant) -> str:
        """noticed, survived, "does not compile", or which test fails without it, too."""
        path = self.home / mutant.path
        source, times = path.read_bytes(), path.stat()
        for cache in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            cache.unlink()
        path.write_bytes(mutant.applied(source))
        try:
            if path.suffix not in (".py", ".cu", ".cuh"):
                done = self._run("setup.py", "build_ext", "--inplace")
                if done is None or done.returncode:
                    return "does not compile"
            near = files_near(self.home, mutant)
            failed = self._first_failure(near) if near else None
            if failed is None and not (near and self.near):
                failed = self._first_failure(folders_for(mutant.path))
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            self._restore_build()
        if failed is None:
            return "survived"
        return f"undecided: {failed} fails without it, too" if self._fails_anyway(failed) else "noticed"

    def _restore_build(self) -> None:
        for path in self._artefacts():
            if not (self.built / path).exists():
                (self.home / path).unlink()
            elif (self.built / path).stat().st_mtime_ns != (self.home / path).stat().st_mtime_ns:
                shutil.copy2(self.built / path, self.home / path)

    def _first_failure(self, tests: list[str]) -> str | None:
        """The test that failed, or the file that cannot be collected; "" where the tests hang, None if all pass."""
        done = self._run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", *tests)
        if done is not None and done.returncode in (0, 5):
            return None
        named = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout if done is not None else "", re.MULTILINE)
        return named[1] if named else ""

    def _fails_anyway(self, test: str) -> bool:
        if test and test not in self.failing:
            self.failing[test] = self._first_failure([test]) is not None
        return bool(test) and self.failing[test]

    def _run(self, *arguments: str) -> subprocess.CompletedProcess | None:
        """None when it takes too long."""
        environment = {**os.environ, "PYTHONPATH": str(self.home), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.setdefault("GGML_SCHED_BUILD", "debug")
        # In a session of its own, so that children of what hangs end with it.
        with subprocess.Popen([sys.executable, *arguments], cwd=self.home, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
            try:
                said = process.communicate(timeout=self.timeout)
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
        homes = [Path(folder) / str(k) for k in range(jobs)]
        copies: queue.Queue[Copy] = queue.Queue()
        for home in homes:
            copies.put(Copy(home, timeout, near))

        def outcome(mutant: Mutant) -> None:
            if sum(len(rows) for name, rows in found.items() if name != "does not compile") >= sample:
                return
            copy, start = copies.get(), time.monotonic()
            try:
                said = copy.outcome(mutant)
            finally:
                copies.put(copy)
            found.setdefault(said, []).append(str(mutant))
            print(f"{said:9} {time.monotonic() - start:4.0f} s  {mutant}", flush=True)

        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(outcome, mutants))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(SOURCES), help="files or folders (default: all sources)")
    parser.add_argument("--seed", type=int, help="which mutants are drawn (default: any)")
    parser.add_argument("--sample", type=int, default=50, help="how many mutants (default: 50)")
    parser.add_argument("--diff", metavar="BASE", help="only lines that differ from this commit")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the project at a time")
    parser.add_argument("--timeout", type=int, default=900, help="seconds after which tests hang (default: 900)")
    parser.add_argument("--near", action="store_true", help="only tests that name the function or file of a mutant")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    mutants = candidates(options.paths, options.diff)
    print(f"{len(mutants)} mutants, seed {seed}", flush=True)
    random.Random(seed).shuffle(mutants)
    if options.list:
        for mutant in mutants[:options.sample]:
            print(mutant)
        return 0
    found = run(mutants, options.sample, options.jobs, options.timeout, options.near)
    survivors = [(outcome, row) for outcome, rows in found.items() if outcome not in ("noticed", "does not compile")
                 for row in rows]
    print(*(f"{outcome}: {row}" for outcome, row in sorted(survivors)), sep="\n")
    print(f"seed {seed}:", ", ".join(f"{len(rows)} {outcome}" for outcome, rows in sorted(found.items())))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
