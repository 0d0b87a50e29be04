"""A compute under way while buffers are closed, or a signal comes: it ends, and the backend works afterwards.

Each runs in a process of its own, which a mistake would end, or hang.
"""

import gc
import sys
import threading
from pathlib import Path

import ggml_here
import pytest
from processes import run_python

from ggml_sched.threads.workers import Crew

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

HIT = """
import random, signal, time
class Hit(BaseException): pass
armed = False
def hit(*_):
    global armed
    was, armed = armed, False
    if was:
        raise Hit
signal.signal(signal.SIGALRM, hit)
"""
"""An exception that a timer raises once after `armed = True`."""

SIGNALS = HIT + """
ctx = gs.Context()
graph = gs.Graph(ctx.neg(ctx.tensor("f32", (SIZE,))))
buffer = backend.alloc_tensors(ctx)
plan = backend.graph_plan_create(graph)
backend.graph_plan_compute(plan)
end, hits = time.monotonic() + SECONDS, 0
while time.monotonic() < end:
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, random.random() * 1e-4, 0.05)     # again: Python may miss one
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
    start = (f"import faulthandler, sys\nsys.path[:0] = {sys.path!r}\n"
             "faulthandler.dump_traceback_later(40, exit=True)\n"
             f"import ggml_sched as gs, ggml_here\nbackend = {BACKENDS[kind]}\n")
    done = run_python("-c", start + code, timeout=60, cwd=Path(__file__).parent)
    assert not done.stderr
    return done.stdout.strip()


@pytest.mark.spread("kind", "planned")
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_buffer_closed_by_another_thread_keeps_its_memory_until_the_compute_ends(kind, planned):
    assert run(kind, f"PLANNED = {planned}\n{CLOSED}") == "refused"


while_signals_come = pytest.mark.parametrize("seconds", [0.25, pytest.param(20, marks=pytest.mark.soak)])
"""Thousands of signals a second."""


@while_signals_come
@pytest.mark.parametrize("size", [64, 1 << 16])
@pytest.mark.parametrize("kind", BACKENDS)
def test_an_exception_out_of_a_signal_leaves_neither_a_lock_nor_a_wait_behind(kind, size, seconds):
    assert run(kind, f"SECONDS, SIZE = {seconds}, {size}\n{SIGNALS}") == "works"


NO_MEMORY = """
import numpy as np, resource
ctx = gs.Context()
a, b = ctx.tensor("f32", (512, 512)), ctx.tensor("f32", (512, 64))
node = ctx.soft_max(ctx.mul_mat(a, b))
buffer = backend.alloc_tensors(ctx)
values = np.random.default_rng(1).standard_normal((576, 512)).astype(np.float32)
a.set(values[:512]); b.set(values[512:])
backend.set_n_threads(4)
plan = backend.graph_plan_create(gs.Graph(node))
for line in open("/proc/self/status"):
    if line.startswith("VmSize"):
        size = int(line.split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
try:
    backend.graph_plan_compute(plan)
except gs.OutOfMemory:
    pass
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
backend.graph_plan_compute(plan)
scores = (values[512:].astype(np.float64) @ values[:512].T)
scores = np.exp(scores - scores.max(-1, keepdims=True))
np.testing.assert_allclose(node.numpy().reshape(64, 512), scores / scores.sum(-1, keepdims=True), rtol=1e-3, atol=1e-5)
print("works")
"""


@pytest.mark.parametrize("raised, context", [(KeyboardInterrupt, None), (RuntimeError, KeyboardInterrupt)])
def test_an_interrupt_while_threads_start_is_raised_and_leaves_none(monkeypatch, raised, context):
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        error = raised()
        error.__context__ = context and context()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(raised):
            Crew(["interrupted"])
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "interrupted":
            thread.join(5)
            assert not thread.is_alive()


IDS = """
import threading
import numpy as np
ctx = gs.Context()
before = ctx.mul_mat(ctx.tensor("f32", (2048, 16)), ctx.tensor("f32", (2048, 1024), "full"))
a, b, ids = ctx.tensor("f32", (32, 16, 64)), ctx.tensor("f32", (32, 1, 65536)), ctx.tensor("i32", (8, 65536))
node = ctx.mul_mat_id(a, b, ids)
buffer = backend.alloc_tensors(ctx)
next(t for t in ctx.tensors if t.name == "full").set(np.full((1024, 2048), -3e38, np.float32))
plan = backend.graph_plan_create(gs.Graph(before, node))
there = buffer.memory[ids.offset : ids.offset + ids.nbytes].view(np.int32)
some = np.random.default_rng(0).integers(0, 64, there.size).astype(np.int32)
over = False
def change():
    while not over:
        for values in (some, 0, 1):
            there[:] = values
thread = threading.Thread(target=change)
thread.start()
for _ in range(ROUNDS):
    backend.graph_plan_compute(plan)
over = True
thread.join()
print("works")
"""


@pytest.mark.parametrize("rounds", [10, pytest.param(25, marks=pytest.mark.soak)])
def test_experts_that_change_while_they_are_read_give_no_wrong_address(rounds):
    assert run("cpu", f"ROUNDS = {rounds}\n{IDS}") == "works"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["cpu", "ggml"])      # NumPy's BLAS ends the process
def test_a_host_that_gives_neither_memory_nor_threads(kind):
    assert run(kind, NO_MEMORY) == "works"
