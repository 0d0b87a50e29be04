"""Vocabularies and chat templates with a few mistakes: refused with a gs.Error, or they work; nothing else."""

import io
import json
import random
import time
from pathlib import Path

import numpy as np
from byte_attack import mutated_bytes

import ggml_sched as gs
from ggml_sched.llama import ChatTemplate, Tokenizer, write_gguf

SAMPLES = json.loads((Path(__file__).parents[1] / "data" / "vocab" / "samples.json").read_text())
VOCABULARIES = (SAMPLES["spm"], SAMPLES["bpe"] | {"tokenizer.ggml.pre": "llama-bpe"}, SAMPLES["bpe"])
TEXTS = ("Hello world", "  a\n\n\tb \U0001f999 \u4e2d\u6587 123 <|im_start|>x</s>", "\u2581" * 9 + " " * 20)
NUMBERS = (0, 1, -1, 2, 7, 300, 1 << 31, (1 << 32) - 1, 1 << 40, 0.5, -1e30, float("nan"), float("inf"), True, "", "x",
           None, [], [1], ["a"], [["a"]])
STRINGS = ("", " ", "a", "a b", " a", "a ", "\u2581", "\u2581\u2581", "<0x41>", "<0xZZ>", "<s>", "\x00", "\U0010ffff",
           "x" * 600, "ab cd ef", "[EMPTY_3]", "\u0120", "<|im_end|>", "</s>")
SCORES = (0.0, -0.0, 1.0, -1e9, 3.4e38, -3.4e38, 1e-45, float("nan"), float("inf"))
KEYS = ("model", "pre", "tokens", "scores", "token_type", "merges", "bos_token_id", "eos_token_id", "eot_token_id",
        "unknown_token_id", "padding_token_id", "fim_pad_token_id", "add_bos_token", "add_eos_token",
        "add_space_prefix")
TEMPLATES = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message.content | trim }}{% endfor %}",
    "{%- set ns = namespace(x='a', y=[]) %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% endfor %}"
    "{{ ns.x }}",
    "{% macro f(x, n) %}{% if n > 0 %}{{ f(x ~ x, n - 1) }}{% endif %}{{ x | length }}{% endmacro %}{{ f('ab', 3) }}",
    "{% if not messages %}{{ raise_exception('none') }}{% elif tools %}{{ tools | tojson(indent=2) }}{% else %}"
    "{{ messages[-1]['content'].split('\n')[0] * 3 + '%5d' % 7 }}{% endif %}")
PIECES = ("{{", "}}", "{%", "%}", "for ", " in ", "range(", ")", "(", "ns.x", " ~ ", " * ", "10**9", "**", "'", "[",
          "]", ".", "|", "join", "replace('a', 'aa')", "list", "tojson", "loop", "messages", "{% endfor %}",
          "{% endif %}", "{% else %}", "{% set ns.x = [ns.x, ns.x] %}", "self", "__class__", ".format(", "%9d",
          "namespace(", "dict(")


def mutated_metadata(rng: random.Random) -> dict:
    """Well-formed metadata of a wrong vocabulary."""
    metadata = {key: value.copy() if isinstance(value, list) else value
                for key, value in rng.choice(VOCABULARIES).items()}
    for _ in range(rng.choice((1, 1, 2, 4))):
        key = "tokenizer.ggml." + rng.choice(KEYS)
        value = metadata.get(key)
        if not isinstance(value, list) or not value or rng.random() < 0.1:
            metadata[key] = rng.choice(NUMBERS)
            if rng.random() < 0.2:
                del metadata[key]
            continue
        for _ in range(min(len(value), rng.choice((1, 3, 50)))):
            at, other = rng.randrange(len(value)), rng.randrange(len(value))
            match rng.randrange(6):
                case 0 | 1:
                    value[at] = rng.choice({str: STRINGS, float: SCORES}.get(type(value[at]), range(-1, 9)))
                case 2:
                    value[at] = value[other]
                case 3:
                    value[at], value[other] = value[other], value[at]
                case 4 if rng.random() < 0.05 and len(value) > 1:
                    del value[at]
                case 5 if isinstance(value[at], str):
                    value[at] = value[at] + rng.choice((" ", "a", value[other]))
    return metadata


def as_file(metadata: dict) -> bytes | None:
    """The same in a GGUF file, where a file can hold it."""
    metadata = {key: np.array(value, np.int32) if key.endswith("token_type") and isinstance(value, list)
                and all(type(item) is int for item in value) else value for key, value in metadata.items()}
    out = io.BytesIO()
    try:
        write_gguf(out, metadata, {})
    except (TypeError, ValueError, OverflowError, AttributeError):
        return None
    return out.getvalue()


def attempt_vocabulary(rng: random.Random) -> str:
    metadata = mutated_metadata(rng)
    data = as_file(metadata)
    if data is not None and rng.random() < 0.3:
        data = mutated_bytes(rng, data)
    start = time.thread_time()
    try:
        tokenizer = Tokenizer.from_metadata(metadata) if data is None else Tokenizer.from_gguf(data)
    except gs.Error:
        assert time.thread_time() - start < 2.0
        return "refused"
    for text in TEXTS:
        for options in ((True, True), (False, False)):
            ids = tokenizer.encode(text, *options)
            assert all(0 <= token < tokenizer.n_vocab for token in ids)
            assert isinstance(tokenizer.decode(ids), str)
    every = range(tokenizer.n_vocab)
    stream = tokenizer.stream()
    assert "".join([stream.feed(token) for token in every]) + stream.flush() == tokenizer.decode(every)
    assert all(0 <= token < tokenizer.n_vocab for token in tokenizer.eos_ids)
    return "works"


def mutated_template(rng: random.Random) -> str:
    source = rng.choice(TEMPLATES)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(source) + 1)
        match rng.randrange(4):
            case 0:
                source = source[:at] + rng.choice(PIECES) + source[at:]
            case 1:
                source = source[:at] + source[at + rng.randint(1, 6) :]
            case 2:
                end = at + rng.randint(1, 40)
                source = source[:at] + source[at:end] * rng.choice((2, 3, 50)) + source[end:]
            case 3:
                other = rng.choice(TEMPLATES)
                source = source[:at] + other[rng.randrange(len(other)) :]
    return source


def attempt_template(rng: random.Random) -> str:
    source = mutated_template(rng)
    messages = [{"role": "user", "content": "Hi\nthere"}] * rng.choice((0, 1, 3))
    start = time.thread_time()
    try:
        text = ChatTemplate(source).render(messages, tools=rng.choice((None, [{"name": "f"}])))
    except gs.Error:
        text = None
    assert time.thread_time() - start < 3.0, source
    assert text is None or isinstance(text, str)
    return "refused" if text is None else "works"
