"""tools/mutate.py: its mutants change code, surviving mutants are listed, and the sources are restored."""

import ast
import random
import subprocess
import tomllib
from pathlib import Path

import mutate
import pytest
from mutation_operators import Mutant, mutants_of
from processes import run_python

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "mutate.py"

PYTHON = '''"""A docstring with 1 < 2 and nothing to edit."""
import os
def area(wide: int = 3, flag=True) -> "1 + 1":
    if wide <= 4 and flag:          # 5 == 6
        raise ValueError(f"{wide} is {1 + 1}")
    print("a" + "b")
    return [x - 1 for x in range(wide) if x is not None]
'''
CYTHON = '''cdef int area(int wide, bint flag) noexcept nogil:
    """1 < 2 and so on."""
    cdef int n = 0
    if wide <= 4 and flag:  # 5 == 6
        note("7 == 8", wide)
    self.wide = wide
    return n + 1
'''
C = '''#define AREA 4
static int area(int wide, bool flag) {
    int n = 0;  // 5 == 6
    if (wide <= 4 && (flag || !n)) {
        note("7 == 8");
        t->wide = wide;
    }
    return n + 1;  /* 9 < 10 */
}
'''


def edits(tmp_path: Path, name: str, text: str) -> set[tuple[int, str, str, str]]:
    (tmp_path / name).write_text(text, encoding="utf-8")
    source = text.encode()
    return {(m.line, m.operator, source[m.start:m.end].decode().strip(), m.text.strip())
            for m in mutants_of(tmp_path, name)}


def test_python_is_edited_by_its_syntax(tmp_path):
    assert edits(tmp_path, "area.py", PYTHON) == {
        (3, "constant", "3", "4"), (3, "constant", "True", "False"),
        (4, "comparison", "<=", "<"), (4, "constant", "4", "5"), (4, "logic", "and", "or"),
        (4, "condition", "wide <= 4 and flag", "not (wide <= 4 and flag)"),
        (5, "statement", 'raise ValueError(f"{wide} is {1 + 1}")', "pass"),
        (6, "statement", 'print("a" + "b")', "pass"),
        (7, "statement", "return [x - 1 for x in range(wide) if x is not None]", "pass"), (7, "arithmetic", "-", "+"),
        (7, "constant", "1", "2"), (7, "comparison", "is not", "is"),
        (7, "condition", "x is not None", "not (x is not None)"),
    }


def test_cython_is_edited_outside_comments_strings_and_declarations(tmp_path):
    assert edits(tmp_path, "area.pyx", CYTHON) == {
        (4, "comparison", "<=", "<"), (4, "constant", "4", "5"), (4, "logic", "and", "or"),
        (4, "condition", "wide <= 4 and flag", "not (wide <= 4 and flag)"),
        (5, "statement", 'note("7 == 8", wide)', "pass"), (6, "statement", "self.wide = wide", "pass"),
        (7, "statement", "return n + 1", "pass"), (7, "arithmetic", "+", "-"), (7, "constant", "1", "2"),
    }


def test_c_is_edited_outside_comments_strings_and_directives(tmp_path):
    assert edits(tmp_path, "area.c", C) == {
        (3, "constant", "0", "1"),
        (4, "comparison", "<=", "<"), (4, "constant", "4", "5"), (4, "logic", "&&", "||"), (4, "logic", "||", "&&"),
        (4, "condition", "wide <= 4 && (flag || !n)", "!(wide <= 4 && (flag || !n))"),
        (5, "statement", 'note("7 == 8");', ";"), (6, "statement", "t->wide = wide;", ";"),
        (8, "statement", "return n + 1;", ";"), (8, "arithmetic", "+", "-"), (8, "constant", "1", "2"),
    }


@pytest.mark.parametrize("n", [10, pytest.param(40, marks=pytest.mark.soak)])
def test_mutants_of_the_package_s_modules_are_python(n):
    paths = [path for path in mutate.sources(["ggml_sched"]) if path.endswith(".py")]
    drawn = random.Random(1)
    for path in drawn.sample(paths, n):
        source = (ROOT / path).read_bytes()
        for mutant in drawn.sample(found := mutants_of(ROOT, path), min(8, len(found))):
            assert ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source)), mutant


def test_every_source_has_tests():
    for path in mutate.sources(list(mutate.SOURCES)):
        assert all((ROOT / folder).is_dir() for folder in mutate.folders_for(path)), path


def test_each_room_of_the_package_has_tests_of_its_own():
    """Otherwise its mutants meet the tests of whatever has no row in the table."""
    rooms = [path.parent.name for path in (ROOT / "ggml_sched").glob("*/__init__.py")]
    assert len(rooms) > 8
    for room in rooms:
        assert any(name.startswith(f"ggml_sched/{room}") for name in mutate.TESTS), room


def listed(*arguments: str) -> str:
    return run_python(str(TOOL), "--list", *arguments).stdout


def test_a_seed_draws_the_same_mutants():
    folder = "ggml_sched/planning"
    first = listed("--seed", "5", "--sample", "9", folder)
    assert len(first.splitlines()) == 10 and first == listed("--seed", "5", "--sample", "9", folder)
    assert first.splitlines()[1:] != listed("--seed", "6", "--sample", "9", folder).splitlines()[1:]


def test_a_sample_goes_on_where_a_run_of_it_ended(monkeypatch):
    whole = ["--seed", "5", "--sample", "9", "ggml_sched/planning"]
    rows = listed(*whole).splitlines()
    assert listed("--skip", "4", *whole).splitlines() == [rows[0], *rows[5:]]

    tried = []
    monkeypatch.setattr(mutate, "run", lambda mutants, sample, *how: tried.extend(map(str, mutants[:sample])) or {})
    monkeypatch.setattr("sys.argv", ["mutate.py", "--skip", "4", *whole])
    assert mutate.main() == 0 and tried == rows[5:]


@pytest.mark.parametrize("arguments, error", [
    (["--seed", "5", "--sample", "9", "--skip", "9"], "--skip 9 leaves nothing of a sample of 9"),
    (["--seed", "5", "--sample", "9", "--skip", "-1"], "--skip -1 is negative"),
    (["--sample", "9", "--skip", "4"], "--skip needs the --seed of the run that it continues"),
])
def test_what_a_run_cannot_skip_is_refused(monkeypatch, capsys, arguments, error):
    monkeypatch.setattr("sys.argv", ["mutate.py", "--list", *arguments])
    with pytest.raises(SystemExit):
        mutate.main()
    assert capsys.readouterr().err.endswith(f"error: {error}\n")


def test_a_path_that_is_not_there_is_named():
    done = run_python(str(TOOL), "--list", "ggml_sched/nowhere", status=1)
    assert done.stderr == "mutate: there is no ggml_sched/nowhere\n"


def test_lines_that_differ_are_those_of_the_diff(monkeypatch):
    diff = ("+++ b/ggml_sched/errors.py\n@@ -3,0 +4,2 @@ x\n+a\n+b\n@@ -9 +12 @@\n-c\n+d\n"
            "+++ /dev/null\n@@ -1,3 +0,0 @@\n-e\n")
    done = subprocess.CompletedProcess([], 0, diff, "")
    monkeypatch.setattr(mutate.subprocess, "run", lambda *arguments, **options: done)
    assert mutate.changed_lines("HEAD")["ggml_sched/errors.py"] == {4, 5, 12}
    lines = mutate.candidates(["ggml_sched"], "HEAD")
    assert {mutant.path for mutant in lines} <= {"ggml_sched/errors.py"} and {m.line for m in lines} <= {4, 5, 12}


