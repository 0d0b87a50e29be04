"""Compute memory of models that take turns, with shared arenas and each with its own: a table of Markdown.

    python bench/shared_arenas.py [--models 2 4 8] [--n-batch N]

The models are Llamas of nearly equal sizes with random weights, all on one backend: a target, drafts and embedders.
Compute memory is arenas and the work memory of kernels, after a prompt of N tokens (512) and a token of each model.
Alone each model has a backend of its own, too.  All results have to have the same bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.llama.synthetic import random_llama
from ggml_sched.planning.tables import markdown

TARGETS = {2: 0.55, 4: 0.30, 8: 0.17}
SHAPE = {"n_vocab": 2048, "n_embd": 256, "n_head": 8, "n_head_kv": 4, "n_ctx": 1024,
         "extra": {"tokenizer.ggml.model": "no_vocab"}}


def files(n: int) -> list[bytes]:
    """Models that differ in weights, layers and widths."""
    return [random_llama(k + 1, n_layer=2 + k % 3, n_ff=704 - 32 * (k % 2), **SHAPE) for k in range(n)]


def results(model: llama.Model, n_batch: int) -> list[bytes]:
    """Logits of a prompt and of a token."""
    tokens = [1 + 7 * k % 2000 for k in range(n_batch)]
    return [model.eval(tokens, last_only=True).tobytes(), model.eval([5]).tobytes()]


def measured(n: int, n_batch: int) -> list[str]:
    """The row of n models."""
    given = files(n)
    options = {"n_ctx": 1024, "n_batch": n_batch}
    separate, expected = 0, []
    for data in given:
        with gs.CpuBackend() as backend, llama.load(data, [backend], **options) as model:
            expected.append(results(model, n_batch))
            separate += model.memory()[backend].arena + backend.work_held
    with ExitStack() as stack:
        backend = stack.enter_context(gs.CpuBackend())
        arenas = stack.enter_context(gs.Arenas())
        models = [stack.enter_context(llama.load(data, [backend], arenas=arenas, **options)) for data in given]
        for turn in range(2):
            for model, wanted in zip(models, expected, strict=True):
                model.reset()
                assert results(model, n_batch) == wanted, "other bits than with arenas of its own"
            assert np.all([model.memory()[backend].arena == arenas.nbytes(backend) for model in models]), turn
        shared = arenas.nbytes(backend) + backend.work_held
    return [str(n), f"{separate / 1e6:.2f}", f"{shared / 1e6:.2f}", f"{shared / separate:.3f}",
            f"{TARGETS[n]:.2f}" if n in TARGETS else "-"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, nargs="+", default=[*TARGETS])
    parser.add_argument("--n-batch", type=int, default=512)
    args = parser.parse_args(arguments)
    rows = [measured(n, args.n_batch) for n in args.models]
    print(markdown(["models", "each its own, MB", "shared, MB", "shared / own", "target"], rows))


if __name__ == "__main__":
    main()
