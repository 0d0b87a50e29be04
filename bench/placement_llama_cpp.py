"""Where llama.cpp's own fit puts a model's weights and caches, with its margin of 1 GiB on each device.

Needs the installed llama.cpp and the sources that it was built from: the fit is not part of its library.  A process of
its own imitates the devices (hooked/fitted.py); a dry run with what the fit chose says where each tensor is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import placement_models
from hooked import build
from hooked.allocated import folder as installed

import ggml_sched as gs

__all__ = ["llama_cpp_fit"]

HOOKED = Path(__file__).resolve().parent / "hooked"
MARGIN = 1 << 30


def llama_cpp_fit(name: str, given: Sequence[gs.Device], sources: Path) -> dict[str, int] | None:
    """{weight or cache: index of its device} for a model of `placement_models`; None: its fit finds nothing."""
    os.environ["GGML_SCHED"] = "off"
    from ggml_sched.llama_cpp import dry_run

    devices = [(f"HOST{d}", device.budget) for d, device in enumerate(given) if not device.host]
    libraries = build.build()
    settings = placement_models.settings(name)
    with tempfile.TemporaryDirectory() as scratch:
        path = placement_models.file_of(name, Path(scratch))
        job = Path(scratch, "job.json")
        job.write_text(json.dumps({"path": str(path), "library": build.build_fit(sources, Path(installed())),
                                   "libraries": libraries, "devices": devices, "settings": settings,
                                   "margin": MARGIN}))
        done = subprocess.run([sys.executable, str(HOOKED / "fitted.py"), str(job)], capture_output=True, text=True,
                              env=os.environ | {"LD_PRELOAD": libraries["holes"]})
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-300:]}")
        chosen = json.loads(done.stdout)
        if chosen is None:
            return None
        run = dry_run(path, devices=devices, **settings, **chosen)
    number = {device: d for d, (device, _) in enumerate(devices)}
    return {one.name: number.get(one.device, len(devices)) for one in run.residents}
