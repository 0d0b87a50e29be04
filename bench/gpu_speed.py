"""Speeds of a CUDA device and of the backend on it: the measurements of bench/gpu.py. Every time is the host's, of many
runs queued together and waited for once, so that the device layer suffices.  The model is a Llama whose weights are one
random piece of q4_0 blocks over and over: a device's speed does not depend on the values, and no run has to quantise 7
billion numbers.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import sqrt
from statistics import median

import numpy as np

import ggml_sched as gs
from ggml_sched.backends.cupy.device import Device, Stream
from ggml_sched.backends.cupy.plan import DevicePlan
from ggml_sched.llama import load
from ggml_sched.llama.gguf_write import write_gguf
from ggml_sched.llama.model import Model

__all__ = ["FULL", "QUICK", "TINY", "Counting", "Meter", "Missing", "Scale"]

BLOCK_SIZE, BLOCK_BYTES = 32, 18
"""Of q4_0."""
LEVELS = 4.6
"""The standard deviation of its levels, -8 to 7."""


class Missing(Exception):
    """A measurement's requirement is missing; the message names it, and how to install it."""


@dataclass(frozen=True)
class Scale:
    """Sizes of all measurements."""

    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_vocab: int
    short: int = 256
    """Rows of the cache that a short text reads."""
    long: int = 4096
    filled: int = 64
    """Rows of a text's cache that stay free for the timed tokens."""
    prompt: int = 512
    tokens: int = 1024
    """Tokens over which captures are counted."""
    copied: int = 4 << 30
    pinned: int = 1 << 28
    weights: int = 1 << 30
    """Bytes of different weights in a mat-vec measure: more than the device's cache holds."""
    gemm: int = 8192
    least: float = 0.05
    """Seconds of one timed block of runs."""
    blocks: int = 7

    @property
    def matrices(self) -> int:
        """Extents of the weight matrices that a token is multiplied with."""
        return self.n_layer * (4 * self.n_embd**2 + 3 * self.n_embd * self.n_ff) + self.n_embd * self.n_vocab

    @property
    def bytes_of_weights(self) -> int:
        return self.matrices // BLOCK_SIZE * BLOCK_BYTES

    def bytes_of_token(self, rows: int) -> int:
        """Bytes that a token reads: all weights, and `rows` rows of an f16 cache."""
        return self.bytes_of_weights + 2 * 2 * rows * self.n_embd * self.n_layer


FULL = Scale(32, 4096, 11008, 32, 32000)
QUICK = Scale(4, 4096, 11008, 32, 32000, long=1024, tokens=512, copied=1 << 30, weights=1 << 28, gemm=4096, least=0.02,
              blocks=3)
TINY = Scale(1, 256, 256, 4, 256, long=320, filled=250, prompt=40, tokens=8, copied=1 << 16, pinned=1 << 16,
             weights=1 << 16, gemm=64, least=0.0, blocks=1)


class Counting(gs.CupyBackend):
    """A backend that records the last plan that ran, and counts captures."""

    last: DevicePlan | None = None
    captures = 0

    def graph_plan_compute(self, plan: DevicePlan) -> None:
        before = plan.captures
        super().graph_plan_compute(plan)
        self.captures += plan.captures - before
        self.last = plan

    def replay(self) -> Callable[[], None]:
        """A function that queues the last plan's captured graph again."""
        plan = self.last
        if plan is None or plan.graph is None:
            raise RuntimeError("nothing was captured")
        return lambda: plan.graph.launch(self.stream)


