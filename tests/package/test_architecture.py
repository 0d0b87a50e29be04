"""Imports and C includes are those that docs/architecture.md draws: only upwards in its listing, without circles."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ggml_sched"
ROOMS = ("core.graph", "core.pack", "graph.quants", "backends.cpu", "backends.cupy", "backends.ggml", "backends.store",
         "experts", "llama", "llama_cpp", "cli", "placement.solve", "planning.verify", "testing.contract", "view")
"""Folders that the listing shows as one."""
HEADERS = "include"
"""The room of include/ggml_sched/."""


def room_of(module: str) -> str:
    """The line of the listing that a module of the package belongs to."""
    return next((room for room in ROOMS if module == room or module.startswith(f"{room}.")), module)


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def known_modules() -> set[str]:
    return {name_of(path) for kind in ("*.py", "*.pyx", "*.pxd") for path in PACKAGE.rglob(kind)}


def python_imports(path: Path) -> set[str]:
    """Modules of the package that a module imports when it runs, late imports included, those for types left out."""
    found: set[str] = set()
    known = known_modules()

    def take(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ggml_sched":
            base = node.module.removeprefix("ggml_sched").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                found.add(inner if inner in known else base)
        elif isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("ggml_sched").removeprefix(".") for alias in node.names
                         if alias.name.split(".")[0] == "ggml_sched")
        for child in ast.iter_child_nodes(node):
            take(child)

    take(ast.parse(path.read_text(encoding="utf-8")))
    return found


def without_comments(text: str) -> str:
    return re.sub(r"^\s*#(?! *include\b).*$", "", text, flags=re.M)


@functools.cache
def parts_of(path: Path) -> list[Path]:
    """An extension's files: its .pyx, its .pxd if it has one, and what they include, wherever that is."""
    found = [path]
    for file in found:
        for part in re.findall(r'^include "(.*)"', file.read_text(encoding="utf-8"), re.M):
            beside, named = file.parent / part, PACKAGE / part
            found.append(beside if beside.exists() else named)
    return found + [other for other in [path.with_suffix(".pxd")] if other.exists()]


def compiled_imports(path: Path) -> set[str]:
    """Modules of the package that an extension imports or cimports, in any of its parts; a .pxd counts for itself."""
    text = "".join(without_comments(part.read_text(encoding="utf-8")) for part in parts_of(path))
    found = set(re.findall(r"^\s*from ggml_sched\.([\w.]+) c?import", text, re.M))
    for base, names in re.findall(r"^\s*from ggml_sched((?:\.\w+)*) c?import \(?([\w, ]+)", text, re.M):
        for name in re.findall(r"\w+", names):
            inner = f"{base}.{name}".removeprefix(".")
            if inner in known_modules():
                found = (found - {base.removeprefix(".")}) | {inner}
    return found - {name_of(path)}


def c_includes(path: Path) -> set[str]:
    """Rooms whose C headers a file includes: its own folder's first, then include/, then the one of that name."""
    text = path.read_text(encoding="utf-8")
    found = set()
    for name in re.findall(r'^\s*(?:# *include|cdef extern from) "(.*?)"', text, re.M):
        beside, shared = path.parent / name, ROOT / "include" / name
        if beside.exists():
            found.add(room_of_file(beside))
        elif shared.exists():
            found.add(HEADERS)
        else:
            found |= nearest(path, name)
    return found


@functools.cache
def nearest(path: Path, name: str) -> set[str]:
    """The rooms of the package's headers of this name: the file's own room if it has one; none for the system's."""
    rooms = {room_of_file(other) for other in PACKAGE.rglob(name)}
    return rooms & {room_of_file(path)} or rooms


@functools.cache
def room_of_file(path: Path) -> str:
    """The room of a file that is no module: that of its folder, of the module beside it, or HEADERS."""
    if not path.is_relative_to(PACKAGE):
        return HEADERS
    if path.suffix == ".pxi":
        return next(room_of(name_of(module)) for module in PACKAGE.rglob("*.pyx") if path in parts_of(module))
    return room_of(name_of(path))


def actual() -> dict[str, set[str]]:
    """{room: rooms that it imports, cimports, or includes headers of}."""
    found: dict[str, set[str]] = {HEADERS: set(), "_c": set()}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(name_of(path))
        if room and room != "__main__":
            found.setdefault(room, set()).update(python_imports(path))
    for path in PACKAGE.rglob("*.pyx"):
        found.setdefault(room_of(name_of(path)), set()).update(compiled_imports(path))
    for path in c_files():
        found[room_of_file(path)] |= c_includes(path)
    # The package itself is its public names: a room that imports it stands above everything that those come from.
    return {room: {room_of(other) if other else "ggml_sched" for other in others} - {room}
            for room, others in found.items()}


def c_files() -> list[Path]:
    """Everything that may include a header: C, CUDA and Cython, without what Cython generates."""
    kinds = {".c", ".h", ".cu", ".cuh", ".pyx", ".pxd", ".pxi"}
    return [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in kinds and path != PACKAGE / "__init__.pxd"
            and not (path.suffix == ".c" and path.read_bytes().startswith(b"/* Generated by Cython"))]


def drawn() -> dict[str, set[str]]:
    """The listing in the documentation, top to bottom."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listing = re.search(r"## Who imports whom\n.*?```\n(.*?)```", text, re.S)[1]
    found = {}
    for line in listing.splitlines():
        if line.strip() and not line.startswith("#"):
            room, _, others = line.partition("<-")
            found[room.strip()] = set(others.split())
    return found


def test_the_listing_is_the_import_graph():
    have, want = actual(), drawn()
    assert have.keys() == want.keys()
    for room in have:
        assert want[room] == have[room], room


def test_nothing_imports_what_stands_below_it():
    """A room imports only rooms above it in the listing, so there is no circle."""
    above = {"ggml_sched"}
    for room, others in drawn().items():
        assert others <= above, f"{room} imports {sorted(others - above)}, which stand below it"
        above.add(room)


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*/*.pyx")), ids=name_of)
def test_the_core_imports_nothing_above_it(path):
    assert {name for name in compiled_imports(path) if not name.startswith("core.")} <= {"_c", "errors"}


@pytest.mark.parametrize("line, file, rooms", [
    ('#include "abi.h"', "llama_cpp/ggml/library.c", {"backends.ggml"}),
    ('#  include "ggml_sched/api.h"', "llama_cpp/ggml/library.c", {"include"}),
    ('cdef extern from "kernels/call.h" nogil:', "backends/cpu/_kernels.pxd", {"backends.cpu"}),
    ("#include <stdio.h>\n#include \"Python.h\"", "core/graph/tensor.pyx", set()),
])
def test_an_include_of_another_rooms_header_is_seen(tmp_path, monkeypatch, line, file, rooms):
    path = PACKAGE / file
    monkeypatch.setattr(type(path), "read_text", lambda *_, **__: line)
    assert c_includes(path) == rooms


@pytest.mark.parametrize("name, imported", [
    ("llama._cells", "_graph"), ("backends.ggml._ggml", "backends.cpu._kernels"), ("backends.cpu._kernels", "_graph"),
    ("llama_cpp._hook", "_c")])
def test_extensions_inside_rooms_are_seen(name, imported):
    assert imported in compiled_imports(PACKAGE / f"{name.replace('.', '/')}.pyx")
