"""Tables of ops in C: clang-format, which lays out the lines of a change, leaves a new row as it is written."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / ".clang-format").exists():
    pytest.skip("the working tree is needed", allow_module_level=True)

ROWS = [
    ("include/ggml_sched/ops.h", "    X(SUM_ROWS, 29, 0) "),
    ("ggml_sched/backends/cpu/kernels/op_rules.h", "        [GS_OP_SUM_ROWS] = ROWS(0), "),
    ("ggml_sched/backends/cpu/kernels/op_rules.h", "    case GS_OP_SUM_ROWS: case GS_OP_MEAN: return "),
    ("ggml_sched/backends/cpu/kernels/kernels.h", "    case GS_OP_SUM_ROWS: case GS_OP_MEAN: return "),
]
"""A file that a new op changes, and the beginning of a row of its table."""


@pytest.mark.skipif(shutil.which("clang-format") is None, reason="needs clang-format")
@pytest.mark.parametrize("path, row", ROWS)
def test_a_new_row_changes_no_other_line(path, row):
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines(keepends=True)
    (at,) = (k for k, line in enumerate(lines) if line.startswith(row))
    lines.insert(at, lines[at].replace("SUM_ROWS", "CUMSUM"))
    done = subprocess.run(["clang-format", f"--lines={at + 1}:{at + 1}", f"--assume-filename={ROOT / path}"],
                          input="".join(lines), capture_output=True, text=True, check=True)
    assert done.stdout == "".join(lines)