class Meter:
    """Measures on one device; rates are per second, of bytes, tokens or operations."""

    def __init__(self, device: Device, scale: Scale, overlap: bool = False) -> None:
        self.device, self.scale, self.overlap = device, scale, overlap
        self._piece = np.random.default_rng(1).integers(0, 256, (1 << 20, BLOCK_BYTES), np.uint8)
        self._file: memoryview | None = None

    def seconds(self, queue: Callable[[], object], wait: Callable[[], object]) -> float:
        """Seconds of one run: the median over blocks of runs, each long enough to be timed, with one wait at its
        end."""

        def block(n: int) -> float:
            start = time.perf_counter()
            for _ in range(n):
                queue()
            wait()
            return (time.perf_counter() - start) / n

        block(1)
        n = 1 if not self.scale.least else max(1, round(self.scale.least / max(block(1), 1e-6)))
        if n > 1:
            n = max(1, round(self.scale.least / max(block(min(n, 20)), 1e-7)))
        return median(block(n) for _ in range(self.scale.blocks))

    @contextmanager
    def memory(self, *sizes: int) -> Iterator[tuple[Stream, list[int]]]:
        """A stream, and addresses of memory of these sizes, full of random bytes that are finite f16."""
        with ExitStack() as undo:
            held = []
            stream = self.device.stream()
            for size in sizes:
                memory = self.device.alloc(size)
                undo.callback(memory.free)
                held.append(memory)
                noise = (np.random.default_rng(2).standard_normal(1 << 20).astype(np.float16) / 8).view(np.uint8)
                for start in range(0, size, noise.size):
                    stream.copy_in(memory.ptr + start, noise[: size - start])
            stream.synchronize()
            yield stream, [memory.ptr for memory in held]

    # -- of the device ---------------------------------------------------------------------

    def copy_rate(self) -> float:
        """Bytes read and written by copies within the device."""
        n = min(self.scale.copied, self.device.memory()[0] // 3)
        with self.memory(n, n) as (stream, (a, b)):
            return 2 * n / self.seconds(lambda: stream.copy(b, a, n), stream.synchronize)

    def pinned_rate(self) -> float:
        """Bytes copied to the device from pinned memory."""
        n = self.scale.pinned
        host = self.device.pinned(n)
        host[:] = 7
        with self.memory(n) as (stream, (to,)):
            return n / self.seconds(lambda: stream.copy_in(to, host), stream.synchronize)

    def gemm_rate(self) -> float:
        """Multiplications and additions of the library's product of two square f16 matrices, summed in f32."""
        blas, n = self.device.blas(), self.scale.gemm
        if blas is None:
            raise Missing("no cuBLAS: `pip install 'cupy-cuda13x[ctk]'` (or `cupy-cuda12x[ctk]`) brings it")
        with self.memory(2 * n * n, 2 * n * n, 4 * n * n) as (stream, (a, b, c)):
            return 2 * n**3 / self.seconds(lambda: blas.gemm(stream, n, n, n, a, n, b, n, c, n), stream.synchronize)

    # -- of the kernels --------------------------------------------------------------------

    def blocks(self, rows: int, k: int) -> np.ndarray:
        """The bytes of random q4_0 weights, scaled so that a product's values are as large as its activations."""
        n = rows * k // BLOCK_SIZE
        piece = self._piece.copy()
        piece[:, :2] = np.array([1 / (LEVELS * sqrt(k))], np.float16).view(np.uint8)
        return np.resize(piece, (n, BLOCK_BYTES)).reshape(-1)

    def matvec_rate(self, rows: int, k: int, gated: bool = False) -> float:
        """Bytes of weights that one column is multiplied with; `gated`: two products and their unit, fused."""
        data = self.blocks(rows, k)
        n = max(2, self.scale.weights // data.size // 2 * 2)
        store, ctx = gs.Context("weights"), gs.Context("products")
        with Counting(self.device, overlap=self.overlap) as backend, gs.Scheduler([backend]) as sched:
            weights = [store.tensor("q4_0", (k, rows), f"w{i}") for i in range(n)]
            with backend.alloc_tensors(store):
                for w in weights:
                    backend.set_tensor(w, data)
                x = ctx.tensor("f32", (k,), "x", input=True)
                column = ctx.scale(x, 1.0)      # computed: it is rounded to 8 bits once
                products = [ctx.mul_mat(w, column) for w in weights]
                if gated:
                    products = [ctx.swiglu_split(a, b) for a, b in zip(products[::2], products[1::2], strict=True)]
                graph = gs.Graph(*map(ctx.set_output, products))
                sched.alloc(graph)
                for _ in range(3):
                    x.set(np.random.default_rng(3).standard_normal(k).astype(np.float32))
                    sched.compute(graph)
                if len(backend.last) > len(products) + 3:
                    raise RuntimeError(f"{len(backend.last)} launches for {len(products)} products: nothing was fused")
                return n * data.size / self.seconds(backend.replay(), backend.stream.synchronize)

    # -- of a model ------------------------------------------------------------------------

    def file(self) -> memoryview:
        """A GGUF file of a Llama."""
        if self._file is None:
            s = self.scale
            d, ff, kind = s.n_embd, s.n_ff, gs.Type.Q4_0
            data = {k: self.blocks(max(d, ff), k) for k in {d, ff}}

            def matrix(rows: int, k: int) -> tuple:
                return kind, (k, rows), data[k][: rows * k // BLOCK_SIZE * BLOCK_BYTES]

            big = (kind, (d, s.n_vocab), self.blocks(s.n_vocab, d))
            ones = np.ones(d, np.float32)
            tensors: dict[str, object] = {"token_embd.weight": big, "output_norm.weight": ones, "output.weight": big}
            for i in range(s.n_layer):
                blk = f"blk.{i}."
                tensors |= {f"{blk}{name}.weight": ones for name in ("attn_norm", "ffn_norm")}
                tensors |= {f"{blk}attn_{name}.weight": matrix(d, d) for name in ("q", "k", "v", "output")}
                tensors |= {f"{blk}ffn_gate.weight": matrix(ff, d), f"{blk}ffn_up.weight": matrix(ff, d),
                            f"{blk}ffn_down.weight": matrix(d, ff)}
            out = io.BytesIO()
            write_gguf(out, {
                "general.architecture": "llama", "tokenizer.ggml.model": "no_vocab", "llama.vocab_size": s.n_vocab,
                "llama.context_length": s.long, "llama.embedding_length": d, "llama.block_count": s.n_layer,
                "llama.feed_forward_length": ff, "llama.attention.head_count": s.n_head,
                "llama.attention.head_count_kv": s.n_head, "llama.rope.dimension_count": d // s.n_head,
                "llama.attention.layer_norm_rms_epsilon": 1e-5}, tensors)
            self._file = out.getbuffer()
        return self._file

    @contextmanager
    def model(self, rows: int, flash: bool, capture: bool = True) -> Iterator[tuple[Model, Counting, float]]:
        """A model with so many rows of cache, its backend, and the rate at which its weights came to the device."""
        times: list[tuple[float, int]] = []

        def progress(done: int, total: int) -> None:
            if done == total:
                backend.synchronize()
            times.append((time.perf_counter(), done))

        with Counting(self.device, capture=capture, overlap=self.overlap) as backend, load(
                self.file(), [backend], rows, kv_type="f16", flash=flash, progress=progress) as model:
            (start, _), (end, done) = times[0], times[-1]
            yield model, backend, done / max(end - start, 1e-9)

    def fill(self, model: Model, rows: int) -> int:
        """Fill a text's cache to `rows` rows; returns the length to which timed tokens are truncated."""
        n = max(1, rows - self.scale.filled)
        model.reset()
        model.eval(np.arange(n) % self.scale.n_vocab, last_only=True)
        return n

    def token_seconds(self, model: Model, rows: int) -> float:
        """Seconds of one step of `generate`, with `rows` rows in the cache."""
        n = self.fill(model, rows)
        ids = model.generate([1], ignore_eos=True)

        def step() -> None:
            if model.n_past > rows - 2:
                model.truncate(n)
            next(ids)

        for _ in range(3):
            step()
        return self.seconds(step, lambda: None)

    def prompt_seconds(self, model: Model) -> float:
        """Seconds of a prompt in an empty sequence, to the logits of its last token."""
        tokens = np.arange(self.scale.prompt) % self.scale.n_vocab

        def step() -> None:
            model.reset()
            model.eval(tokens, last_only=True)

        return self.seconds(step, lambda: None)

    def captures(self, model: Model, backend: Counting) -> tuple[int, int]:
        """Captures while a text grows from nothing by `tokens` tokens, and while a second text does so afterwards."""
        found = []
        for _ in range(2):
            model.reset()
            before = backend.captures
            ids = model.generate([1], ignore_eos=True)
            for _ in range(self.scale.tokens):
                next(ids)
            found.append(backend.captures - before)
        return found[0], found[1]
