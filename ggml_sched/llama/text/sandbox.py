"""Runs untrusted Jinja templates within limits: no attributes, bounded time, bounded memory.

Invariant: every loop step, call, operator, filter and piece of output spends budget in proportion to the data that it
reads or makes, so no template runs long or grows large.  environment.py has what a template may read and call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ggml_sched.llama.errors import ChatTemplateError
from ggml_sched.llama.text.budget import MAX_CHARS

if TYPE_CHECKING:
    from jinja2 import Template

    from ggml_sched.llama.text.environment import Context

__all__ = ["compile_template", "render"]

MAX_SOURCE = 1 << 16


def compile_template(source: str) -> Template:
    """A template ready to `render`; ChatTemplateError for invalid syntax, and for a template that is too long."""
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(f"a chat template of {len(source)} characters; the limit is {MAX_SOURCE}")
    try:
        from ggml_sched.llama.text.environment import check_size, meter, new_environment
    except ImportError as error:
        raise ChatTemplateError(f"chat templates are run by the 'jinja2' library, which is not there ({error}): "
                                "pip install 'ggml-sched[llama]'") from error
    environment = new_environment()
    try:
        tree = environment.parse(source)
        check_size(tree)
        meter(tree)
        return environment.from_string(tree)
    except ChatTemplateError:
        raise
    except Exception as error:  # also RecursionError, and Python's SyntaxError for blocks that are nested too deep
        raise ChatTemplateError(f"the chat template cannot be compiled: {_said(error)}") from error


def render(template: Template, variables: dict[str, Any]) -> str:
    """The rendered text of a template; ChatTemplateError for every error in it."""
    try:
        context = cast("Context", template.new_context(variables))
        parts: list[str] = []
        n_chars = 0
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
