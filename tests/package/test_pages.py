"""The code in README and in the pages of the documentation runs and prints what they say.

Each page runs in a process of its own with warnings as errors (tests/support/page_code.py), in a folder where
`model.gguf` is the small model.  Blocks that need a missing extra are skipped, and named.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from processes import SUPPORT, run_python

import ggml_sched as gs
from ggml_sched import cli

ROOT = Path(__file__).resolve().parents[2]
if not all((ROOT / name).exists() for name in ("README.md", "CONTRIBUTING.md", "docs", ".github")):
    pytest.skip("the working tree is needed", allow_module_level=True)
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
         if re.search(r"^```python", path.read_text(encoding="utf-8"), re.M)]
EVERY_PAGE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEFT_OPEN_BY_LLAMA_CPP = "ignore:unclosed file <_io.TextIOWrapper name='/dev/null':ResourceWarning"


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, folder: Path) -> list[list]:
    """What page_code.py says of a page: [line, outcome, reason] of each block."""
    shutil.copy(gs.llama.small_model(), folder / "model.gguf")
    (folder / "tests").symlink_to(ROOT / "tests", target_is_directory=True)
    done = run_python("-X", "dev", "-W", "error", "-W", LEFT_OPEN_BY_LLAMA_CPP, str(SUPPORT / "page_code.py"),
                      str(page), cwd=folder, GGML_SCHED="alloc", OMP_WAIT_POLICY="passive")
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_code_of_a_page(page, tmp_path):
    if importlib.util.find_spec("sybil") is None:
        pytest.skip("needs sybil")
    found = blocks(page, tmp_path)
    assert found
    failed = [f"{names(page)}:{line}: {reason}" for line, outcome, reason in found if outcome == "failed"]
    assert not failed, "\n".join(failed)
    skipped = [f"line {line}: {reason}" for line, outcome, reason in found if outcome == "skipped"]
    if skipped:
        pytest.skip(f"{len(skipped)} of {len(found)} blocks: {'; '.join(skipped)}")


def test_wrong_code_and_wrong_output_are_noticed(tmp_path):
    pytest.importorskip("sybil")
    page = tmp_path / "page.md"
    page.write_text('```python\nprint(1)\n```\n\n```output\n2\n```\n\n```python\nmissing_name\n```\n\n'
                    '<!-- skip: next if(missing("no_such_module"), reason="needs it") -->\n\n'
                    '```python\nprint(3)\n```\n\n```output\n3\n```\n\n'
                    '```python\nprint("a b c")\n```\n\n```output\na ... c\n```\n')
    outcomes = [(line, outcome) for line, outcome, _ in blocks(page, tmp_path)]
    assert outcomes == [(1, "passed"), (5, "failed"), (9, "failed"), (15, "skipped"), (19, "skipped"), (23, "passed"),
                        (27, "passed")]


# -- README ---------------------------------------------------------------------------------------------


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def table_of_the_readme() -> list[list[str]]:
    """Its rows: what was measured, target, median, worst, page."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [cells(line) for line in lines if line.startswith("| ")][1:]


def measured(page: str) -> dict[str, list[str]]:
    """{what was measured: target and figures} of the summary that a benchmark wrote."""
    summary = re.search(r"## Summary\n\n(.*?)\n\n", (ROOT / page).read_text(encoding="utf-8"), re.S)[1]
    return {row[0]: row[1:] for row in map(cells, summary.splitlines())}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120
    assert len(table_of_the_readme()) <= 10


@pytest.mark.parametrize("row", table_of_the_readme(), ids=lambda row: row[0])
def test_figures_in_the_readme_are_those_that_were_measured(row):
    """Target, median and worst are those of the page that a program of bench/ wrote."""
    what, target, median, worst, link = row
    wanted, *figures = measured(re.search(r"\((docs/[\w-]+\.md)\)", link)[1])[what]
    # One target for both columns, or one for each: README has the last column, CpuBackend's.
    assert target in (wanted, wanted.split(", ")[-1])
    pairs = [re.fullmatch(r"([^(]+) \(([^)]+)\)", figure) for figure in figures]
    both = [pair.groups() for pair in pairs if pair] if all(pairs) else [tuple(figures)]
    assert (median, worst) == both[-1]


def test_the_readme_has_the_worst_compute_buffer_that_was_measured():
    """A mean and a worst of some models must not stand alone where other models give worse ones."""
    rows = {what: figures[-1] for what, (_, *figures) in measured("docs/hooking.md").items()
            if what.startswith("compute buffers / stock's")}
    worst = max(re.fullmatch(r".* \(([\d.]+)\)", figures)[1] for figures in rows.values())
    assert len(rows) >= 4 and worst in [row[3] for row in table_of_the_readme() if row[0] in rows]


@pytest.mark.parametrize("page", EVERY_PAGE, ids=names)
def test_links_to_files_lead_to_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


# -- names of other libraries ----------------------------------------------------------------------------

