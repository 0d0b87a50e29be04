"""Which `ggml_sched` is tested: the installed package, unless the source tree holds a compiled core.

`python -m pytest` puts the working directory on the path, and so does `python -c` in the
processes that tests start; without a compiled core that tree can only fail.
"""

import functools
import gc
import importlib.machinery
import importlib.util
import os
import pickle
import re
import signal
import sys
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent
compiled_in_place = any((ROOT / "ggml_sched" / f"_core{suffix}").exists()
                        for suffix in importlib.machinery.EXTENSION_SUFFIXES)
if not compiled_in_place:
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
elif str(ROOT) in sys.path or "" in sys.path:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ["PYTHONSAFEPATH"] = "1"
os.environ.setdefault("GGML_SCHED_EMULATOR_STRICT", "1")     # CUDA kernels compile for the host without warnings
os.environ.setdefault("OMP_WAIT_POLICY", "passive")      # ggml's threads, where OpenMP has them, do not spin

# -- what needs more than the installed package and pytest -------------------------------------------

IN_TREE = (ROOT / "setup.py").exists()
"""Whether the source tree is here.  A wheel is tested in a folder that holds tests/ and pyproject.toml alone."""
collect_ignore = [] if IN_TREE else ["package", "soak", "cupy", "llama_cpp"]
OTHERS = [name for name, has in [(r"hypothesis|random_graphs|random_problems|random_over_workers",
                                  importlib.util.find_spec("hypothesis")),
                                 (r"lifetimes|random_batches|placement|placement_instances", IN_TREE)] if not has]
"""Modules of other packages and of bench/ that are not here."""


def pytest_ignore_collect(collection_path):
    if OTHERS and collection_path.match("test_*.py"):
        imports = rf"^\s*(?:from|import) (?:{'|'.join(OTHERS)})\b"
        return bool(re.search(imports, collection_path.read_text(encoding="utf-8"), re.MULTILINE)) or None
    return None


# Started in the background, a process ignores interrupts, and so would those that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A child that a test forks ends by itself where it waits for ever: the test fails instead of waiting for it.
if hasattr(os, "register_at_fork"):
    import forks

    os.register_at_fork(after_in_child=forks.limit)


# -- a spread of parameters by default ---------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)     # before `-m` deselects soaks
def pytest_collection_modifyitems(items):
    import spread

    spread.mark_soaks(items)


# -- what tests leave alive --------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_alive(request):
    """In builds that count blocks of C memory: the last test fails if more is alive than before the first.

    Nothing is checked after a failure, whose traceback holds objects, nor where a test ran another pytest in this
    process, which keeps frames of its tests.
    """
    import alive

    import ggml_sched  # noqa: F401

    if not alive.block_counts():
        yield
        return
    alive.import_extensions()
    before = alive.alive()
    gc.freeze()
    yield
    items = request.session.items
    is_nested = any("pytester" in getattr(item, "fixturenames", ()) for item in items)
    if not request.session.testsfailed and not is_nested:
        alive.forget(items)
        left = alive.leaked(before, alive.alive())
        counts = f"blocks (taken, freed): {alive.block_counts()}"
        assert not left, f"left alive after the last test: {', '.join(left)}; {counts}"


# -- garbage ---------------------------------------------------------------------------------------


def pytest_collection_finish(session):
    """The collector examines only what tests make: examining 11,000 tests and filled caches takes 100 ms each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_of_this_file(request):
    """gc.collect() in a test examines only objects made in its file."""
    if hasattr(request.module, "gc"):
        gc.collect()
        gc.freeze()


# -- random numbers --------------------------------------------------------------------------------


def pytest_runtest_setup(item):
    """Seeds the generator of the test's file by the test's name.  Where several processes share the tests, those that
    ran before it in the same process differ from run to run."""
    module = getattr(item, "module", None)
    if hasattr(module, "RNG"):
        module.RNG = np.random.default_rng(crc32(item.name.encode()))


# -- graphs ------------------------------------------------------------------------------------------


@pytest.fixture
def ctx():
    """The context of the tensors that a test makes."""
    from ggml_sched import Context

    return Context("test")


# -- every plan that a test makes is verified ------------------------------------------------------

SMALL, LARGEST = 50, 500
"""The most nodes of graphs of which every plan is verified, and of those of which one plan for each wiring, splits,
copies and fusion groups is: the checker takes half a second for 1,500 nodes.  Tests verify plans of large graphs where
they are about soundness.  Of the plans that a search for a window makes, that with the window it finds is verified."""

SOUND: set[bytes] = set()
"""Digests of facts that passed the checker, which reads nothing but facts.  Tests make the same plans again and again,
with new graphs, backends and schedulers."""

STRUCTURES: set[tuple] = set()
"""Of the verified plans of more than SMALL nodes."""

VERIFIED: dict[int, object] = {}
"""Data of plans that the running test made, by their addresses."""


@pytest.fixture(scope="session", autouse=True)
def _every_plan_verifies():
    from ggml_sched.planning import verify
    from ggml_sched.planning.planner import Planner

    find_widest, require_sound = Planner._find_widest, verify.require_sound

    def require_sound_once(facts):
        digest = sha256(pickle.dumps(vars(facts))).digest()
        if digest not in SOUND:
            require_sound(facts)
            SOUND.add(digest)

    @functools.wraps(find_widest)
    def checked(self, asked, graph, request, policy, held):
        plan = find_widest(self, asked, graph, request, policy, held)
        if len(graph) <= LARGEST and id(plan.data) not in VERIFIED:
            data = VERIFIED[id(plan.data)] = plan.data
            structure = graph.wiring, policy, data.methods, data.splits, data.copies, data.slot_copies, data.groups
            if len(graph) <= SMALL or structure not in STRUCTURES:
                plan.verify()
                STRUCTURES.add(structure)
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "require_sound", require_sound_once)
        patch.setattr(Planner, "_find_widest", checked)
        yield


@pytest.fixture
def unverified(monkeypatch):
    """Leaves out the verification of every plan, which takes most of the time of a test that makes many."""
    from ggml_sched.planning.planner import Planner

    monkeypatch.setattr(Planner, "_find_widest", Planner._find_widest.__wrapped__)


def pytest_runtest_teardown():
    VERIFIED.clear()
