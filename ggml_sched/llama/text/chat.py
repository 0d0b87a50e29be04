"""Chat templates: render messages as the text format that a model was trained on.

A template receives plain data only (see `plain`), checked and copied, so that it cannot change the caller's data.
Corresponds to `apply_chat_template` of Hugging Face's transformers, for which such templates are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggml_sched.llama.errors import ChatTemplateError
from ggml_sched.llama.gguf import Array, GGUFFile, Kind, open_gguf
from ggml_sched.llama.text import sandbox
from ggml_sched.llama.text.marks import Marker

if TYPE_CHECKING:
    from ggml_sched.llama.gguf import Source
    from ggml_sched.llama.text.tokenizer import Tokenizer

__all__ = ["CHATML", "ChatTemplate"]

KEY = "tokenizer.chat_template"
NAMES = "tokenizer.chat_templates"
MAX_DEPTH = 32

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
"""The template for files that have no chat template."""


class ChatTemplate:
    """A compiled template: `render(messages) -> str`, `encode(tokenizer, messages) -> ids`.

        template = ChatTemplate.from_gguf("model.gguf")
        text = template.render([{"role": "user", "content": "Hello"}])

    Templates from files are untrusted: they read plain data, no attributes, and run within limits (`Budget`).  Needs
    jinja2 (`pip install 'ggml-sched[llama]'`).  Immutable and safe to use from several threads.
    """

    def __init__(self, source: str = CHATML, *, bos_token: str = "", eos_token: str = "",
                 name: str = "<chat template>") -> None:
        if not isinstance(source, str):
            raise TypeError(f"a chat template is a str, not {type(source).__name__}")
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.name = name
        self._template = sandbox.compile_template(source)
        # A template that handles messages with several parts (text, images) reads the type of each part.  For other
        # templates, the texts of the parts are joined.
        self._takes_parts = any(mark in source for mark in ("'type'", '"type"', ".type"))

    @classmethod
    def from_gguf(cls, source: Source | GGUFFile, variant: str | None = None) -> ChatTemplate:
        """The template of a path, bytes, a binary file object, or an open GGUFFile (left open); see `from_metadata`."""
        if isinstance(source, GGUFFile):
            return cls.from_metadata(source.metadata, variant, source.name)
        with open_gguf(source) as file:
            return cls.from_metadata(file.metadata, variant, file.name)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], variant: str | None = None,
                      name: str = "<metadata>") -> ChatTemplate:
        """The file's template, or the one named `variant` ("tool_use", "rag"); ChatML if the file has no template.

        ChatTemplateError for an invalid template and for a variant that the file does not have.
        """
        key = KEY if variant is None else f"{KEY}.{variant}"
        source = metadata.get(key)
        if source is None:
            if variant is not None:
                raise ChatTemplateError(f"{name}: {key} is missing; there are {_variants(metadata)}")
            source = CHATML
        if not isinstance(source, str):
            raise ChatTemplateError(f"{name}: {key} is a {type(source).__name__}, not a string")
        try:
            return cls(source, bos_token=_token(metadata, "bos"), eos_token=_token(metadata, "eos"), name=name)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{name}: {key}: {error}") from error

    @property
    def is_default(self) -> bool:
        """Whether this is ChatML because the file has no template."""
        return self.source is CHATML

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True,
               tools: Sequence[Any] | None = None, documents: Sequence[Any] | None = None, **variables: object) -> str:
        """The text for a conversation.

        `messages`: dicts with a `role` and `content`: str, None, or a list of parts such as
        `{"type": "text", "text": ...}`; other keys (`tool_calls`, `name`) go to the template as they are.
        `add_generation_prompt`: end where the assistant's answer begins.  Other variables of the template, such as
        `enable_thinking`, are given by name.  TypeError for messages of wrong types, ChatTemplateError for messages
        that the template refuses, and for errors of the template.
        """
        given = {"messages": self._checked(messages), "add_generation_prompt": bool(add_generation_prompt),
                 "tools": plain(tools, "tools"), "documents": plain(documents, "documents"),
                 "bos_token": self.bos_token, "eos_token": self.eos_token}
        return sandbox.render(self._template, given | {
            key: plain(value, key) for key, value in variables.items()})

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, *,
               parse_special: bool = True, **variables: Any) -> list[int]:
        """Token ids for a conversation: with BOS once, whether the template writes it or not, and without EOS.

        `parse_special`: a text like "<|im_end|>" in a message becomes the control token.  False, for untrusted
        messages and documents: such a text stays text, and only the template writes control tokens.
        """
        if parse_special:
            text = self.render(messages, add_generation_prompt, **variables)
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
        else:
            messages, documents = self._checked(messages), plain(variables.pop("documents", None), "documents")
            marker = Marker(tokenizer.control_texts, [messages, documents])
            text = self.render(marker.marked(messages), add_generation_prompt, documents=marker.marked(documents),
                               **variables)
            ids = tokenizer.encode_marked(text, marker.mark)
        if tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids.insert(0, tokenizer.bos_id)
        return ids

    def _checked(self, messages: object) -> list[dict[str, Any]]:
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise TypeError(f"messages are a list of dicts, not {type(messages).__name__}")
        checked = []
        for i, message in enumerate(messages):
            where = f"messages[{i}]"
            if not isinstance(message, Mapping):
                raise TypeError(f"{where} is a dict with a role and content, not {type(message).__name__}")
            message = plain(message, where)
            if "role" not in message:
                raise ChatTemplateError(f"{where} has no role")
            if not isinstance(message["role"], str):
                raise TypeError(f"{where}['role'] is a str, not {type(message['role']).__name__}")
            if "content" not in message and "tool_calls" not in message:
                raise ChatTemplateError(f"{where} has no content")
            content = message.get("content")
            if isinstance(content, list):
                message["content"] = self._parts(content, where)
            elif content is not None and not isinstance(content, str):
                raise TypeError(f"{where}['content'] is a str or a list of parts, not {type(content).__name__}")
            checked.append(message)
        return checked

    def _parts(self, parts: list[Any], where: str) -> list[Any] | str:
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise TypeError(f"{where}['content'] is a list of dicts with a type")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise TypeError(f"{where}['content'] has a text part without text")
        if self._takes_parts:
            return parts
        if others := {part["type"] for part in parts} - {"text"}:
            raise ChatTemplateError(f"{where}['content'] has parts {sorted(others)}, the template knows text only")
        return "\n".join(part["text"] for part in parts)

    def __repr__(self) -> str:
        return f"<ChatTemplate of {self.name}: {len(self.source)} characters>"


def plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy for a template: None, bool, int, float, str, or lists and dicts of these; TypeError for other types."""
    if depth > MAX_DEPTH:
        raise ChatTemplateError(f"{where} is nested deeper than {MAX_DEPTH}")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has a key {key!r:.60}, which is no str")
        return {str(key): plain(item, f"{where}[{key!r:.60}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise TypeError(f"{where} is a {type(value).__name__}; templates take None, bool, int, float, str, list and dict")


def _token(metadata: Mapping[str, object], which: str) -> str:
    """The text of BOS or EOS; "" if the file has none, or a wrong id (for which the tokenizer raises an error)."""
    tokens, token = metadata.get("tokenizer.ggml.tokens"), metadata.get(f"tokenizer.ggml.{which}_token_id")
    if isinstance(tokens, Array) and tokens.kind is not Kind.STRING or not isinstance(tokens, (Array, list, tuple)):
        return ""
    if token is None and metadata.get("tokenizer.ggml.model") == "llama":
        token = {"bos": 1, "eos": 2}[which]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < len(tokens):
        return ""
    text = tokens[token]
    return text if isinstance(text, str) else ""


def _variants(metadata: Mapping[str, object]) -> list[str]:
    return sorted(key.removeprefix(KEY + ".") for key in metadata if key.startswith(KEY + "."))
