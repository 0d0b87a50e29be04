"""tools/check_types.py counts the public names that have complete types."""

from pathlib import Path

import check_types
import pytest


def report_of(folder: Path, text: str) -> dict:
    pytest.importorskip("pyright")
    package = folder / "typed_or_not"
    package.mkdir()
    (package / "__init__.py").write_text(text)
    (package / "py.typed").touch()
    return check_types.completeness(package.name, folder)


def test_a_package_whose_names_are_all_typed_is_complete(tmp_path):
    found = report_of(tmp_path, "def area(a: float, b: float) -> float:\n    return a * b\n")
    assert found["completenessScore"] == 1
    assert list(check_types.incomplete(found)) == []


def test_names_without_types_are_listed_with_their_lines(tmp_path):
    found = report_of(tmp_path, "class Box:\n    def __init__(self, a: float) -> None:\n        self.half = a / 2\n\n\n"
                                "def area(a, b: float) -> float:\n    return a * b\n\n\ndef _inner(a):\n    return a\n")
    assert found["completenessScore"] < check_types.LEAST
    lines = list(check_types.incomplete(found))
    assert len(lines) == 2
    assert "__init__.py:3: typed_or_not.Box.half: Type is missing type annotation" in lines[0]
    assert lines[1].endswith('__init__.py:6: typed_or_not.area: Type annotation for parameter "a" is missing')


def test_a_package_that_is_not_there_is_an_error(tmp_path):
    pytest.importorskip("pyright")
    with pytest.raises(SystemExit, match="no_such_package"):
        check_types.completeness("no_such_package", tmp_path)


@pytest.mark.parametrize(("share", "status"), [(0.98, 0), (0.9799, 1)])
def test_fewer_than_98_percent_fail(share, status, monkeypatch, capsys):
    counts = {"withKnownType": 7, "withAmbiguousType": 1, "withUnknownType": 2}
    report = {"completenessScore": share, "symbols": [], "exportedSymbolCounts": counts}
    monkeypatch.setattr(check_types, "completeness", lambda package, root: report)
    assert check_types.main([]) == status
    line = f"7 of 10 public names have complete types: {share:.2%}; 98% are needed\n"
    assert capsys.readouterr().out == line
