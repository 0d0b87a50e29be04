"""Checks the CUDA backend's results on a GPU, and compares its speed with the GPU's limits: a page of Markdown.

    python bench/gpu.py [--device N] [--quick] > gpu.md

Needs this checkout with its extensions built, CuPy, and nothing else; ten minutes on an H200 with the kernels'
compilation, `--quick` about one.  Progress goes to stderr.  Speeds are ratios to measurements of the device in the same
run: its copies, its library's matrix products, its replays.  A part that fails is reported and the others go on; the
exit status is 1 where results were wrong or a part failed, not where a target was missed.  `--emulate` runs all of it,
tiny and untimed, on an emulated GPU.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import gpu_right
import gpu_speed
import numpy
from gpu_speed import Counting, Meter, Missing, Scale

import ggml_sched as gs
from ggml_sched.backends.cupy.device import Device, DeviceOutOfMemory
from ggml_sched.planning.tables import markdown

T = TypeVar("T")

TARGETS = {
    "mat-vec 32000 x 4096 / C": ("≥ 0.80", "0.90"),
    "gate + up 11008 x 4096, fused / C": ("≥ 0.75", "0.85"),
    "mat-vec 4096 x 4096 / C": ("≥ 0.45", "0.60"),
    "decode at 256 rows / C": ("≥ 0.60", "0.70"),
    "decode with flash attention at 256 rows / C": ("", ""),
    "decode with flash attention at 4,096 rows / C": ("≥ 0.55", "0.70"),
    "end to end / bare graph replays": ("≤ 1.08", "1.03"),
    "graph / eager decode time": ("≤ 0.35", ""),
    "prompt of 512 / own f16 GEMM rate": ("≥ 0.40", "0.50"),
    "captures per 256 tokens": ("≤ 1", ""),
    "captures in steady state": ("", "0"),
    "weights to the device / pinned copy": ("≥ 0.8", ""),
}
"""Target and stretch target of each row; C is the device's copy bandwidth."""

UNTIMED = "untimed"


