"""Settings of the documentation's site: `nox -s docs` builds it into build/site, with warnings as errors.

The pages are Markdown and read well without the site.  Pages in reference/ name the public objects, whose text is their
docstrings; tests/package/test_site.py compares these names with `__all__`.  The build needs no network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if any((ROOT / "ggml_sched").glob("_core.*.so")):    # compiled in place: document the working tree
    sys.path.insert(0, str(ROOT))

os.environ["GGML_SCHED"] = "off"    # documenting the hook does not install it

from docutils import nodes  # noqa: E402
from docutils.parsers.rst import Directive  # noqa: E402
from sphinx import addnodes  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

import ggml_sched as gs  # noqa: E402

project = "ggml-sched"
release = gs.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"ggml-sched {release}"
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False
smartquotes = False
python_maximum_signature_line_length = 100

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}

LINKED = {name: f"{room}.{name}" for room, names in (("ggml_sched.llama", gs.llama.__all__), ("ggml_sched", gs.__all__))
          for name in names}
"""{public name: its full name}; a name in single backticks in a docstring becomes a link."""


def code(match: re.Match[str]) -> str:
    """reStructuredText of a span in single backticks: a link to a public object, or code."""
    words, after = match[1], "\\ " if match[2] else ""
    name, _, member = words.removeprefix("gs.").removesuffix("()").partition(".")
    owner = getattr(gs, name, None) or getattr(gs.llama, name, None)
    if name in LINKED and (not member or hasattr(owner, member)):
        return f":py:obj:`{words} <{LINKED[name]}{'.' + member if member else ''}>`{after}"
    return f"``{words}``{after}"


def text(line: str) -> str:
    """A line of a docstring, which is plain text with code in single backticks, as reStructuredText."""
    bullet = re.match(r" *(?:\* )?", line)[0]
    parts = re.split(r"(`[^`]+`(?=\w)|`[^`]+`)", line[len(bullet) :])
    for i, part in enumerate(parts):
        joined = i + 1 < len(parts) and parts[i + 1][:1].isalnum()
        parts[i] = (code(re.match(r"`(.+)`()", part) if not joined else re.match(r"`(.+)(`)", part)) if i % 2
                    else re.sub(r"([*|\\]|_\b)", r"\\\1", part))
    return bullet + "".join(parts)


def text_of_data(name: str) -> list[str]:
    """The text under a constant, from the module below `name`'s that defines it."""
    package, _, constant = name.rpartition(".")
    for module in sorted(found for found in sys.modules if found.startswith(f"{package}.")):
        if getattr(sys.modules[module], "__file__", "").endswith(".py"):
            comments = ModuleAnalyzer.for_module(module).find_attr_docs()
            if ("", constant) in comments:
                return list(comments["", constant])
    return []


def docstring(app, kind, name, value, options, lines: list[str]) -> None:
    """Docstrings are plain text: an indented paragraph is code, and `x` is a name."""
    if kind == "data" and lines[:1] == (type(value).__doc__ or "").splitlines()[:1]:
        lines[:] = text_of_data(name)    # instead of the docstring of its type, such as that of dict
    if lines[:1] and lines[0].startswith("Alias for field number"):
        lines[:] = []    # of a NamedTuple, whose docstring describes its fields
    found: list[str] = []
    literal = False
    for line in "\n".join(lines).expandtabs().split("\n"):
        indented = line.startswith("    ")
        if line and indented and not literal and (not found or not found[-1]):
            found += ["::", ""]
            literal = True
        elif line and not indented:
            literal = False
        found.append(line if literal else text(line))
    lines[:] = found


def signature(app, kind, name, value, options, arguments: str | None, result: str | None):
    """The arguments of a compiled method, whose signature has `self` or `cls`, as of one in Python."""
    return arguments and re.sub(r"^\((?:self|cls)(?:, )?", "(", arguments), result


def shorten(app, document) -> None:
    """Leave out values of constants that are longer than a line."""
    for node in document.findall(addnodes.desc_annotation):
        if len(node.astext()) > 100 and "=" in node.astext():
            node.parent.remove(node)


class CommandHelp(Directive):
    """What `ggml-sched COMMAND --help` prints, as code: a directive with the name of the command, or with none."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        command = [sys.executable, "-m", "ggml_sched", *self.arguments, "--help"]
        text = subprocess.run(command, env={**os.environ, "COLUMNS": "100", "PYTHONPATH": os.pathsep.join(sys.path)},
                              capture_output=True, text=True, check=True).stdout
        return [nodes.literal_block(text, text, language="text")]


PAGES = {"../README.md": "index.md", "../CONTRIBUTING.md": "contributing.md", "../CHANGELOG.md": "changes.md"}
"""Files beside docs/ that pages link to, and the pages of the site that have their text."""


def page(app, name, source: list[str]) -> None:
    """Links of a page to files that are pages of the site lead there."""
    for file, target in PAGES.items():
        source[0] = source[0].replace(f"]({file}", f"]({target}")


def setup(app) -> None:
    app.add_directive("command-help", CommandHelp)
    app.connect("doctree-read", shorten)
    app.connect("source-read", page)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
