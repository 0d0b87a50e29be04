"""What the CUDA backend launches for a token, counted without a GPU: kernels, the bytes that they read and write, and
the host's calls.

    python bench/gpu_launches.py [MODEL ...] [--rows N]

The backend plans the graph on an emulated device without memory, which runs nothing: the plan has the launches that a
GPU gets.  Owns the counting.  Bytes are those of device memory that a launch needs at least: what several blocks read
counts once, and data that fits into a cache of the device counts as well.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import placement_models
import samples

import ggml_sched as gs
from ggml_sched.backends.cupy.launch import Launch
from ggml_sched.backends.cupy.ops.matrix import PRODUCT_AT
from ggml_sched.backends.cupy.plan import DevicePlan
from ggml_sched.backends.cupy.regions import Region
from ggml_sched.planning.tables import markdown

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from cuda_emulator import EmulatedDevice  # noqa: E402

__all__ = ["MODELS", "HostCalls", "Launched", "family", "graph_of", "host_calls", "launched"]

MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama-2-7b": ("llama", {
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 32000, "context_length": 4096, "embedding_length": 4096,
        "block_count": 32, "feed_forward_length": 11008, "attention.head_count": 32, "attention.head_count_kv": 32,
        "rope.dimension_count": 128}),
    "llama-3-8b": ("llama", {
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 128256, "context_length": 8192,
        "embedding_length": 4096, "block_count": 32, "feed_forward_length": 14336, "attention.head_count": 32,
        "attention.head_count_kv": 8, "rope.dimension_count": 128, "rope.freq_base": 5e5}),
    "qwen3moe-30b": ("qwen3moe", placement_models.SIZES["30B of 128 experts"][3]),
}
"""{model: architecture and metadata, as the models' makers published them}; matrices are q4_0."""


class Launched(NamedTuple):
    """One launch: its kernel, "module.function", blocks, threads of a block, and bytes read and written.

    `operations`: multiplications and additions of matrix products and of attention, 0 of others; `ahead`: bytes of
    weights and caches that its blocks ask for before the launches before it have ended, where launches overlap;
    `asked`: bytes that a warp waits for at once, 0 where that is not known; `goes_on`: the block that ends last of some
    goes on with what the others have written.
    """

    kernel: str
    blocks: int
    threads: int
    read: int
    written: int
    operations: int = 0
    ahead: int = 0
    asked: int = 0
    goes_on: bool = False


class HostCalls(NamedTuple):
    """The host's calls on the device for a token of a captured graph."""

    launches: int
    graph_launches: int
    copies_in: int
    copies_out: int
    waits: int


class Kept(gs.CupyBackend):
    """A backend that keeps the last plan that ran."""

    last: DevicePlan | None = None

    def graph_plan_compute(self, plan: DevicePlan) -> None:
        super().graph_plan_compute(plan)
        self.last = plan


Source = Callable[[gs.Backend], gs.Graph]
"""Makes a graph whose weights and caches are on a backend."""


def graph_of(model: str, rows: int, n_tokens: int = 1) -> Source:
    """The runner's graph of `n_tokens` tokens, with flash attention over `rows` rows of an f16 cache."""
    arch, metadata = MODELS[model]
    return lambda backend: placement_models.graphs_on(backend, arch, metadata, rows, True, (n_tokens,))[0]


def recorded(name: str) -> Source:
    """A recorded graph of llama.cpp, of tests/data."""
    return lambda backend: gs.load_graph(samples.DATA / "graphs" / f"{name}.json.gz", place=lambda t: backend)


@contextmanager
def _planned(make: Source, n_multiprocessors: int) -> Iterator[tuple[gs.Scheduler, gs.Graph, Kept]]:
    device = EmulatedDevice(dry=True, memory=1 << 42)
    device.n_multiprocessors = n_multiprocessors
    with Kept(device, name="CUDA0") as backend, gs.Scheduler([backend]) as sched:
        graph = make(backend)
        sched.alloc(graph)
        sched.compute(graph, zero=True)
        yield sched, graph, backend


def launched(make: Source, n_multiprocessors: int = 132) -> list[Launched]:
    """The launches of a graph whose nodes are all on one device, in order."""
    with _planned(make, n_multiprocessors) as (_, _, backend):
        if backend.last is None:
            raise RuntimeError("nothing was computed")
        return [_launched(launch) for launch in backend.last.launches]


def host_calls(make: Source) -> HostCalls:
    """What the host calls for each token, once the graph is captured: as many tokens give as many times these."""
    with _planned(make, 132) as (sched, graph, backend):
        inputs = [t for t in graph.tensors if "input" in t.flags]
        output = graph.nodes[-1]

        def token() -> None:
            for t in inputs:
                t.set(np.zeros(t.ne[::-1], {"i32": np.int32, "i64": np.int64, "f16": np.float16}.get(
                    str(t.type), np.float32)))
            sched.compute(graph, zero=True)
            backend.get_tensor_async(output, memoryview(bytearray(output.nbytes)))
            backend.synchronize()

        for _ in range(3):
            token()
        before = asdict(backend.device.counts)
        for _ in range(10):
            token()
        after = asdict(backend.device.counts)
        return HostCalls(*((after[name] - before[name]) // 10 for name in HostCalls._fields))


# -- bytes ----------------------------------------------------------------------------------------


def _launched(launch: Launch) -> Launched:
    how = next((found for name, found in READ.items() if launch.kernel.startswith(name)), _views)
    read, written = how(launch)
    operations = _operations(launch) if how is _matvec else _scores(launch) if how is _attention else 0
    ahead, asked = (_ahead(launch), _asked(launch)) if launch.kernel.startswith("matvec") else (0, 0)
    if launch.kernel.startswith("attention"):
        ahead = _cells_ahead(launch)
        asked = _cells_asked(launch)
    goes_on = launch.kernel.startswith("matvec") and not _is_null(launch.args[PRODUCT_AT["rounded"]])
    return Launched(launch.kernel, prod(launch.grid), prod(launch.block), int(read), int(written), operations, ahead,
                    asked, goes_on)


def _size(view: Region | np.ndarray) -> int:
    """Bytes of the elements of a view; a view that repeats a row counts it once."""
    if isinstance(view, Region):
        ne, nb = view.ne, view.nb
    else:
        ne, nb = view["ne"].ravel().tolist(), view["nb"].ravel().tolist()
    n = 1
    for extent, stride in zip(ne, nb, strict=True):
        n *= extent if stride or extent == 1 else 1
    return n * nb[0]


def _views(launch: Launch) -> tuple[int, int]:
    """The last view is written, the others are read."""
    views = [arg for arg in launch.args if isinstance(arg, Region)]
    if not views:
        return 0, 0
    distinct = {view.address: view for view in views[:-1] if view.address != views[-1].address}
    return sum(map(_size, distinct.values())), _size(views[-1])


def _rows_of_a_table(launch: Launch) -> tuple[int, int]:
    """get_rows: as many bytes as it writes, at most; of set_rows: as many as it reads."""
    views = [arg for arg in launch.args if isinstance(arg, Region)]
    if launch.kernel == "rows.get_rows" or launch.kernel.startswith("packed_rows"):
        return _size(views[2]) + _size(views[1]), _size(views[2])
    if launch.kernel == "rows.claim_rows":
        return _size(views[1]), 4 * int(launch.args[3])
    return _size(views[0]) + _size(views[1]), _size(views[0])


def _norm(launch: Launch) -> tuple[int, int]:
    read, written = _views(launch)
    return read, written + _rounded(launch.args[6], written // 4)


def _is_null(address: object) -> bool:
    return isinstance(address, np.generic) and not address


def _rounded(address: object, n: int) -> int:
    """Bytes of n elements rounded to 8 bits and their scales, unless the address is null."""
    return 0 if _is_null(address) else n + n // 2


def _quantize(launch: Launch) -> tuple[int, int]:
    n = 4 * int(launch.args[3])
    return 4 * n, n + n // 2


def _matvec(launch: Launch) -> tuple[int, int]:
    p = launch.args[0][0]
    k, columns, matrices = int(p["k"]), int(p["columns"]), int(p["matrices"])
    both = 2 if launch.args[2] else 1
    # With experts each pair may read another one; without, matrices of a batch that share weights count them once.
    distinct = matrices if p["n_experts"] else matrices // max(1, int(p["r2"]) * int(p["r3"]))
    parts = [(int(p["rows"]), int(p["w"][0]), int(p["d"][0]))]
    parts += [(int(more["rows"]), int(more["w1"]), int(more["d1"])) for more in p["more"] if more["first"]]
    weights = sum(rows * _row_bytes(launch.kernel, k, w1) for rows, w1, _ in parts) * both * distinct
    n = k * columns * (1 if p["n_experts"] and p["n_slots"] == 1 else matrices)
    x = 4 * n if isinstance(launch.args[4], np.generic) else n + n // 2     # no scales: f32
    out = sum(rows for rows, _, _ in parts) * columns * matrices
    if not launch.kernel.startswith("matvec"):
        return weights + x, 4 * out
    norm = launch.args[PRODUCT_AT["norm"]][0]
    n, squares = int(norm["n"]), int(norm["n"]) // 32
    # A norm behind the product: reads the other summand and factors, writes the sum and squares; before it: the rest.
    read, written = {0: (0, 0), 1: (2 * n, squares + n * bool(norm["kept"])),
                     2: (squares + (2 + bool(norm["y"])) * n * bool(norm["out"]), n * bool(norm["out"]))}[norm["role"]]
    rounded = _rounded(launch.args[PRODUCT_AT["rounded"]], out)
    return weights + x + 4 * read, 4 * out + rounded + 4 * written


AHEAD = 16 * 128
"""Bytes of each row of weights that matvec.cuh asks for ahead."""


def _ahead(launch: Launch) -> int:
    p = launch.args[0][0]
    if not isinstance(launch.args[5], np.generic) or p["matrices"] > 1:      # experts; matrices share weights
        return 0
    each = min(AHEAD, _row_bytes(launch.kernel, int(p["k"]), int(p["w"][0])))
    rows = int(p["rows"]) * (2 if launch.args[2] else 1) + sum(int(more["rows"]) for more in p["more"])
    return rows * each


def _cells_ahead(launch: Launch) -> int:
    """Of each split of the cells as many as a block has threads."""
    a = launch.args[0][0]
    cells = min(int(a["cells"]), launch.block[0] * int(a["shares"]))
    rows = ((int(a["d_k"]), gs.Type(int(a["k_kind"]))), (int(a["d_v"]), gs.Type(int(a["v_kind"]))))
    return cells * int(a["matrices"]) * sum(min(512, n // kind.block_size * kind.type_size) for n, kind in rows)


def _cells_asked(launch: Launch) -> int:
    """Of keys and values, as attention.cuh loads them from a cache in f16: of 16 keys up to 128 elements, or 64 for
    eight columns, then as many values as LOADS says; the mean of both, by the time that they take.  On tensor cores its
    share of a tile."""
    a, (module, _, kernel) = launch.args[0][0], launch.kernel.partition(".")
    if module == "attention_any":
        return 0
    size, columns = map(int, kernel.split("_")[1:])
    if module == "attention_mma":
        return 2 * int(a["d_k"]) * (8 if size == 512 or (size, columns) == (256, 64) else 16)
    loads = min(16, max(2, (32 if columns == 1 else 16) * 64 // size))
    keys = 2 * 16 * min(int(a["d_k"]), 64 if columns == 8 else 128)
    values = 2 * min(loads, int(a["chunk"])) * int(a["d_v"])
    return 2 * keys * values // (keys + values)


def _asked(launch: Launch) -> int:
    """Of both rows of a warp: of its part of k what its lanes load in two turns, or in one for several columns."""
    p = launch.args[0][0]
    k, columns = int(p["k"]), int(p["columns"])
    own = int(p["part"]) or k
    turn = 32 * (32 if p["w0"] != 4 and p["w0"] != 2 else 8)        # elements
    at_once = min(own, turn * (2 if columns == 1 else 1))
    return 2 * at_once * _row_bytes(launch.kernel, k, int(p["w"][0])) // k


def _operations(launch: Launch) -> int:
    p = launch.args[0][0]
    rows = int(p["rows"]) * (2 if launch.args[2] else 1) + sum(int(more["rows"]) for more in p["more"])
    return 2 * int(p["k"]) * rows * int(p["columns"]) * int(p["matrices"])


def _row_bytes(kernel: str, k: int, stride: int) -> int:
    """Bytes of a row of weights; `stride` from row to row, which is longer where a view has parts of rows."""
    name = kernel.partition(".")[2].removeprefix("packed_").removeprefix("exact_")
    kind = max((t for t in gs.Type if name.startswith(t.name.lower())), key=lambda t: len(t.name))
    return min(stride, k // kind.block_size * kind.type_size) if stride else 0


def _attention(launch: Launch) -> tuple[int, int]:
    a = launch.args[0][0]
    n_heads, batch = int(a["heads"]) * int(a["group"]), int(a["matrices"]) // int(a["heads"])
    columns = n_heads * int(a["rows"]) * batch
    caches = 0
    for width, kind in ((int(a["d_k"]), gs.Type(int(a["k_kind"]))), (int(a["d_v"]), gs.Type(int(a["v_kind"])))):
        caches += int(a["cells"]) * width // kind.block_size * kind.type_size * int(a["matrices"])
    splits = int(a["shares"])
    partial = 4 * splits * columns * (int(a["d_v"]) + 2) if splits > 1 else 0
    mask = int(a["cells"]) * int(a["rows"]) * 2 if launch.args[4] else 0
    out = columns * int(a["d_v"])
    return caches + mask + 4 * columns * int(a["d_k"]) + partial, 4 * out + partial + _rounded(launch.args[9], out)


def _scores(launch: Launch) -> int:
    """Of scores and of values, of the cells that columns see: with a mask as many as a causal one leaves, for the last
    rows of the cache."""
    a = launch.args[0][0]
    rows, cells = int(a["rows"]), int(a["cells"])
    seen = rows * cells - (rows * (rows - 1) // 2 if launch.args[4] and rows <= cells else 0)
    return 2 * seen * int(a["group"]) * int(a["matrices"]) * (int(a["d_k"]) + int(a["d_v"]))


def _turn_heads(launch: Launch) -> tuple[int, int]:
    read = written = 0
    for part in launch.args[:3]:
        if not part["heads"][0]:
            continue
        n = _size(part["a"])
        read += n
        written += n // 4 * gs.Type(int(part["kind"][0])).type_size
    return read, written


def _rope_set_rows(launch: Launch) -> tuple[int, int]:
    n = _size(launch.args[0])
    return n, n // 4 * gs.Type(int(launch.args[9])).type_size


READ: dict[str, Callable[[Launch], tuple[int, int]]] = {
    "matvec_": _matvec, "matmul_": _matvec, "mma_": _matvec, "attention": _attention, "norm.norm_rows": _norm,
    "activations.quantize": _quantize, "rows.": _rows_of_a_table, "packed_rows.": _rows_of_a_table,
    "rope.turn_heads": _turn_heads, "rope.rope_set_rows": _rope_set_rows}
"""{how a kernel's name begins: what gives the bytes that a launch reads and writes}; `_views` for the others."""


def family(kernel: str) -> str:
    """A kernel without its type of weights or size of heads."""
    module, _, function = kernel.partition(".")
    return module.partition("_")[0] if module.startswith(("matvec", "matmul", "mma", "attention")) else function


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--rows", type=int, default=256, help="rows of the cache (default 256)")
    options = parser.parse_args(arguments)
    for model in options.models:
        graph = graph_of(model, options.rows)
        found, calls = launched(graph), host_calls(graph)
        counts = Counter(family(launch.kernel) for launch in found)
        rows = [[name, str(n), f"{sum(x.read for x in found if family(x.kernel) == name) / 1e6:,.1f}",
                 f"{sum(x.written for x in found if family(x.kernel) == name) / 1e6:,.1f}"]
                for name, n in counts.most_common()]
        print(f"{model}, a token at {options.rows} rows: {len(found)} launches; the host's calls, captured: {calls}\n")
        print(markdown(["kernel", "launches", "MB read", "MB written"], rows), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