def test_the_copy_has_the_modules_beside_the_package():
    """Without the plugin of pytest, tests of the contract suite fail in the copy, and their mutants stay undecided."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules = built["tool"]["setuptools"]["py-modules"]
    assert modules and {f"{name}.py" for name in modules} <= set(mutate.COPIED)


# -- outcomes, with tests and builds that are not run ----------------------------------------------


MUTANT = Mutant("ggml_sched/planning/waits.py", 1, "constant", 0, 1, "2", "", "1")


class Scripted(mutate.Copy):
    """A copy whose builds and tests end as a script says: {file: (fails with a mutant, fails without)}."""

    def __init__(self, root, ends: dict[str, tuple[bool, bool]]) -> None:
        self.root, self.timeout, self.near, self.failing = root, 1, False, {}
        self.ends, self.runs = ends, []
        self.source = root / MUTANT.path
        self.source.parent.mkdir(parents=True)
        self.source.write_text("1")

    def _restore_build(self) -> None:
        pass

    def _run(self, timeout, *arguments):
        self.runs.append(arguments)
        is_mutant = self.source.read_text() != "1"
        left_out = {name.partition("=")[2] for name in arguments if name.startswith(("--deselect=", "--ignore="))}
        for test, (with_mutant, without) in self.ends.items():
            if test not in left_out and (with_mutant if is_mutant else without):
                said = test if test.startswith("ERROR") else f"FAILED {test}"
                return None if test == "hangs" else subprocess.CompletedProcess([], 1, f"{said} - no\n", "")
        return subprocess.CompletedProcess([], 0, "", "")


@pytest.mark.parametrize("ends, outcome", [
    ({}, "survived"),
    ({"tests/a.py::test": (True, False)}, "noticed"),
    ({"tests/a.py::test": (True, True)}, "survived"),
    ({"tests/a.py": (True, True), "tests/b.py::test": (True, False)}, "noticed"),
    ({"hangs": (True, False)}, "noticed"),
    ({"hangs": (True, True)}, "undecided"),
    ({"ERROR tests/a.py::last": (True, False)}, "noticed"),
    ({"ERROR tests/a.py::last": (True, True)}, "undecided"),
])
def test_tests_that_fail_without_a_mutant_decide_nothing(tmp_path, ends, outcome):
    copy = Scripted(tmp_path, ends)
    for _ in range(2):              # of two mutants, too
        assert copy.outcome(MUTANT).partition(":")[0] == outcome
        assert copy.source.read_text() == "1"
    if outcome == "noticed":        # by what passes without it
        assert ends.get(copy.noticed_by, (True, False)) == (True, False)


def test_a_build_that_takes_too_long_is_not_a_mutant_that_does_not_compile(tmp_path, monkeypatch):
    copy = Scripted(tmp_path, {"hangs": (True, False)})
    path = tmp_path / "ggml_sched/planning/waits.c"
    path.write_text("1")
    copy.source = path
    assert "build" in copy.outcome(MUTANT._replace(path="ggml_sched/planning/waits.c"))
    assert len(copy.runs) == 1

    monkeypatch.setattr(mutate, "COPIED", ())
    monkeypatch.setattr(mutate.Copy, "_run", lambda self, timeout, *arguments: None)
    with pytest.raises(SystemExit, match="the first build takes over"):
        mutate.Copy(tmp_path, timeout=1, near=True)


def test_a_build_of_a_mutant_leaves_no_object_behind(tmp_path, monkeypatch):
    """One that is newer than the restored source would be linked into the libraries of all later mutants."""
    written = {"ggml_sched/a.so": "library", "ggml_sched/a.c": "C of a.pyx", "build/lib/a.so": "library",
               "build/temp/a.o": "object", "build/temp/a.o.d": "headers", "build/temp/a.o.command": "command"}
    source = tmp_path / "project/ggml_sched/a.pyx"

    def build(self, timeout, *arguments):
        if arguments[0] == "setup.py":
            text = source.read_text()
            for name in written:
                path = tmp_path / "project" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(written[name] + text)
            if text:
                (tmp_path / "project/build/temp/new.o").write_text(text)
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(mutate, "COPIED", ())
    monkeypatch.setattr(mutate.Copy, "_run", build)
    monkeypatch.setattr(mutate, "files_near", lambda root, mutant: [])
    source.parent.mkdir(parents=True)
    source.write_text("")
    copy = mutate.Copy(tmp_path, timeout=1, near=False)
    source.write_text("1")
    assert copy.outcome(MUTANT._replace(path="ggml_sched/a.pyx")) == "survived"
    assert {name: (tmp_path / "project" / name).read_text() for name in written} == written
    assert not (tmp_path / "project/build/temp/new.o").exists() and source.read_text() == "1"
