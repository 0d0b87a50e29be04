"""Answer requests in the shape of OpenAI's chat completions: dictionaries in, dictionaries out.

    python openai_shapes.py [MODEL.gguf]

`complete(model, request)` returns a "chat.completion"; with `"stream": True` it returns an iterator over
"chat.completion.chunk"s.  A web framework adds JSON and HTTP around it.  Fields that change the result and are not
served here raise ValueError.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

from ggml_sched import llama

SAMPLING = {"temperature": "temperature", "top_p": "top_p", "seed": "seed",
            "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty"}
"""{field of a request: argument of `Model.chat`}."""
IGNORED = {"model", "messages", "stream", "stop", "max_tokens", "max_completion_tokens", "user", "n"}
FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
_numbers = itertools.count(1)


def complete(model: llama.Model, request: dict[str, Any]) -> dict[str, Any] | Iterator[dict[str, Any]]:
    """The answer to one request."""
    unknown = request.keys() - SAMPLING.keys() - IGNORED
    if unknown or request.get("n") not in (None, 1):
        raise ValueError(f"not served: {', '.join(sorted(unknown)) or 'n other than 1'}")
    if not request.get("messages"):
        raise ValueError("a request needs messages")
    limits = (request.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((n for n in limits if n is not None), None)
    # OpenAI's default temperature is 1.  Names of control tokens in the messages stay text.
    given = {ours: request[theirs] for theirs, ours in SAMPLING.items() if request.get(theirs) is not None}
    sampling = {"temperature": 1.0, "top_k": 0, "min_p": 0.0, **given}
    reply = model.chat(request["messages"], limit, stop=request.get("stop"), parse_special=False, **sampling)
    head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": request.get("model", "")}
    return _chunks(reply, head) if request.get("stream") else _whole(reply, head)


def _whole(reply: llama.Generation, head: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply.read()}
    n_prompt, n_new = reply.stats.n_prompt, len(reply.tokens)
    return {
        **head, "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": FINISH_REASONS[reply.finish_reason]}],
        "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new,
                  "prompt_tokens_details": {"cached_tokens": reply.stats.n_cached}},
    }


def _chunks(reply: llama.Generation, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    def chunk(delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        return {**head, "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in reply:
        yield chunk({"content": piece})
    yield chunk({}, FINISH_REASONS[reply.finish_reason])


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else llama.small_model()
    with llama.load(path, n_ctx=512, kv_type="f16") as model:
        request = {"model": "small", "messages": [{"role": "user", "content": "class Point:"}], "max_tokens": 16,
                   "temperature": 0, "stop": ["\n\n"]}
        answer = complete(model, request)
        print(answer["choices"][0], answer["usage"])
        streamed = [chunk["choices"][0] for chunk in complete(model, {**request, "stream": True})]
        text = "".join(choice["delta"].get("content", "") for choice in streamed)
        print("streamed the same:", text == answer["choices"][0]["message"]["content"], streamed[-1])


if __name__ == "__main__":
    main()
