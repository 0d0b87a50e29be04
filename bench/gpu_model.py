"""About how long a token takes on a GPU that is not there: a small model of time over the launches of a plan.

    python bench/gpu_model.py [MODEL ...] [--device NAME ...] [--rows N] [--tokens N] [--overlap]

For each launch the model adds what passes before it starts (`gap`), a chain of accesses to memory that wait for each
other, and its bytes at the rate that the device gives for as many bytes in flight as its blocks have; or its operations
at the rate of tensor cores, if that is longer.  The blocks that are left over after whole waves have fewer bytes in
flight.  Counts of launches, bytes and operations are exact (gpu_launches.py).  Times are estimates, marked ~: no GPU
was there to compare them with, and what is published fixes three of the model's numbers, the rate of large reads, the
time that each launch adds, and what tiles reach of the tensor cores' rate; see `PUBLISHED`.  Products of two to eight
columns are taken to wait for memory alone, which is too fast: llama.cpp takes 1.3 times as long for two on an RTX 3090,
and 2.4 times for eight.  `bench/gpu.py` measures what this page predicts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import gpu_launches
from gpu_launches import Launched, family

from ggml_sched.backends.cupy.ops import library
from ggml_sched.planning.tables import markdown

__all__ = ["DEVICES", "MORE_LAUNCHES", "PUBLISHED", "TARGETS", "GPU", "dense_share", "each", "needed_of_tiles", "rate",
           "seconds", "share", "token"]


@dataclass(frozen=True)
class GPU:
    """A device.  `rate`: bytes a second of its memory, by its data sheet; `large`: the share of that which large reads
    reach; `latency`: seconds of a read under load; `gap`: seconds between two launches of a graph that depend on each
    other; `tensor`: operations a second of its tensor cores with 8-bit integers, without sparsity, and `half`: with f16
    and sums in f32; `single`: of its other units in f32; `overlaps`: launches may overlap."""

    n_multiprocessors: int
    warps: int
    rate: float
    large: float
    latency: float
    gap: float
    tensor: float
    half: float
    single: float
    overlaps: bool = False

    @property
    def copies(self) -> float:
        """Bytes a second that copies within the device read and write."""
        return self.rate * self.large


DEVICES = {
    "H200": GPU(132, 64, 4.8e12, 0.90, 0.75e-6, 1.0e-6, 1979e12, 989e12, 67e12, overlaps=True),
    "A100": GPU(108, 64, 2.039e12, 0.90, 0.65e-6, 1.2e-6, 624e12, 312e12, 19.5e12),
    "4090": GPU(128, 48, 1.008e12, 0.92, 0.60e-6, 1.0e-6, 661e12, 165e12, 82.6e12),
    "3090": GPU(82, 48, 0.936e12, 0.92, 0.60e-6, 1.1e-6, 284e12, 71e12, 35.6e12),
    "3060": GPU(28, 48, 0.36e12, 0.92, 0.60e-6, 1.2e-6, 102e12, 25.5e12, 12.7e12),
}
"""Multiprocessors, rates of memory and of operations are NVIDIA's (H200 SXM, A100 SXM 80 GB, RTX 4090, RTX 3090, RTX
3060 of 12 GB: data sheets and architecture papers).  Reads of global memory take some 500 cycles on idle devices of
these generations ("Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", arXiv 2402.13499); about twice as
long under load is assumed.  `large`: copies of 4.3 TB/s were seen on an H200; those of the other devices, and all of
`gap`, are assumed, so that PUBLISHED is met within a tenth."""

PUBLISHED = {
    # A token behind 32,768 others: ggml-org/llama.cpp, pull requests 17505 and 17891.
    ("llama-3-8b", "4090", 32768, 1): 102.8,
    ("llama-2-7b", "3090", 32768, 1): 40.0,
    # 512 tokens, alone and behind 32,768 others: pull requests 7676 and 17505.
    ("llama-3-8b", "4090", 512, 512): 10359,
    ("llama-3-8b", "3090", 32768, 512): 1448,
}
"""{model, device, rows, tokens of a graph: tokens a second} by llama.cpp, of q4_0 weights: it has the same weights and
caches to read, and as many operations."""

MORE_LAUNCHES = {
    # 512 tokens, one by one: pull request 15802.
    ("llama-3-8b", "3090", 256, 1): 156.6,
}
"""The same where the launches count, of which llama.cpp had more than twice as many: the model is to be faster."""

TARGETS = {"H200": 0.6, "A100": 0.75, "4090": 0.8}
"""The share of the copies' rate that a token of llama-2-7b shall reach at 256 rows."""

