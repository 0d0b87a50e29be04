"""The house is as docs/architecture.md draws it: who imports whom, no circle, nothing upwards."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ggml_sched"
ROOMS = ("graph.quants", "backends.cpu", "backends.cupy", "backends.ggml", "llama", "llama_cpp", "cli",
         "planning.verify")
"""Folders that the listing shows as one."""


def room_of(module: str) -> str:
    """The line of the listing that a module of the package belongs to."""
    return next((room for room in ROOMS if module == room or module.startswith(f"{room}.")), module)


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def known_modules() -> set[str]:
    return {name_of(path) for kind in ("*.py", "*.pyx") for path in PACKAGE.rglob(kind)}


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


def compiled_imports(path: Path) -> set[str]:
    """Of an extension, its parts included."""
    text = path.read_text(encoding="utf-8") + path.with_suffix(".pxd").read_text(encoding="utf-8")
    for part in re.findall(r'^include "(.*)"', text, re.M):
        text += (PACKAGE / part).read_text(encoding="utf-8")
    found = set(re.findall(r"^\s*from ggml_sched\.([\w.]+) c?import", text, re.M))
    for base, name in re.findall(r"^\s*from ggml_sched((?:\.\w+)?) c?import (\w+)", text, re.M):
        inner = f"{base}.{name}".removeprefix(".")
        if inner in known_modules():
            found = (found - {base.removeprefix(".")}) | {inner}
    return found - {"_c", name_of(path)}


def actual() -> dict[str, set[str]]:
    """{room: rooms that it imports}."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(name_of(path))
        if room and room != "__main__":
            found.setdefault(room, set()).update(python_imports(path))
    for path in PACKAGE.rglob("*.pyx"):
        if room_of(name_of(path)) == name_of(path):
            found[name_of(path)] = compiled_imports(path)
    # The package itself is its public names: whoever imports it stands above everything that those come from.
    return {room: {room_of(other) if other else "ggml_sched" for other in others} - {room}
            for room, others in found.items()}


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
    """So there is no circle: a room imports only rooms that stand above it in the listing."""
    above = {"ggml_sched"}
    for room, others in drawn().items():
        assert others <= above, f"{room} imports {sorted(others - above)}, which stand below it"
        above.add(room)


@pytest.mark.parametrize("name", ["_pack", "_graph", "_core"])
def test_the_compiled_parts_import_nobody_above_them(name):
    assert compiled_imports(PACKAGE / f"{name}.pyx") <= {"_pack", "_graph", "errors"}
