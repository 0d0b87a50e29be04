"""Continue a text with a GGUF model.

    python generate_text.py [MODEL.gguf] [TEXT]
"""

import sys

from ggml_sched import llama

model_file, prompt, *_ = [*sys.argv[1:], *(llama.small_model(), llama.SMALL_PROMPT)[len(sys.argv) - 1 :]]

with llama.load(model_file, kv_type="f16") as model:
    text = model.generate(prompt, 60, stop="\n\n", temperature=0.5, seed=0)
    print(prompt, end="")
    for piece in text:
        print(piece, end="", flush=True)
    print(f"\n\n{len(text.tokens)} tokens, ended by {text.finish_reason!r}")

    # The sequence keeps its tokens: truncate it, and continue differently.
    model.truncate(len(model.tokenizer.encode(prompt)))
    print(repr(model.generate("\n        self.name", 12).read()))
