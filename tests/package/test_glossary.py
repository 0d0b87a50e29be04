"""docs/glossary.md speaks of what the code has, and the code does not use the words that the glossary replaced."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
if not GLOSSARY.exists():
    pytest.skip("the working tree is needed", allow_module_level=True)


def rows() -> list[list[str]]:
    """The cells of each entry: word, ggml's name, meaning, names in the code."""
    lines = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| word |")]


@cache
def declared() -> set[str]:
    """Names of modules, and names that the package or its headers declare: classes, functions, structs, macros,
    enumerators."""
    patterns = (r"^\s*(?:cp?def )?(?:cdef )?class (\w+)", r"^\s*(?:def|cp?def [\w *]+?) (\w+)\(", r"\}\s*(\w+);",
                r"^#define (\w+)", r"(?:^\s+|, |enum: )(GS_\w+)(?=,|\s*=|$)", r"^([A-Z]\w+) = ",
                r"^ctypedef struct (\w+)")
    names = set()
    for folder in ("ggml_sched", "include", "tools"):
        for path in (ROOT / folder).rglob("*"):
            generated = path.suffix == ".c" and path.with_suffix(".pyx").exists()
            if path.suffix in {".py", ".pyx", ".pxd", ".pxi", ".h", ".c"} and not generated:
                names.add(path.parent.name if path.name == "__init__.py" else path.stem)
                text = path.read_text(encoding="utf-8")
                names.update(name for pattern in patterns for name in re.findall(pattern, text, re.M))
    return names


def words_tool():
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "tools" / "check_words.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_entry_has_a_word_a_meaning_and_ggmls_name():
    found = rows()
    assert len(found) > 50
    assert [row for row in found if len(row) != 4 or not all(row)] == []


def test_no_word_has_two_meanings():
    words = [row[0] for row in rows()]
    assert sorted({word for word in words if words.count(word) > 1}) == []


def test_what_the_glossary_names_is_declared_in_the_code():
    names = declared()
    wanted = {name for row in rows() for name in re.findall(r"`(\w+)`", row[3])}
    assert len(wanted) > 40
    assert sorted(wanted - names) == []


def test_a_name_that_nothing_declares_is_noticed():
    assert "gs_plan" in declared()
    assert "gs_shelf_of_nobody" not in declared()


@pytest.mark.parametrize("text, words", [
    ("/* nobody asks */", ["nobody"]),
    ("def close(self):\n    # Whoever waits\n    somebody()", ["Whoever", "somebody"]),
    ("gh_shelf_take(", ["gh_shelf_take"]),
    ("it is told what", ["is told"]),
    ("nobodyness, foretold, n_placesX", []),
])
def test_replaced_words_are_found_as_whole_words(text, words):
    assert [word for _, word, _ in words_tool().faults(text)] == words


def test_the_repository_uses_no_replaced_word(capsys):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert words_tool().main([]) == 0, capsys.readouterr().err
