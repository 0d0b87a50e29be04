"""The graphs of a model file that is not loaded, made from the file's metadata alone, for placements.

Weights are tensors with addresses on a dry backend: no byte of them is read.  The graphs have the shapes for which a
loaded model reserves memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggml_sched._graph import Graph, Type
from ggml_sched.backend import Backend
from ggml_sched.backends.dry import DryBackend
from ggml_sched.llama import arch as architectures
from ggml_sched.llama._cells import MAX_SEQUENCES
from ggml_sched.llama.arguments import count
from ggml_sched.llama.batchgraph import LargestShapes
from ggml_sched.llama.builder import build_graph
from ggml_sched.llama.gguf import open_gguf
from ggml_sched.llama.kvcache import KVCache, type_of
from ggml_sched.llama.load import MAX_ROWS
from ggml_sched.llama.runner import Runner
from ggml_sched.llama.weights import load_weights

if TYPE_CHECKING:
    from ggml_sched.llama.gguf import Source

__all__ = ["model_graphs"]


def model_graphs(path: Source, n_ctx: int | None = None, n_batch: int = 512, *, kv_type: Type | str = "f32",
                 n_seq: int = 1, flash: bool | None = None, backends: Sequence[Backend] | None = None,
                 all_outputs: bool = False) -> list[Graph]:
    """The graphs by which `gs.fit` places a model's weights and caches: of one token that reads the whole cache; of the
    largest prompt, `n_batch` tokens with the outputs of a chat; and, for several sequences, of one token of each and of
    the one in which embeddings are evaluated, but at most `n_batch`.

    The arguments are those of `load`, except that n_ctx None or 0 means as many tokens as the model was trained with,
    whatever memory there is.  `flash` None: flash attention is used if all of `backends` compute its node, or if no
    backends are given.  `all_outputs`: also the prompts with the logits of all tokens, and of all but one, for which
    arenas are larger: `Model.eval` computes these without `last_only`.  A model that `load` makes with the same
    arguments has equal graphs.  Raises FileFormatError, ValueError and TypeError as `load` does.
    """
    n_ctx = 0 if n_ctx is None else count("n_ctx", n_ctx, 0, MAX_ROWS)
    n_batch, n_seq = count("n_batch", n_batch, 1, MAX_ROWS), count("n_seq", n_seq, 1, MAX_SEQUENCES - 1)
    dry = DryBackend("unloaded", alignment=64)
    with open_gguf(path) as file:
        _, arch = architectures.find(file)
        hparams = arch.hparams(file)
        weights = load_weights(file, arch.weights(hparams), lambda name, layer: dry)
    n_ctx = n_ctx or min(hparams.n_ctx_train, MAX_ROWS)
    n_states = Runner.n_states(hparams, n_seq)
    n_batch = min(n_batch, n_ctx)

    def graphs(flash: bool) -> list[Graph]:
        cache = KVCache(hparams, n_ctx, lambda name, layer: dry, type_of(kv_type), n_states, flash=flash)
        largest = LargestShapes(n_seq, n_batch, cache.padded(n_ctx))
        shapes = largest.usual(hparams.recurrent) + ([largest.most, largest.all] if all_outputs else [])
        return [build_graph(arch, hparams, weights, cache, shape, flash).graph for shape in dict.fromkeys(shapes)]

    made = graphs(True if flash is None else flash)
    if flash is None and not all(backend.supports_op(node) for graph in made[:1] for node in graph.nodes
                                 if node.op == "FLASH_ATTN_EXT" for backend in backends or ()):
        made = graphs(False)
    return made