CHAINS = {"matvec": 2, "mma": 3, "matmul": 3, "norm_rows": 3, "turn_heads": 3, "attention": 5, "attention_mma": 7,
          "choose_experts": 8, "weighted_sum": 2}
"""Accesses to memory, barriers between warps and the like that wait for each other, in times of the latency."""
GOES_ON = 3
"""The same where a block goes on with what others have written: until that is seen, counted, and loaded."""
BLOCKS = {"matvec": 4, "matvec_plain.packed_q4_0_1": 6, "attention": 4, "attention_mma": 2, "mma": 2, "matmul": 2}
"""Blocks that fit on a multiprocessor by their launch bounds; others are bounded by its warps."""
IN_FLIGHT = {"attention": 4 * 16 * 32, "norm_rows": 3 * 8 * 4 * 32, "mma": 4096,
             "matmul": 4096}
"""Bytes that a warp has asked for and waits for, where the launch does not say: of a norm all elements of three rows.
"""
USUAL = 16 * 32
"""The same for other kernels."""
EARLY = 0.5
"""The share of the gap that is left where launches overlap, and of the memory's idle time that weights are asked for
in: assumed."""
CACHED = 2.0
"""How much faster than from memory weights are read from the cache that all multiprocessors share: assumed."""
TILES = 0.25
"""The share of the rate of 8-bit integers that tiles reach: that of llama.cpp's, by PUBLISHED."""
DENSE = 0.5
"""The share of the rate of operations that attention reaches, and tiles without tensor cores: assumed, and met by
PUBLISHED on an RTX 3090."""
LIBRARY = 0.75
"""The share that cuBLAS reaches of that of f16, which is half of that of 8-bit integers: assumed."""


def dense(launch: Launched, gpu: GPU) -> float:
    """Seconds that the operations of a launch take at least; 0 for those that wait for memory in any case."""
    module = launch.kernel.partition(".")[0]
    rate = {"mma": gpu.tensor * TILES, "attention_mma": gpu.half * DENSE, "attention": gpu.single * DENSE,
            "matmul": gpu.single * DENSE}
    found = next((of for name, of in rate.items() if module.startswith(name)), 0.0)
    busy = min(1.0, launch.blocks / gpu.n_multiprocessors)
    return launch.operations / (found * busy) if found else 0.0


