"""The commands of this repository's developers: `nox --list` names them, `nox -s NAME -- ARGUMENTS` runs one.

They run in the environment that is active, so that what `nox -s develop` has built is not built again; only
`install`, which proves what a user gets, makes environments of its own.  CONTRIBUTING.md says when to use which.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "test"]

ROOT = Path(__file__).parent
BUILD_REQUIREMENTS = nox.project.load_toml("pyproject.toml")["build-system"]["requires"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
STUBBED = tuple(sorted(".".join(path.relative_to(ROOT).with_suffix("").parts)
                       for path in (ROOT / "ggml_sched").rglob("*.pyx")))
"""Every extension: its stub is compared with what was compiled."""
RANDOM = ("tests/execution/test_random_execution.py", "tests/cupy/test_cupy_random.py", "tests/llama/test_sampling.py",
          "tests/planning/test_every_policy.py", "tests/core/test_reference_comparison.py",
          "tests/execution/test_memory_rules.py")
"""Tests of random cases, of which the soaks try twenty times as many."""
TIDY = {
    "ggml_sched/backends/cpu/kernels": ("ggml_sched/backends/cpu",),
    "ggml_sched/llama_cpp": ("ggml_sched/backends/ggml",),
}
"""Folders of C and what they include besides themselves and include/."""


def build_environment(session: nox.Session) -> dict[str, str]:
    """GGML_SCHED_BUILD as the arguments say: `debug`, `sanitize`, or nothing for the optimised build."""
    modes = [word for word in session.posargs if word in ("debug", "sanitize")]
    return {"GGML_SCHED_BUILD": modes[-1]} if modes else {}


# -- building -----------------------------------------------------------------------------------------


@nox.session
def develop(session: nox.Session) -> None:
    """Install this working tree editable, with what tests and linters need; `-- debug` builds without optimising."""
    session.run("python", "-m", "pip", "install", *BUILD_REQUIREMENTS)
    session.run("python", "-m", "pip", "install", "--no-build-isolation", "-e", ".[dev,test]",
                env=build_environment(session))


@nox.session
def build(session: nox.Session) -> None:
    """Compile what changed, in place; `-- debug` and `-- sanitize` as in setup.py, `-- --force` for everything."""
    options = [word for word in session.posargs if word.startswith("-")]
    session.run("python", "setup.py", "build_ext", "--inplace", *options, env=build_environment(session))


@nox.session
def release(session: nox.Session) -> None:
    """Build a source distribution, and a wheel from it, into dist/."""
    session.run("python", "-m", "pip", "install", "build")
    session.run("python", "-m", "build", "--outdir", "dist", *session.posargs)


# -- proving ------------------------------------------------------------------------------------------


@nox.session
def test(session: nox.Session) -> None:
    """The tests, or those that the arguments name: `-- tests/core/test_pack.py -k tiling`."""
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "auto"]))


@nox.session
def soak(session: nox.Session) -> None:
    """The tests that take minutes each: attacks, sanitizers, long runs; and more random cases."""
    session.run("python", "-m", "pytest", "-m", "soak", *(session.posargs or ["tests"]))
    if not session.posargs:
        session.run("python", "-m", "pytest", *RANDOM, env={"GGML_SCHED_EXAMPLES": "20"})


@nox.session
def mutations(session: nox.Session) -> None:
    """Edit a copy of the code, one place at a time, and report the edits that no test notices."""
    session.run("python", "tools/mutate.py", *session.posargs)


@nox.session(venv_backend="virtualenv", python=PYTHONS)
def install(session: nox.Session) -> None:
    """README's test command in a fresh environment of each Python: what a user gets."""
    session.install(".[test]")
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session(name="wheel-tests", venv_backend="virtualenv", python=PYTHONS)
def wheel_tests(session: nox.Session) -> None:
    """The wheel's tests, with the wheel, NumPy and pytest alone: `-- dist/NAME.whl`; without a name it builds one.

    They run in a folder of their own, which holds tests/ and pyproject.toml: what is tested is what is installed.
    """
    what = [word for word in session.posargs if word.endswith((".whl", ".tar.gz"))]
    session.install(*(what or ["."]), "pytest>=8")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "tests", Path(folder, "tests"), ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        with session.chdir(folder):
            session.run("pytest", *(word for word in session.posargs if word not in what), env={"PYTHONPATH": None})


# -- style and types ----------------------------------------------------------------------------------


