"""Errors for arguments that a function does not have.

An unknown argument is a TypeError.  Its message says: for a name of llama-cpp-python, transformers or servers' APIs,
what the same argument is called here; for a name like that of an argument, that argument; otherwise, all arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature

__all__ = ["unknown_argument"]

GPU_LAYERS = "backends=[...] has the devices, and place=function places each layer"
KV_TYPE = "kv_type is the type of keys and values"
HINTS = {
    "load": {
        "model_path": "path",
        "model": "path",
        "filename": "path",
        "n_gpu_layers": GPU_LAYERS,
        "gpu_layers": GPU_LAYERS,
        "tensor_split": GPU_LAYERS,
        "main_gpu": GPU_LAYERS,
        "device": GPU_LAYERS,
        "device_map": GPU_LAYERS,
        "override_tensor": GPU_LAYERS,
        "context_length": "n_ctx",
        "max_seq_len": "n_ctx",
        "n_ubatch": "n_batch",
        "batch_size": "n_batch",
        "n_parallel": "n_seq",
        "n_seq_max": "n_seq",
        "threads": "n_threads",
        "n_threads_batch": "n_threads is for prompts and single tokens alike",
        "flash_attn": "flash",
        "type_k": KV_TYPE,
        "type_v": KV_TYPE,
        "cache_type_k": KV_TYPE,
        "cache_type_v": KV_TYPE,
        "use_mlock": "use_mmap=False copies the weights",
        "no_mmap": "use_mmap=False copies the weights",
        "repack": "interleave",
        "use_extra_bufts": "interleave",
        "logits_all": "model.eval returns the logits of every token",
        "embedding": "model.embed needs no switch",
        "embeddings": "model.embed needs no switch",
        "seed": "model.generate takes seed",
        "temperature": "model.generate takes temperature",
        "max_tokens": "model.generate takes n",
        "verbose": "loading prints nothing; progress=function reports bytes",
    },
    "generate": {
        "max_tokens": "n",
        "max_new_tokens": "n",
        "n_predict": "n",
        "num_predict": "n",
        "stop_strings": "stop",
        "stops": "stop",
        "stop_sequences": "stop",
        "temp": "temperature",
        "typical_p": "temperature, top_k, top_p and min_p choose",
        "penalty": "repeat_penalty",
        "repetition_penalty": "repeat_penalty",
        "do_sample": "temperature=0 chooses the likeliest token",
        "stream": "a Generation streams; its read() waits for the whole text",
        "grammar": "sampler=function chooses a token from the logits",
        "logits_processor": "sampler=function chooses a token from the logits",
    },
}


def unknown_argument(function: Callable[..., object], name: str, others: Iterable[str] = ()) -> TypeError:
    """The error for an argument `name` of `load`, `Model.generate` or `Model.chat`, which the function does not have.

    `others`: names that the function takes as **keywords, besides those in its signature.
    """
    from difflib import get_close_matches  # here: only errors need it

    parameters = signature(function).parameters.values()
    known = sorted({*others, *(parameter.name for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD)})
    hints = HINTS["load" if function.__name__ == "load" else "generate"]
    hint = hints.get(name) or next(iter(get_close_matches(name, known)), "")
    if hint.isidentifier():
        hint = f"it is called {hint!r} here"
    return TypeError(f"{function.__name__}() has no argument {name!r}: {hint or 'it has ' + ', '.join(known)}")