def seconds(launch: Launched, gpu: GPU, early: bool = False, ahead: float = 0.0) -> float:
    """Of one launch, with the gap before it.  `early`: it has begun when the launch before it ends; `ahead`: bytes that
    it has read until then."""
    name = "attention_mma" if launch.kernel.startswith("attention_mma") else family(launch.kernel)
    warps = max(1, launch.threads // 32)
    held = BLOCKS.get(launch.kernel, BLOCKS.get(name, 1 << 30))
    slots = gpu.n_multiprocessors * min(held, max(1, gpu.warps // warps))
    each = (launch.asked or IN_FLIGHT.get(name, USUAL)) * warps
    read = launch.read - ahead
    n = read + launch.written

    def time(bytes: float, blocks: int) -> float:
        """Of bytes that are read by blocks that run at once."""
        return bytes / min(gpu.copies, blocks * each / gpu.latency)

    whole, rest = divmod(launch.blocks, slots)
    reading = ahead / (CACHED * gpu.copies) + time(read * whole * slots / launch.blocks, slots)
    if rest:
        # Behind whole waves the rest begins one by one as blocks end, so that it costs a latency at most.
        last = time(read * rest / launch.blocks, rest)
        reading += min(last, read * rest / launch.blocks / gpu.copies + gpu.latency) if whole else last
    chain = (CHAINS.get(name, 2) + GOES_ON * launch.goes_on) * gpu.latency / 2
    return gpu.gap * (EARLY if early else 1.0) + chain + max(reading, n / gpu.copies, dense(launch, gpu))


def each(launches: Sequence[Launched], gpu: GPU, overlap: bool = False) -> list[float]:
    """Seconds of each launch.  With `overlap` it begins before the one before it ends, and asks for weights in the time
    in which the memory has little to do, half of which is counted."""
    found, idle = [], 0.0
    for i, launch in enumerate(launches):
        early = overlap and gpu.overlaps and i > 0
        found.append(seconds(launch, gpu, early, min(launch.ahead, EARLY * idle) if early else 0.0))
        idle = max(0.0, found[-1] * gpu.copies - launch.read - launch.written)
    return found


def token(launches: Sequence[Launched], gpu: GPU, overlap: bool = False) -> float:
    """Seconds of all launches."""
    return sum(each(launches, gpu, overlap))


def share(launches: Sequence[Launched], gpu: GPU, overlap: bool = False) -> float:
    """Of the rate of copies: the bytes that are read, by the time."""
    return sum(launch.read for launch in launches) / gpu.copies / token(launches, gpu, overlap)


def dense_share(launches: Sequence[Launched], gpu: GPU, overlap: bool = False) -> float:
    """Of the tensor cores' rate with 8-bit integers: the operations, by the time."""
    return sum(launch.operations for launch in launches) / gpu.tensor / token(launches, gpu, overlap)


def needed_of_tiles(gpu: GPU, columns: int, rows: int = 4096, k: int = 4096) -> float:
    """The share of the tensor cores' rate from which on tiles take less time than the library for q4_0 weights and so
    many columns: the library needs three launches, of which one decodes the weights to f16, and multiplies at half the
    rate of 8-bit integers."""
    operations, weights = 2 * rows * k * columns, rows * k * 18 // 32
    decoding = (weights + 2 * rows * k) / gpu.copies
    product = max(2 * rows * k / gpu.copies, operations / (gpu.tensor / 2 * LIBRARY))
    other = 3 * (gpu.gap + gpu.latency) + decoding + product
    return operations / (gpu.tensor * (other - gpu.gap - CHAINS["mma"] * gpu.latency / 2))


def rate(model: str, device: str, rows: int, n_tokens: int) -> float:
    """Tokens a second of graphs of so many tokens, the last of a cache of so many rows."""
    gpu = DEVICES[device]
    graph = gpu_launches.graph_of(model, rows, n_tokens)
    return n_tokens / token(gpu_launches.launched(graph, gpu.n_multiprocessors), gpu)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["llama-2-7b"],
                        help=f"of {', '.join(gpu_launches.MODELS)} (default: llama-2-7b)")
    parser.add_argument("--device", action="append", choices=DEVICES, help="default: all")
    parser.add_argument("--rows", type=int, default=256, help="rows of the cache (default 256)")
    parser.add_argument("--tokens", type=int, default=1, help="tokens of the graph (default 1)")
    parser.add_argument("--overlap", action="store_true", help="launches overlap, where a device can")
    options = parser.parse_args(arguments)
    for model in options.models:
        for name in options.device or DEVICES:
            gpu = DEVICES[name]
            found = gpu_launches.launched(gpu_launches.graph_of(model, options.rows, options.tokens),
                                          gpu.n_multiprocessors)
            times, rows = each(found, gpu, options.overlap), []
            total = sum(times)
            for kernel in dict.fromkeys(family(launch.kernel) for launch in found):
                of_kernel = [(launch, time) for launch, time in zip(found, times, strict=True)
                             if family(launch.kernel) == kernel]
                those, time = [launch for launch, _ in of_kernel], sum(time for _, time in of_kernel)
                rows.append([kernel, len(those), f"{sum(x.read + x.written for x in those) / 1e6:,.1f}",
                             f"{sum(x.operations for x in those) / 1e9:,.1f}", f"~{time * 1e6:,.0f}",
                             f"{time / total:.0%}",
                             f"{sum(launch.read for launch in those) / gpu.copies / time:.2f}"])
            print(f"{model} on {name}, {options.tokens} token{'s' * (options.tokens > 1)} at {options.rows} rows: "
                  f"{len(found)} launches, ~{total * 1e3:.2f} ms, ~{options.tokens / total:,.0f} tokens/s, "
                  f"~{share(found, gpu, options.overlap):.2f} of the rate of copies, "
                  f"~{dense_share(found, gpu, options.overlap):.2f} of the tensor cores' rate\n")
            print(markdown(["kernel", "launches", "MB", "Gop", "us", "of the time", "of the rate"], rows), end="\n\n")
    for (model, name, depth, n_tokens), published in (PUBLISHED | MORE_LAUNCHES).items():
        print(f"{model} on {name}, {n_tokens} token{'s' * (n_tokens > 1)} at {depth} rows: "
              f"~{rate(model, name, depth, n_tokens):,.0f} tokens/s; llama.cpp's published rate is {published:,}")
    shares = ", ".join(f"{needed_of_tiles(DEVICES[name], library.MANY_QUANTISED):.2f} on {name}"
                       for name in options.device or DEVICES)
    print(f"At {library.MANY_QUANTISED} columns tiles take less time than the library where they reach this share of "
          f"the tensor cores' rate: ~{shares}; assumed are {TILES}.")
    print("\nTimes are estimates: none was measured.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