@nox.session
def lint(session: nox.Session) -> None:
    """Every hook of .pre-commit-config.yaml over every file."""
    session.run("python", "-m", "pre_commit", "run", "--all-files", *session.posargs)


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the package; mypy and pyright over a program of a user; complete types; the extensions' stubs."""
    session.run("python", "-m", "mypy", "--warn-unused-configs")
    session.run("python", "-m", "mypy", "tests/typing")
    session.run("python", "-m", "pyright", "tests/typing")
    session.run("python", "tools/check_types.py")
    compiled = any((ROOT / "ggml_sched").glob("_core.*.so"))
    environment = {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": str(ROOT)} if compiled else {})}
    session.run("python", "-m", "mypy.stubtest", *STUBBED, "--mypy-config-file", "pyproject.toml", env=environment)


@nox.session
def tidy(session: nox.Session) -> None:
    """clang-tidy over the C sources, or over those whose path has an argument in it; .clang-tidy has the checks."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [command for room, beside in TIDY.items() for command in tidy_commands(room, beside)]
        Path(folder, "compile_commands.json").write_text(json.dumps(commands), encoding="utf-8")
        session.run("run-clang-tidy.py", "-quiet", "-p", folder, *session.posargs)


def tidy_commands(room: str, beside: tuple[str, ...]) -> list[dict[str, object]]:
    """How each C source of a room is compiled, as clang's tools read it."""
    folders = {path.parent for path in (ROOT / room).rglob("*.h")}
    includes = [f"-I{ROOT / path}" for path in ("include", room, *beside, *sorted(folders))]
    return [{"directory": str(ROOT), "file": str(path), "arguments": ["cc", "-std=gnu11", *includes, "-c", str(path)]}
            for path in sorted((ROOT / room).rglob("*.c")) if not path.name.startswith("_")]


@nox.session
def format(session: nox.Session) -> None:
    """Lay out the C that differs from a commit (default: HEAD) as .clang-format says; lines not touched stay."""
    session.run("git", "clang-format", "--extensions", "c,h", *(session.posargs or ["HEAD"]), external=True,
                success_codes=[0, 1])
    session.run("python", "-m", "ruff", "check", "--fix", ".")


# -- documenting --------------------------------------------------------------------------------------


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation's site into build/site; a warning is an error.  It needs the extra `docs`."""
    # Without the working directory on its path: that has the package's sources, compiled or not; conf.py looks.
    session.run("python", "-m", "sphinx", "-W", "--keep-going", "-d", "build/doctrees", "docs", "build/site",
                *session.posargs, env={"PYTHONSAFEPATH": "1"})


# -- measuring ----------------------------------------------------------------------------------------


@nox.session
def bench(session: nox.Session) -> None:
    """A program of bench/ and its arguments: `-- report.py --rounds 5`; docs/benchmarks.md names them."""
    if not session.posargs:
        names = sorted(path.name for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text("utf-8"))
        session.error("which one?  " + " ".join(names))
    program, *arguments = session.posargs
    session.log("it needs: pip install '.[bench,llama,ggml,peer]'")
    session.run("python", f"bench/{program}", *arguments)


@nox.session(name="bench-compare")
def bench_compare(session: nox.Session) -> None:
    """Time `pytest bench` on a base and on this tree; a minimum that is a tenth longer fails.  `-- BASE -k pack`.

    BASE is a commit, by default the one at which this branch left origin/main.  Both trees are built optimised, the
    base in a folder that is removed.
    """
    base, *options = session.posargs if session.posargs[:1] and session.posargs[0][0] != "-" else ["", *session.posargs]
    if not base:
        base = session.run("git", "merge-base", "HEAD", "origin/main", external=True, silent=True).strip()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "base")
        session.run("git", "worktree", "add", "--quiet", "--detach", str(tree), base, external=True)
        try:
            for where, more in ((tree, ["--benchmark-save=base"]),
                                (ROOT, ["--benchmark-compare", "--benchmark-compare-fail=min:10%"])):
                with session.chdir(where):
                    session.run("python", "setup.py", "-q", "build_ext", "--inplace", env={"GGML_SCHED_BUILD": ""})
                    session.run("python", "-m", "pytest", "bench", "-q", "--benchmark-only",
                                f"--benchmark-storage=file://{folder}/times", *more, *options)
        finally:
            session.run("git", "worktree", "remove", "--force", str(tree), external=True)
