"""A compute under way while buffers are closed, or a signal comes: it ends, and the backend works afterwards.

Each runs in a process of its own, which a mistake would end, or hang.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ggml_here
import pytest

BACKENDS = {"cpu": "gs.CpuBackend(2)", "numpy": "gs.CpuBackend(2, kernels='numpy')", "ggml": "ggml_here.backend(2)"}

CLOSED = """
import threading, time
ctx = gs.Context()
a, b = ctx.tensor("f32", (1024, 1024)), ctx.tensor("f32", (1024, 64))
c = ctx.mul_mat(a, b)
for _ in range(20):
    c = ctx.mul_mat(a, c)
graph = gs.Graph(c)
buffer = backend.alloc_tensors(ctx)
plan = backend.graph_plan_create(graph)
began = threading.Event()
def work(compute, what):
    began.set()
    try:
        compute(what)
    except gs.Error:
        pass
compute = (backend.graph_plan_compute, plan) if PLANNED else (backend.graph_compute, graph)
thread = threading.Thread(target=work, args=compute)
thread.start()
began.wait()
time.sleep(0.01)
buffer.close()
thread.join()
try:
    compute[0](compute[1])
except gs.Error:
    print("refused")
backend.close()
"""

SIGNALS = """
import random, signal, time
ctx = gs.Context()
graph = gs.Graph(ctx.neg(ctx.tensor("f32", (64,))))
buffer = backend.alloc_tensors(ctx)
plan = backend.graph_plan_create(graph)
class Hit(BaseException): pass
def hit(*_): raise Hit
signal.signal(signal.SIGALRM, hit)
end, hits = time.monotonic() + 2, 0
while time.monotonic() < end:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * 1e-4)
        while True:
            backend.graph_plan_compute(plan)
    except Hit:
        hits += 1
signal.setitimer(signal.ITIMER_REAL, 0)
backend.graph_plan_compute(plan)
backend.graph_compute(graph)
print("works" if hits > 100 else hits)
"""


def run(kind: str, code: str) -> str:
    if kind == "ggml" and not ggml_here.IS_HERE:
        pytest.skip(ggml_here.WHY_NOT)
    start = f"import sys; sys.path[:0] = {sys.path!r}\nimport ggml_sched as gs, ggml_here\nbackend = {BACKENDS[kind]}\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60,
                          cwd=Path(__file__).parent)
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr[-2000:])
    return done.stdout.strip()


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_buffer_closed_by_another_thread_keeps_its_memory_until_the_compute_ends(kind, planned):
    assert run(kind, f"PLANNED = {planned}\n{CLOSED}") == "refused"


@pytest.mark.parametrize("kind", BACKENDS)
def test_an_exception_out_of_a_signal_leaves_no_lock_behind(kind):
    assert run(kind, SIGNALS) == "works"
