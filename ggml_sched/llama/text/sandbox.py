"""Jinja templates from files, run with bounds: no attributes, bounded time, bounded memory.

Owns the budget of a rendering.  Invariant: every loop step, call, operator, filter and piece of output
pays from it, in proportion to the data that it touches, so no template runs long or grows large.
jinja2's immutable sandbox keeps templates from attributes and from changing what they are given.  It
leaves loops of loops, doubling strings, "x" * 10**9 and the like: those are ours.

A template is changed once, when it is compiled (`_Metering`): what costs is wrapped in filters that pay.
"""

from __future__ import annotations

import datetime
import json
import re
import time

from ggml_sched.llama.errors import ChatTemplateError

__all__ = ["compile_template", "render"]

MAX_SOURCE = 1 << 16
MAX_NODES = 1 << 13
"""Of the parsed template: what compiling costs."""
MAX_TICKS = 1 << 20
MAX_SECONDS = 0.3
"""Of processor time, of the rendering thread."""
MAX_CHARS = 1 << 24
MAX_ITEMS = 1 << 20
MAX_BITS = 1 << 12
MAX_WIDTH = 1 << 10
CHARS_PER_TICK = 64
TICKS_PER_LOOK = 512
"""How often the clock is looked at."""

STRING_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper"))
METHODS = {str: STRING_METHODS, dict: frozenset(("copy", "get", "items", "keys", "values")),
           list: frozenset(("copy", "count", "index")), tuple: frozenset(("count", "index")),
           int: frozenset(), float: frozenset(), range: frozenset()}
"""What templates may call of plain values: nothing that makes much out of little, but for those that are checked."""

FILTERS = ("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
           "groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
           "reverse", "safe", "select", "selectattr", "sort", "title", "trim", "unique", "upper", "wordcount")
"""jinja2's filters that templates may use as they are; `BOUNDED` has those that need a look first."""


class Budget:
    """What a rendering may still spend."""

    def __init__(self) -> None:
        self.left = MAX_TICKS
        self.deadline = time.thread_time() + MAX_SECONDS
        self.next_look = self.left - TICKS_PER_LOOK

    def spend(self, ticks: int = 1) -> None:
        self.left -= ticks
        if self.left < self.next_look:
            self.next_look = self.left - TICKS_PER_LOOK
            if self.left < 0:
                raise ChatTemplateError(f"the chat template does too much: more than {MAX_TICKS} steps")
            if time.thread_time() > self.deadline:
                raise ChatTemplateError(f"the chat template runs longer than {MAX_SECONDS} s")

    def weigh(self, value) -> int:
        """Pay for looking at all of a value; how deep it is."""
        depth, level = 0, [value]
        while level:
            inner = []
            for item in level:
                self.spend(1)
                if isinstance(item, str):
                    self.text(len(item))
                elif isinstance(item, dict):
                    inner += item.keys()
                    inner += item.values()
                elif isinstance(item, (list, tuple, set, frozenset)):
                    inner += item
                if len(inner) > MAX_ITEMS:
                    raise ChatTemplateError(f"the chat template makes a value of more than {MAX_ITEMS} items")
            depth, level = depth + 1, inner
        return depth

    def text(self, n_chars: int) -> None:
        """Pay for a text of so many characters, before it is made where that can be."""
        if n_chars > MAX_CHARS:
            raise ChatTemplateError(f"the chat template makes a text of {n_chars} characters, the limit is {MAX_CHARS}")
        self.spend(n_chars // CHARS_PER_TICK)


def compile_template(source: str):
    """A template ready to `render`; ChatTemplateError for what is no template or is too long."""
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"a chat template of {len(source)} characters; the limit is {MAX_SOURCE}")
    environment = _environment()
    try:
        tree = environment.parse(source)
        _check_size(tree)
        _meter(tree)
        return environment.from_string(tree)
    except ChatTemplateError:
        raise
    except Exception as error:  # also RecursionError, and SyntaxError of blocks nested too deep
        raise ChatTemplateError(f"the chat template cannot be compiled: {_said(error)}") from error


def render(template, variables: dict) -> str:
    """The template's text.  Whatever goes wrong in it is a ChatTemplateError."""
    try:
        context = template.new_context(variables)
        parts, n_chars = [], 0
        for part in template.root_render_func(context):
            n_chars += len(part)
            if n_chars > MAX_CHARS:
                raise ChatTemplateError(f"the chat template gives more than {MAX_CHARS} characters")
            context.budget.spend(1)
            parts.append(part)
        return "".join(parts)
    except ChatTemplateError:
        raise
    except Exception as error:
        raise ChatTemplateError(f"the chat template failed: {_said(error)}") from error