class Run:
    """Results: `ratios` by the names of TARGETS, the measured `numbers`, `verdicts`, and parts that `failed`."""

    def __init__(self, device: Device, scale: Scale, timed: bool, minutes: float, overlap: bool = False) -> None:
        self.device, self.scale, self.timed, self.overlap = device, scale, timed, overlap
        self.meter = Meter(device, scale, overlap)
        self.total_memory = device.memory()[1]
        self.started = time.perf_counter()
        self.minutes = minutes
        self.ratios: dict[str, str] = {}
        self.numbers: list[tuple[str, str]] = []
        self.verdicts: list[tuple[str, str, str, str]] = []
        self.failed: list[str] = []
        self.missing: list[str] = []

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:6.1f} s] {text}", file=sys.stderr, flush=True)

    def part(self, name: str, work: Callable[[], T], is_needed: bool = False) -> T | None:
        """The result of a part, or None if it failed.  Parts that are not `needed` may lack time, memory, ..."""
        if not is_needed and time.perf_counter() - self.started > 60 * self.minutes:
            self.missing.append(f"{name}: {self.minutes:g} minutes are over")
            return None
        self.say(name)
        try:
            return work()
        except Exception as error:
            if not is_needed and isinstance(error, (Missing, gs.OutOfMemory, DeviceOutOfMemory)):
                self.missing.append(f"{name}: {error}")
                return None
            self.failed.append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        return None

    def ratio(self, name: str, value: float | None) -> None:
        if value is not None:
            self.ratios[name] = f"{value:.2f}" if self.timed else UNTIMED

    def number(self, name: str, value: float | None, unit: str, digits: int = 1) -> None:
        if value is not None:
            self.numbers.append((name, f"{value:,.{digits}f} {unit}" if self.timed else UNTIMED))

    def count(self, name: str, value: float) -> None:
        self.ratios[name] = f"{value:g}"

    # -- the parts ---------------------------------------------------------------------------

    def right(self, few: bool) -> None:
        def open_backend(**options) -> gs.CupyBackend:
            return gs.CupyBackend(self.device, overlap=self.overlap, **options)

        for check in gpu_right.checks(open_backend, few):
            distance = self.part(f"right or wrong: {check.name}", check.run, True)
            if distance is None:
                continue
            good = distance <= check.allowed
            self.verdicts.append((check.name, f"{distance:.1e}", f"{check.allowed:.0e}", "" if good else "WRONG"))
            if not good:
                self.failed.append(f"{check.name}: nmse {distance:.1e}, allowed are {check.allowed:.0e}")

    def speed(self) -> None:
        meter = self.meter
        copy = self.part("copies on the device", meter.copy_rate)
        self.number("C: copies on the device, read and written", copy and copy / 1e12, "TB/s", 2)
        pinned = self.part("copies from pinned memory", meter.pinned_rate)
        self.number("copies from pinned memory", pinned and pinned / 1e9, "GB/s")
        gemm = self.part("the library's matrix product", meter.gemm_rate)
        self.number(f"f16 GEMM, {self.scale.gemm}³", gemm and gemm / 1e12, "TFLOP/s", 0)
        wide, ff, vocab = self.scale.n_embd, self.scale.n_ff, self.scale.n_vocab
        for name, rows, gated in (("mat-vec 32000 x 4096 / C", vocab, False),
                                  ("gate + up 11008 x 4096, fused / C", ff, True),
                                  ("mat-vec 4096 x 4096 / C", wide, False)):
            rate = self.part(name, lambda rows=rows, gated=gated: meter.matvec_rate(rows, wide, gated))
            self.ratio(name, copy and rate and rate / copy)
        self.part("a model with flash attention", lambda: self.flash(copy, pinned, gemm))
        self.part("a model without", lambda: self.plain(copy))

    def against(self, name: str, rows: int, seconds: float | None, copy: float | None) -> None:
        """A decode rate in bytes per second, divided by the device's bandwidth."""
        if seconds is None:
            return
        self.number(name.partition(" / C")[0], 1 / seconds, "tokens/s")
        self.ratio(name, copy and self.scale.bytes_of_token(rows) / seconds / copy)

    def flash(self, copy: float | None, pinned: float | None, gemm: float | None) -> None:
        meter, s = self.meter, self.scale
        with meter.model(s.long, True) as (model, backend, loaded):
            self.number("weights to the device", loaded / 1e9, "GB/s")
            self.ratio("weights to the device / pinned copy", pinned and loaded / pinned)
            found = self.part("captures", lambda: meter.captures(model, backend))
            if found is not None:
                self.count("captures per 256 tokens", found[0] / max(1, -(-s.tokens // 256)))
                self.count("captures in steady state", found[1])
            prompt = self.part("a prompt", lambda: meter.prompt_seconds(model))
            if prompt is not None:
                inner = s.matrices - s.n_embd * s.n_vocab
                rate = 2 * (inner * s.prompt + s.n_embd * s.n_vocab) / prompt
                self.number("prompt", s.prompt / prompt, "tokens/s", 0)
                self.number("prompt, products with weights", rate / 1e12, "TFLOP/s")
                self.ratio("prompt of 512 / own f16 GEMM rate", gemm and rate / gemm)
            seconds = self.part("decode at 4,096 rows", lambda: meter.token_seconds(model, s.long))
            self.against("decode with flash attention at 4,096 rows / C", s.long, seconds, copy)
            seconds = self.part("decode at 256 rows", lambda: meter.token_seconds(model, s.short))
            self.against("decode with flash attention at 256 rows / C", s.short, seconds, copy)
            bare = seconds and self.part("bare replays", lambda: self.replays(backend))
            if seconds and bare:
                self.number("token: all that `generate` does", 1e3 * seconds, "ms", 3)
                self.number("token: bare replay of its graph", 1e3 * bare, "ms", 3)
                self.numbers.append(("token: launches in its graph", f"{len(backend.last):,}"))
                self.ratio("end to end / bare graph replays", seconds / bare)
        if seconds:
            eager = self.part("decode without graphs", self.eager)
            self.number("token: launched kernel by kernel", eager and 1e3 * eager, "ms", 3)
            self.ratio("graph / eager decode time", eager and seconds / eager)

    def replays(self, backend: Counting) -> float:
        return self.meter.seconds(backend.replay(), backend.stream.synchronize)

    def eager(self) -> float:
        with self.meter.model(self.scale.short, True, capture=False) as (model, _, _):
            return self.meter.token_seconds(model, self.scale.short)

    def plain(self, copy: float | None) -> None:
        with self.meter.model(self.scale.short, False) as (model, _, _):
            seconds = self.meter.token_seconds(model, self.scale.short)
        self.against("decode at 256 rows / C", self.scale.short, seconds, copy)

    # -- the page ------------------------------------------------------------------------------

    def page(self, versions: str) -> str:
        s = self.scale
        size = f"Llama of {s.n_layer} layers, {s.n_embd} wide, {s.n_vocab:,} tokens, random q4_0 weights"
        same = s == gpu_speed.FULL
        parts = [f"""# ggml-sched on {self.device.name}

Written by `python bench/gpu.py` in {time.perf_counter() - self.started:.0f} s: {versions}; {self.device.arch}, \
{self.device.n_multiprocessors} multiprocessors, {self.total_memory / 2**30:.0f} GiB\
{', launches overlap' if self.overlap else ''}.
{size}; {s.bytes_of_weights / 1e9:.3f} GB of weights that a token reads, and its rows of an f16 cache, which count.
Decoding is bytes a token x tokens/s.  C is the bandwidth of copies on the device, bytes read and written.\
{'' if same else f' **Smaller than the targets are for**: sizes in the names are those of the full run; here they are '
 f'{s.n_vocab} x {s.n_embd}, {s.n_ff} x {s.n_embd}, {s.n_embd} x {s.n_embd}, {s.short} and {s.long} rows, prompts of '
 f'{s.prompt}, {s.gemm}³.'}"""]
        wrong = "Nothing was wrong." if not self.failed else "**Something was wrong:**\n\n" + _listed(self.failed)
        parts.append(wrong)
        if self.missing:
            parts.append("Not measured:\n\n" + _listed(self.missing))
        rows = [(name, *aims, self.ratios.get(name, "not measured")) for name, aims in TARGETS.items()]
        parts.append("## Speed\n\n" + markdown(("ratio", "target", "stretch", "measured"), rows))
        parts.append(markdown(("number", "measured"), self.numbers))
        parts.append("## Right or wrong: nmse to the oracle\n\n"
                     + markdown(("check", "nmse", "allowed", ""), self.verdicts))
        return "\n\n".join(parts)


def _listed(lines: list[str]) -> str:
    return "\n".join("* " + " ".join(line.split()) for line in lines)


def opened(number: int, emulate: bool) -> tuple[Device, str]:
    """The device, and the versions of driver and libraries; raises BackendError that names what is missing."""
    versions = f"Python {platform.python_version()}, NumPy {numpy.__version__}, ggml-sched {gs.__version__}"
    if emulate:
        sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
        from cuda_emulator import EmulatedDevice

        return EmulatedDevice(), versions
    from ggml_sched.backends.cupy.real import open_device

    device = open_device(number)
    import cupy

    runtime, driver = device.runtime.runtimeGetVersion(), device.runtime.driverGetVersion()
    return device, f"{versions}, CuPy {cupy.__version__}, CUDA {runtime}, driver's CUDA {driver}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (0)")
    parser.add_argument("--quick", action="store_true", help="a small model and short blocks: about a minute")
    parser.add_argument("--emulate", action="store_true", help="tiny and untimed, on an emulated GPU")
    parser.add_argument("--overlap", action="store_true", help="launches overlap, from sm_90 on")
    parser.add_argument("--minutes", type=float, default=9.5, metavar="M", help="no part begins later (9.5)")
    args = parser.parse_args(arguments)
    try:
        device, versions = opened(args.device, args.emulate)
    except gs.BackendError as error:
        print(error, file=sys.stderr)
        return 1
    scale = gpu_speed.TINY if args.emulate else gpu_speed.QUICK if args.quick else gpu_speed.FULL
    if args.overlap and not device.can_overlap:
        print(f"{device.name} cannot overlap launches: it takes sm_90 and a driver for CUDA 12.3", file=sys.stderr)
        return 1
    run = Run(device, scale, not args.emulate, args.minutes, args.overlap)
    run.right(args.emulate)
    run.speed()
    run.part("closing the device", device.close, True)
    print(run.page(versions))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
