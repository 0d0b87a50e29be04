"""What llama.cpp allocates on imitated devices, and what a dry run predicts, buffer by buffer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from processes import preloading, run_python

import ggml_sched

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = str(Path(ggml_sched.__file__).resolve().parents[1])
"""The folder that the package was imported from: that of its sources, or of an environment."""
MODES = {"stock": "off", "alloc": "alloc", "sched": "sched"}
"""Of bench/hooked/allocated.py: the levels of a dry run."""


def allocated(folder: Path, mode: str, path: Path, libraries: dict[str, str], ways: Sequence[dict],
              devices: Sequence[tuple[str, int]] = (), pipeline: bool = False) -> list[list[list]]:
    """For each way the buffers that llama.cpp holds: [type, what for, bytes], sorted."""
    job = folder / f"{mode}.json"
    job.write_text(json.dumps({"mode": mode, "path": str(path), "libraries": libraries, "devices": devices,
                               "pipeline": pipeline, "ways": ways}))
    done = run_python(str(ROOT / "bench/hooked/allocated.py"), str(job), timeout=300, GGML_SCHED="off",
                      LD_PRELOAD=preloading(libraries["holes"]),
                      PYTHONPATH=os.pathsep.join(filter(None, [PACKAGES, *sys.path])))
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row.get("failed") for row in rows] == [None] * len(ways)
    return [sorted(row["buffers"]) for row in rows]


def predicted(run, mode: str) -> list[list]:
    """The same of a dry run."""
    return sorted([piece.buffer, piece.kind if piece.kind in ("weights", "compute") else "other", piece.nbytes]
                  for piece in (*run.pieces, *run.compute[MODES[mode]]) if piece.nbytes)