def _said(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def _jinja2():
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise ChatTemplateError(f"chat templates are run by the 'jinja2' library, which is not there ({error}): "
                                "pip install 'ggml-sched[llama]'") from error
    return jinja2


# -- what is wrapped -----------------------------------------------------------------


def _meter(tree) -> None:
    """Change a parsed template so that what costs goes through the filters that pay."""
    nodes = _jinja2().nodes

    def paid(node, name: str = "_paid", *arguments):
        return nodes.Filter(node, name, [nodes.Const(value) for value in arguments], [], None, None,
                            lineno=node.lineno)

    def written(node) -> int:
        """Characters that the template itself holds below a node."""
        found = [node, *node.find_all((nodes.TemplateData, nodes.Const))]
        return sum(len(str(part.data if isinstance(part, nodes.TemplateData) else part.value))
                   for part in found if isinstance(part, (nodes.TemplateData, nodes.Const)))

    def change(node):
        for field, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, field, change(value))
            elif isinstance(value, list):
                value[:] = [change(item) if isinstance(item, nodes.Node) else item for item in value]
        if isinstance(node, nodes.For):
            node.iter = paid(node.iter, "_loop", written(node))
        elif isinstance(node, nodes.Concat):
            node.nodes = [paid(item, "_text") for item in node.nodes]
        elif isinstance(node, nodes.Compare):
            node.expr = paid(node.expr)
            for operand in node.ops:
                operand.expr = paid(operand.expr)
        elif isinstance(node, nodes.Test):
            node.node = paid(node.node)
        elif isinstance(node, nodes.Filter) and node.node is not None:
            return paid(node)
        elif isinstance(node, (nodes.List, nodes.Dict)) or (
                isinstance(node, nodes.Tuple) and node.ctx == "load") or (
                isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            return paid(node)
        return node

    change(tree)


def _check_size(tree) -> None:
    n, level = 0, [tree]
    while level:
        n += len(level)
        if n > MAX_NODES:
            raise ChatTemplateError(f"a chat template of more than {MAX_NODES} pieces")
        level = [child for node in level for child in node.iter_child_nodes()]


def _check_format(text: str) -> None:
    """Refuse "%1000000000d"."""
    if re.search(r"%[^a-zA-Z%]*(\*|\d{4})", text):
        raise ChatTemplateError("the chat template formats wider than 999 characters")


def _check_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.text(len(text) + text.count(old) * len(new))


def _loop(context, iterable, n_written: int = 0):
    """What a `for` goes through, paying for each step and for the template's text that it puts out."""
    budget, ticks = context.budget, 1 + n_written // CHARS_PER_TICK
    if hasattr(iterable, "__len__"):
        return _Steps(iterable, budget, ticks)
    return (item for item in iterable if not budget.spend(ticks))


class _Steps:
    """A sequence whose items are paid for; it has a length, for `loop.last` and the like."""

    def __init__(self, items, budget: Budget, ticks: int) -> None:
        self._items, self._budget, self._ticks = items, budget, ticks

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self):
        for item in self._items:
            self._budget.spend(self._ticks)
            yield item


def _paid(context, value):
    context.budget.weigh(value)
    return value


def _text(context, value) -> str:
    """str(value), paid for before."""
    context.budget.weigh(value)
    return value if isinstance(value, str) else str(value)


def _join(context, value, d: str = "", attribute=None) -> str:
    items = list(value)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    items = [_text(context, item) for item in items]
    d = _text(context, d)
    context.budget.text(sum(map(len, items)) + len(d) * len(items))
    return d.join(items)


def _replace(context, s, old, new, count=None) -> str:
    s, old, new = (_text(context, text) for text in (s, old, new))
    _check_replace(context.budget, s, old, new)
    return s.replace(old, new, -1 if count is None else count)


def _indent(context, s, width=4, first: bool = False, blank: bool = False) -> str:
    s = _text(context, s)
    if isinstance(width, int) and width > MAX_WIDTH:
        raise ChatTemplateError(f"the chat template indents by {width}, the limit is {MAX_WIDTH}")
    by = width if isinstance(width, str) else " " * width
    lines = s.splitlines() or [""]
    context.budget.text(len(s) + len(by) * len(lines))
    lines[1:] = [by + line if line or blank else line for line in lines[1:]]
    return (by if first else "") + "\n".join(lines) + ("\n" if s.endswith("\n") and len(s) > 1 else "")