OWNERS = {"ctx": gs.Context, "t": gs.Tensor, "graph": gs.Graph, "scheduler": gs.Scheduler, "plan": gs.Plan,
          "backend": gs.Backend, "buffer": gs.Buffer, "tallocr": gs.TensorAllocator, "gallocr": gs.GraphAllocator,
          "cpu": gs.CpuBackend, "gs": gs, "llama": gs.llama, "model": gs.llama.Model,
          "Generation": gs.llama.Generation}
"""Names of objects in docs/from-*.md: the classes and modules that have their attributes."""


def rows_of(page: str) -> list[list[str]]:
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    return [cells(line) for line in lines if line.startswith("| ")]


def installed_source(module: str, file: str) -> str:
    """The text of a file of an installed package, which is not imported; skips where it is missing."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        pytest.skip(f"needs {module}")
    return Path(spec.submodule_search_locations[0], file).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["from-ggml.md", "from-llama-cpp-python.md"])
def test_our_names_in_a_page_for_newcomers_exist(page):
    spans = "  ".join(span for row in rows_of(page) for span in re.findall(r"`([^`]+)`", row[1]))
    used = [pair for pair in re.findall(r"(?<![\w.])(\w+)\.(\w+)", spans) if pair[0] in OWNERS]
    assert len(used) > 20
    with gs.llama.load(gs.llama.small_model(), n_ctx=32) as model:
        own = {"model": vars(model), "scheduler": vars(model.scheduler)}
        unknown = [f"{owner}.{name}" for owner, name in used
                   if not hasattr(OWNERS[owner], name) and name not in own.get(owner, ())]
    assert unknown == []


def test_names_of_ggml_in_its_page_exist():
    source = installed_source("ggml", "ggml.py")
    names = {name for row in rows_of("from-ggml.md") for name in re.findall(r"\b(?:ggml|gguf)_\w+", row[0])}
    assert len(names) > 80
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", source)) == []


@pytest.mark.parametrize("method", ["__init__", "create_completion", "create_chat_completion"])
def test_every_parameter_of_llama_cpp_python_is_in_its_page(method):
    tree = ast.parse(installed_source("llama_cpp", "llama.py"))
    (Llama,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Llama")
    (function,) = (node for node in Llama.body if isinstance(node, ast.FunctionDef) and node.name == method)
    title = {"__init__": "Llama(...)"}.get(method, f"{method}(...)")
    text = (ROOT / "docs" / "from-llama-cpp-python.md").read_text(encoding="utf-8")
    section = re.search(rf"^## `{re.escape(title)}`.*?(?=^## )", text, re.M | re.S)[0]
    rows = [cells(line)[0] for line in section.splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    parameters = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    assert sorted(parameters - listed) == []


# -- commands -------------------------------------------------------------------------------------------


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(page, words after it) of each command of a program in shell blocks of README and the pages."""
    found = []
    for page in EVERY_PAGE:
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                for command in re.split(r"&&|\|", line.partition(" #")[0]):
                    words = command.replace("'", "").replace('"', "").split()
                    while words and "=" in words[0]:    # settings of the environment
                        del words[0]
                    if words and os.path.basename(words[0]) == program:
                        found.append((names(page), words[1:]))
    return found


def test_commands_in_pages_have_subcommands_and_options_that_exist(capsys):
    found = commands("ggml-sched")
    assert len(found) > 2
    for page, words in found:
        said = cli.main([words[0], "--help"]) if words else cli.main(["--help"])
        text = capsys.readouterr().out
        assert said == 0, (page, words)
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), (page, option)


def declared_sessions() -> set[str]:
    text = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    named = set(re.findall(r'^@nox\.session\(.*name="([\w-]+)"', text, re.M))
    return named | set(re.findall(r"^@nox\.session(?!.*name=).*\ndef (\w+)\(", text, re.M))


def sessions(words: list[str]) -> list[str]:
    """The sessions of a command `nox -s A B -- ...`, without the Python of `install-3.13`."""
    named = words[words.index("-s") + 1 :]
    stop = next((i for i, word in enumerate(named) if word.startswith("-")), len(named))
    return [re.sub(r"-[\d.]+$", "", name) for name in named[:stop]]


def test_sessions_in_pages_exist():
    found = {name for _, words in commands("nox") if "-s" in words for name in sessions(words)}
    assert found > {"lint", "types", "test", "docs", "bench-compare"}
    assert sorted(found - declared_sessions()) == []


def test_workflows_run_commands_that_exist_and_that_contributing_names():
    """Each session and each file that a job runs exists, and CONTRIBUTING names the command."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert {path.name for path in workflows} >= {"ci.yml", "docs.yml", "sanitizers.yml", "benchmarks.yml"}
    for path in workflows:
        assert f"`{path.name}`" in contributing, path.name
        for command in re.findall(r"\bnox (-s [^&|\n]+)", re.sub(r"\$\{\{.*?\}\}", "3.13", path.read_text("utf-8"))):
            words = command.split()
            assert set(sessions(words)) <= declared_sessions(), (path.name, command)
            assert [word for word in words if word.startswith("tests/") and not (ROOT / word).exists()] == []
            assert set(sessions(words)) <= set(re.findall(r"[\w-]+", contributing)), (path.name, command)
