"""Cached properties are computed once, and a child that was forked while another thread computes one can ask for it."""

import re
import threading
from pathlib import Path

import forks

import ggml_sched
from ggml_sched.threads.cached import cached_property


class Counted:
    def __init__(self, wait=lambda: None):
        self.n, self.wait = 0, wait

    @cached_property
    def value(self):
        self.wait()
        self.n += 1
        return self.n


def test_a_value_is_computed_at_the_first_access():
    counted = Counted()
    assert (counted.n, counted.value, counted.value, counted.n) == (0, 1, 1, 1)
    assert Counted().value == 1 and isinstance(Counted.__dict__["value"], cached_property)


def test_a_child_does_not_wait_for_a_thread_of_its_parent():
    begun, go = threading.Event(), threading.Event()

    def wait():
        begun.set()
        assert go.wait(60)

    thread = threading.Thread(target=lambda: Counted(wait).value)
    thread.start()
    assert begun.wait(60)
    try:
        assert forks.in_child(lambda: Counted().value) == 0
    finally:
        go.set()
        thread.join()


def test_the_package_has_no_cached_property_with_a_lock():
    package = Path(ggml_sched.__file__).parent
    found = [path.relative_to(package).as_posix() for path in package.rglob("*.py")
             if re.search(r"functools import .*cached_property|functools\.cached_property", path.read_text("utf-8"))]
    assert found == ["threads/cached.py"]