def _tojson(context, x, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """As Hugging Face's: letters stay as they are, and "<" too."""
    before = context.budget.left
    depth = context.budget.weigh(x)
    if isinstance(indent, str) or indent is not None and not 0 <= indent <= 16:
        raise ChatTemplateError("the chat template indents JSON by something else than 0 to 16 spaces")
    context.budget.spend((before - context.budget.left) * depth * (indent or 0) // 16)
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sum(context, iterable, attribute=None, start=0):
    items = list(iterable)
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    for item in (start, *items):
        if not isinstance(item, (int, float)):
            raise ChatTemplateError("the chat template sums what are no numbers")
    return sum(items, start)


def _round(context, value, precision: int = 0, method: str = "common"):
    if not -99 <= precision <= 99:
        raise ChatTemplateError(f"the chat template rounds to {precision} digits")
    return context.environment.jinja_filters["round"](value, precision, method)


def _format(context, value, *args, **kwargs) -> str:
    value = _text(context, value)
    _check_format(value)
    context.budget.weigh([args, kwargs])
    return value % (kwargs or args)


BOUNDED = {"_loop": _loop, "_paid": _paid, "_text": _text, "format": _format, "indent": _indent, "join": _join,
           "replace": _replace, "round": _round, "string": _text, "sum": _sum, "tojson": _tojson}


def _finalize(context, value):
    """What is put out."""
    context.budget.weigh(value)
    return value


def _raise_exception(message) -> None:
    raise ChatTemplateError(f"the chat template refuses the messages: {str(message)[:500]}")


def _strftime_now(form: str) -> str:
    if not isinstance(form, str) or len(form) > 256:
        raise ChatTemplateError("the chat template asks for a date in no form of strftime")
    return datetime.datetime.now().strftime(form)


# -- the environment -----------------------------------------------------------------


def _environment():
    """A jinja2 environment as Hugging Face sets one up, with our budget in it."""
    jinja2 = _jinja2()

    class Context(jinja2.runtime.Context):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.budget = Budget()

        def derived(self, locals=None):
            context = super().derived(locals)
            context.budget = self.budget
            return context

    class Namespace(jinja2.utils.Namespace):
        def __repr__(self) -> str:  # jinja2's shows all values: of spaces in spaces, exponentially many
            return "<Namespace>"

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks for training what the assistant says; for us it is its contents."""

        tags = {"generation"}

        def parse(self, parser):
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=lineno)

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))
        context_class = Context

        def is_safe_attribute(self, obj, attr, value) -> bool:
            for kind, allowed in METHODS.items():
                if isinstance(obj, kind):
                    return attr in allowed
            return super().is_safe_attribute(obj, attr, value)

        def wrap_str_format(self, value):
            return None  # the sandbox would let str.format through, of any width

        def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902, N805 - a template may pass self=
            budget = __context.budget
            budget.spend(8)
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str):
                budget.weigh([owner, args])
                if __obj.__name__ == "replace" and len(args) >= 2 and isinstance(args[1], str):
                    _check_replace(budget, owner, *args[:2])
                elif __obj.__name__ == "join" and args:
                    args = (list(args[0]),)
                    budget.text(len(owner) * len(args[0]) + sum(
                        len(item) for item in args[0] if isinstance(item, str)))
            result = super().call(__context, __obj, *args, **kwargs)
            budget.weigh(result)
            return result

        def call_binop(self, context, operator, left, right):
            budget = context.budget
            budget.spend(1)
            if operator == "*":
                for items, times in ((left, right), (right, left)):
                    if isinstance(items, (str, list, tuple)) and isinstance(times, int):
                        limit = MAX_CHARS if isinstance(items, str) else MAX_ITEMS
                        if len(items) * times > limit:
                            raise ChatTemplateError(f"the chat template repeats {len(items)} items {times} times")
            if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
                if bits > MAX_BITS:
                    raise ChatTemplateError(f"the chat template computes a number of {bits} bits")
            if operator == "%" and isinstance(left, str):
                _check_format(left)
                budget.weigh(right)
            result = super().call_binop(context, operator, left, right)
            if isinstance(result, (str, list, tuple)):
                budget.weigh(result)
            return result

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, auto_reload=False, cache_size=0,
        finalize=jinja2.pass_context(_finalize), extensions=[Generation, jinja2.ext.loopcontrols])
    environment.jinja_filters = environment.filters
    environment.filters = {name: environment.filters[name] for name in FILTERS} | {
        name: jinja2.pass_context(function) for name, function in BOUNDED.items()}
    environment.globals = {
        "range": jinja2.sandbox.safe_range, "dict": dict, "namespace": Namespace,
        "cycler": jinja2.utils.Cycler, "joiner": jinja2.utils.Joiner,
        "raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment
