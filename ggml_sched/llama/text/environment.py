"""The jinja2 environment of chat templates: what a template may read and call, and where it spends budget.

jinja2's immutable sandbox denies templates attributes and changes of their arguments.  It does not limit nested loops,
doubled strings, "x" * 10**9 and the like; this module does.  A template is changed once, when it is compiled (`meter`):
its costly expressions are wrapped in filters that spend budget.

This module imports jinja2, which is optional: sandbox.py imports this module when the first template is compiled.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from jinja2 import ext, nodes, pass_context, runtime, sandbox, utils

from ggml_sched.llama.errors import ChatTemplateError
from ggml_sched.llama.text.budget import (
    MAX_BITS,
    MAX_CHARS,
    MAX_ITEMS,
    Budget,
    check_format,
    check_number,
    check_replace,
)
from ggml_sched.llama.text.filters import BOUNDED, COMPARING, HARMLESS, steps

if TYPE_CHECKING:
    from jinja2.parser import Parser

__all__ = ["Context", "Environment", "check_size", "meter", "new_environment"]

MAX_NODES = 1 << 13
"""The largest number of nodes of a parsed template, which bounds the cost of compiling it."""

STRING_METHODS = frozenset((
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal",
    "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition",
    "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split",
    "splitlines", "startswith", "strip", "swapcase", "title", "upper"))
OF_KIND = frozenset((
    "boolean", "callable", "defined", "escaped", "even", "false", "filter", "float", "integer",
    "iterable", "lower", "mapping", "none", "number", "odd", "sameas", "sequence", "string", "test", "true",
    "undefined", "upper"))
"""Jinja tests (`x is mapping`) that compare no nested values, so that no budget need be spent for them."""
METHODS: dict[type, frozenset[str]] = {
    str: STRING_METHODS, dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")), tuple: frozenset(("count", "index")),
    int: frozenset(), float: frozenset(), range: frozenset()}
"""{type: methods that templates may call}: their results are not much larger than their arguments, except for `replace`
and `join`, whose work `call` counts before it calls them."""


# -- wrapping costly expressions -----------------------------------------------------


def meter(tree: nodes.Template) -> None:
    """Wrap the costly expressions of a parsed template in filters that count their work; text/budget.py limits the work
    of a rendering."""

    def paid(node: nodes.Node, name: str = "_weighed", *arguments: int) -> nodes.Filter:
        return nodes.Filter(node, name, [nodes.Const(value) for value in arguments], [], None, None,
                            lineno=node.lineno)

    def written(node: nodes.Node) -> int:
        """The number of characters of constant text below a node."""
        found = [node, *node.find_all((nodes.TemplateData, nodes.Const))]
        return sum(len(str(part.data if isinstance(part, nodes.TemplateData) else part.value))
                   for part in found if isinstance(part, (nodes.TemplateData, nodes.Const)))

    def change(node: nodes.Node) -> nodes.Node:
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
        elif isinstance(node, nodes.Test) and node.name not in OF_KIND:
            node.node = paid(node.node)
            node.args = [paid(argument) for argument in node.args or ()]
        elif isinstance(node, (nodes.List, nodes.Dict)) or isinstance(node, nodes.Tuple) and node.ctx == "load":
            return paid(node)
        elif isinstance(node, nodes.Filter) and node.node is not None:
            if node.name in COMPARING:
                node.node = paid(node.node)
            return paid(node, "_touched")
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return paid(node, "_touched")
        elif isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Const):
            node.arg = paid(node.arg)
        return node

    change(tree)


def check_size(tree: nodes.Template) -> None:
    """ChatTemplateError for a parsed template of more than MAX_NODES nodes."""
    n = 0
    level: list[nodes.Node] = [tree]
    while level:
        n += len(level)
        if n > MAX_NODES:
            raise ChatTemplateError(f"a chat template of more than {MAX_NODES} pieces")
        level = [child for node in level for child in node.iter_child_nodes()]


# -- what templates may call --------------------------------------------------------


def _finalize(context: Context, value: object) -> object:
    """Spend budget for a value that is written to the output."""
    context.budget.weigh(value)
    return value


def _raise_exception(message: object) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses the messages: {str(message)[:500]}")


def _strftime_now(pattern: str) -> str:
    if not isinstance(pattern, str) or len(pattern) > 256:
        raise ChatTemplateError("the chat template gives strftime_now no str of up to 256 characters")
    return datetime.datetime.now().strftime(pattern)


# -- the environment -----------------------------------------------------------------


class Context(runtime.Context):
    """The variables and the budget of one rendering of a template."""

    environment: Environment

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget: Budget = Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = cast("Context", super().derived(locals))
        context.budget = self.budget
        return context


class Namespace(utils.Namespace):
    """The object that `namespace()` makes in a template."""

    def __repr__(self) -> str:  # jinja2's repr shows all values, which can be exponentially many in nested namespaces
        return "<Namespace>"


class Generation(ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders its contents."""

    tags: set[str] = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, in which each call, operator and test spends budget.

    `jinja_filters`: jinja2's own filters, by name.
    """

    intercepted_binops: frozenset[str] = frozenset(("+", "-", "*", "/", "//", "**", "%"))
    context_class: type[runtime.Context] = Context
    jinja_filters: dict[str, Callable[..., Any]]

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        return None  # no wrapper: templates cannot call str.format, which jinja2's sandbox allows with any width

    def call(__self, __context: runtime.Context, __obj: Any,  # noqa: B902, N805 - a template may pass self=
             *args: Any, **kwargs: Any) -> Any:
        budget = cast("Context", __context).budget
        budget.spend(8)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, list, tuple, dict)):  # their methods search, compare or copy values
            budget.weigh([owner, args])
        if isinstance(owner, str):
            if __obj.__name__ == "replace" and len(args) >= 2 and isinstance(args[1], str):
                check_replace(budget, owner, *args[:2])
            elif __obj.__name__ == "join" and args:
                args = (list(args[0]),)
                budget.text(len(owner) * len(args[0]) + sum(
                    len(item) for item in args[0] if isinstance(item, str)))
        if isinstance(__obj, runtime.LoopContext):  # a recursive loop
            context = cast("Context", __context)
            args = tuple(steps(context, values) for values in args)
            kwargs = {name: steps(context, values) for name, values in kwargs.items()}
        result = super().call(__context, __obj, *args, **kwargs)
        budget.weigh(result)
        return result

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The text of a macro, a block, or a step of a recursive loop, from what its nodes have written."""
        kept, n_chars = [], 0
        for part in parts:
            n_chars += len(part)
            if n_chars > MAX_CHARS:
                raise ChatTemplateError(f"the chat template makes a text of more than {MAX_CHARS} characters")
            kept.append(part)
        return "".join(kept)

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        budget = cast("Context", context).budget
        budget.spend(1)
        check_number(left)
        check_number(right)
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
            check_format(budget, left, right)
        result = super().call_binop(context, operator, left, right)
        budget.touch(result)
        return result

    def call_test(self, name: str, value: Any, args: Sequence[Any] | None = None,
                  kwargs: Mapping[str, Any] | None = None, context: runtime.Context | None = None,
                  eval_ctx: nodes.EvalContext | None = None) -> Any:
        if context is not None and name not in OF_KIND:  # called by `select` and similar filters for each item
            cast("Context", context).budget.weigh([value, args])
        return super().call_test(name, value, args, kwargs, context, eval_ctx)


def new_environment() -> Environment:
    """A jinja2 environment with the same syntax as the one in which Hugging Face's transformers renders chat templates.

    Its filters spend the `Budget` of the rendering.
    """
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, auto_reload=False, cache_size=0,
        finalize=pass_context(_finalize), extensions=[Generation, ext.loopcontrols])
    environment.jinja_filters = environment.filters
    environment.filters = {name: environment.filters[name] for name in HARMLESS} | {
        name: pass_context(function) for name, function in BOUNDED.items()}
    environment.globals = {
        "range": sandbox.safe_range, "dict": dict, "namespace": Namespace,
        "cycler": utils.Cycler, "joiner": utils.Joiner,
        "raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment
