"""A conversation with a GGUF model: a line for each message, until they end.

    python chat.py [MODEL.gguf]
"""

import sys

from ggml_sched import llama

# The model that comes with the package continues Python, and answers every message with more of it.
with llama.load(sys.argv[1] if len(sys.argv) > 1 else llama.small_model(), n_ctx=2048, kv_type="f16") as model:
    messages = [{"role": "system", "content": "You are brief."}]
    for line in sys.stdin if len(sys.argv) > 1 else ["class Point:", "def area(self):"]:
        messages.append({"role": "user", "content": line.strip()})
        reply = model.chat(messages, 40, stop="\n", repeat_penalty=1.3, seed=0)
        # The oldest turns are forgotten until the others fit into the context, with room for the reply.
        while reply.stats.n_prompt + 40 > model.n_ctx and len(messages) > 3:
            del messages[1:3]
            reply = model.chat(messages, 40, stop="\n", repeat_penalty=1.3, seed=0)
        for piece in reply:
            print(piece, end="", flush=True)
        messages.append({"role": "assistant", "content": reply.text})
        # The part of the conversation that was in the sequence was not evaluated again.
        print(f"\n[{reply.stats.n_cached} of {reply.stats.n_prompt} tokens were there]")
