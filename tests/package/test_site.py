"""The documentation's site: its reference names every public object, and it builds offline without a warning."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import fit_picture
import pictures
import pytest
import screenshots
import token_picture
from processes import run_python

import ggml_sched as gs
from ggml_sched.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
if not (DOCS / "conf.py").exists():
    pytest.skip("the working tree is needed", allow_module_level=True)


def public_names() -> set[str]:
    """Full names of everything in `__all__` of the package, of models, of the hook, of tools for backends, of stores,
    of experts and of measurements."""
    rooms = {"ggml_sched": gs, "ggml_sched.llama": gs.llama, "ggml_sched.remote": gs.remote}
    names = {f"{room}.{name}" for room, module in rooms.items() for name in module.__all__}
    hook = (ROOT / "ggml_sched" / "llama_cpp" / "__init__.py").read_text(encoding="utf-8")
    hooked = re.search(r"^__all__ = \[(.*?)\]", hook, re.M | re.S)
    names |= {f"ggml_sched.llama_cpp.{name}" for name in re.findall(r'"(\w+)"', hooked[1])}
    tools = [module.name for module in pkgutil.iter_modules(gs.testing.__path__, "ggml_sched.testing.")
             if not module.name.rpartition(".")[2].startswith("_")]
    for module in (*tools, "ggml_sched.experts", "ggml_sched.backends.store", "ggml_sched.backends.cpu.times"):
        found = importlib.import_module(module)
        names |= {f"{module}.{name}" for name in getattr(found, "__all__", ())
                  if getattr(gs, name, None) is not getattr(found, name)}
    return names


def public_attributes() -> set[str]:
    """Full names of what public classes define."""
    return {f"{module.__name__}.{name}.{attribute}" for module in (gs, gs.llama) for name in module.__all__
            if isinstance(getattr(module, name), type) for attribute in vars(getattr(module, name))
            if not attribute.startswith("_")}


def documented() -> list[str]:
    """Names that pages of the reference take from docstrings."""
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    return re.findall(r"^\.\. auto(?:class|data|exception|function):: ([\w.]+)$", pages, re.M)


def test_the_reference_names_every_public_object_once():
    named = documented()
    assert sorted(public_names() - {*named}) == [], "add a directive to a page of docs/reference/"
    assert sorted({*named} - public_names()) == []
    assert sorted({name for name in named if named.count(name) > 1}) == []


def test_every_public_object_has_a_docstring():
    for name in documented():
        module, _, attribute = name.rpartition(".")
        if module == "ggml_sched.llama_cpp":    # importing it would hook this process
            continue
        value = getattr(importlib.import_module(module), attribute)
        if callable(value):
            assert inspect.getdoc(value), name


def test_the_pictures_show_todays_plan():
    """`python tools/pictures.py` draws them again."""
    drawn = dict(pictures.drawings())
    shown = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "pictures").glob("*.svg")}
    assert shown.pop(fit_picture.PICTURE.name) and shown.pop("layers.svg") and shown.pop(token_picture.PICTURE.name)
    assert shown == drawn
    plan = pictures.make_plan()
    assert f"live bytes: {plan.live_bytes[0]:,}" in drawn["lifetimes.svg"]
    for i in plan.data.sequence:
        if plan.data.memory_index(i) == 0 and not plan.data.is_inplace(i):
            assert f"{plan.data.size(i):,} at {plan.data.offset(i):,}" in drawn["lifetimes.svg"]


def test_the_picture_of_a_fit_has_the_figures_of_todays_answer():
    """`python tools/fit_picture.py` draws it again."""
    found = fit_picture.answer()
    words = re.findall(r"<text[^>]*>([^<]*)</text>", fit_picture.PICTURE.read_text(encoding="utf-8"))
    assert set(words) >= {device.name for device in found.devices} | {*fit_picture.NAMES, "experts", "cache", "arena"}
    for value, pattern in ((found.seconds, r"^([\d.]+) ms, [\d.]+% above the bound; a card of 16 GiB"),
                           (found.bound, r"^no placement takes less than ([\d.]+) ms$")):
        drawn = next(float(match[1]) for match in map(re.compile(pattern).match, words) if match)
        assert drawn == pytest.approx(value * 1e3, rel=.01)


def test_the_picture_of_a_token_is_that_of_the_recorded_one():
    """`python tools/token_picture.py` draws it again, with `--record` another token."""
    assert token_picture.PICTURE.read_text(encoding="utf-8") == token_picture.drawing()
    found = token_picture.recorded()
    ends = {name: stop for name, _, _, stop in found["reads"]}
    assert sum(nbytes for name, nbytes, *_ in found["reads"] if name != "token_embd.weight") == found["fetched"]
    assert found["weights"] - found["limit"] < found["fetched"] < found["weights"]
    last = 0.0
    for name, start, ready, stop in found["runs"]:
        assert last <= start <= ready < stop <= found["milliseconds"]
        assert not name or ready >= min(ends[name], stop)
        last = stop


def test_the_picture_of_layers_has_the_words_of_todays_graph():
    """`python tools/screenshots.py layers` draws it again; where its boxes stand depends on the version of Graphviz."""
    text = screenshots.plan("llama-160m-decode", "c2half").to_dot()
    labels = re.findall(r'label="([^"]*)"', text)
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", (DOCS / "pictures" / "layers.svg").read_text(encoding="utf-8"))
    assert sorted(drawn) == sorted(line for label in labels for line in label.split("\\n"))


def test_the_reference_has_every_command():
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    assert re.findall(r"^```\{command-help\} (\w+)$", page, re.M) == [*COMMANDS]


@pytest.mark.soak
def test_the_site_builds_without_a_warning_and_lists_every_public_object(tmp_path):
    if importlib.util.find_spec("furo") is None:
        pytest.skip("needs the extra `docs`")
    from sphinx.util.inventory import InventoryFile

    run_python("-m", "sphinx", "-q", "-W", "--keep-going", "-d", str(tmp_path / "doctrees"), str(DOCS),
               str(tmp_path / "site"), cwd=ROOT, timeout=300)
    with (tmp_path / "site" / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, target: target)
    listed = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    assert sorted(public_names() - listed) == []
    assert sorted(public_attributes() - listed) == []
    assert "ggml_sched.Context.mul_mat" in listed    # of a base class without a page
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    sources = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert sources <= pages
    assert {name for page in pages for name in fetched(tmp_path / "site" / page)} == set()


def fetched(page: Path) -> list[str]:
    """Scripts, styles, fonts and images that a browser would fetch from another place."""
    html = page.read_text(encoding="utf-8")
    return re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', html)
