"""Serve several requests at once with one GGUF model: continuous batching over `eval_batch`.

    python batch_server.py [MODEL.gguf]

Each step continues every running request by one token, and begins waiting requests as soon as a sequence is free and
the context has room for all of their tokens.  Texts are streamed through a callback; `cancel` ends a request early.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ggml_sched import llama


@dataclass(eq=False)
class Request:
    """A text to continue by at most `n` tokens; `on_text(piece)` is called for each piece of new text."""

    prompt: list[int]
    n: int
    sampler: llama.Sampler
    on_text: Callable[[str], object]
    decoder: object                     # makes text of ids, one by one
    stops: llama.StopStrings
    n_tokens: int = 0                   # chosen so far
    finish_reason: str | None = None    # "length", "stop", "cancelled" or "failed", once it has ended
    pending: list[int] = field(default_factory=list)    # ids that the next step evaluates

    @property
    def room(self) -> int:
        """The tokens that it may still add to the context."""
        return len(self.pending) + self.n - self.n_tokens


class Server:
    """Runs requests over the sequences of one model, which was loaded with `n_seq`."""

    def __init__(self, model: llama.Model, n_seq: int) -> None:
        self.model = model
        self.free = list(range(n_seq))
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}

    def submit(self, prompt: str, n: int, on_text: Callable[[str], object], stop: Iterable[str] = (),
               **sampling) -> Request:
        """Queue a request; ValueError for one that never fits or has nothing to do."""
        ids = self.model.tokenizer.encode(prompt)
        if not ids or n < 1:
            raise ValueError(f"a request needs one token or more, and one to generate: {len(ids)} and {n}")
        if len(ids) + n > self.model.n_ctx:
            raise ValueError(f"{len(ids)} tokens and {n} more do not fit a context of {self.model.n_ctx}")
        sampler = llama.Sampler(**{"temperature": 0.0, **sampling})
        sampler.accept(*ids)            # penalties count the prompt's tokens, too
        request = Request(ids, n, sampler, on_text, self.model.tokenizer.stream(), llama.StopStrings(stop),
                          pending=ids)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request where it is."""
        if request in self.waiting:
            self.waiting.remove(request)
            request.finish_reason = "cancelled"
        for i, running in list(self.running.items()):
            if running is request:
                self._end(i, "cancelled")

    def step(self) -> bool:
        """Begin what fits, and continue every running request by one token; False if there is nothing to do.

        A request whose callback raises ends there; the exception reaches the caller when all others have their token.
        """
        promised = sum(request.room for request in self.running.values())
        while self.waiting and self.free and self.waiting[0].room <= self.model.n_free - promised:
            request = self.waiting.popleft()
            promised += request.room
            self.running[self.free.pop()] = request
        if not self.running:
            return False
        batch = list(self.running.items())
        logits = self.model.eval_batch([(i, request.pending) for i, request in batch])
        chosen = [(i, request, request.sampler(row)) for (i, request), row in zip(batch, logits, strict=True)]
        for _, request, token in chosen:        # all of them before a callback can raise
            request.n_tokens += 1
            request.pending = [token]
        failure = None
        for i, request, token in chosen:
            try:
                self._take(i, request, token)
            except Exception as error:
                failure = failure or error
                if self.running.get(i) is request:
                    self._end(i, "failed")
        if failure is not None:
            raise failure
        return True

    def _take(self, i: int, request: Request, token: int) -> None:
        """Pass the text of a token on, and end the request if it was the last.  A callback may cancel any request."""
        if self.running.get(i) is not request:
            return
        ended = token in self.model.end_tokens
        text = "" if ended else request.stops.feed(request.decoder.feed(token))
        last = ended or request.n_tokens == request.n
        if last and request.stops.matched is None:
            text += request.stops.feed(request.decoder.flush()) + request.stops.flush()
        if text:
            request.on_text(text)
        if self.running.get(i) is not request:
            return
        if ended or request.stops.matched is not None:
            self._end(i, "stop")
        elif last:
            self._end(i, "length")

    def _end(self, i: int, reason: str) -> None:
        self.running.pop(i).finish_reason = reason
        self.model.sequence(i).reset()
        self.free.append(i)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else llama.small_model()
    prompts = ["def area(self):", "class Point:", "import os", "for i in range(", "    return self."]
    with llama.load(path, n_ctx=256, n_seq=3) as model:
        server = Server(model, 3)
        texts: list[list[str]] = [[] for _ in prompts]
        requests = [server.submit(prompt, 12 + 4 * k, texts[k].append, stop=["\n\n"], temperature=0.5, seed=k)
                    for k, prompt in enumerate(prompts)]
        n_steps = 0
        while server.step():
            n_steps += 1
        for prompt, text, request in zip(prompts, texts, requests, strict=True):
            print(f"{prompt!r} -> {''.join(text)!r} [{request.finish_reason}]")
        n_tokens = sum(request.n_tokens for request in requests)
        print(f"{n_tokens} tokens of {len(requests)} requests in {n_steps} steps")


if __name__ == "__main__":
    main()
