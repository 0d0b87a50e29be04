"""Locks are free after an interrupt of their holder, and in the children of forks; a latch lets all go once open."""

import dis
import os
import signal
import threading
from functools import partial

import pytest
from interrupting import interrupted

import ggml_sched as gs
from ggml_sched.threads.locks import ForkLock, Latch, OneAtATime

LOCKS = {
    "one": lambda: OneAtATime(partial(gs.Error, "busy"), partial(gs.Error, "ended")),
    "fork": ForkLock,
}


@pytest.mark.parametrize("kind", LOCKS)
def test_an_interrupt_at_any_instruction_leaves_no_lock_taken(kind):
    lock = LOCKS[kind]()

    def use() -> None:
        with lock:
            gs.errors.each([dict, list])

    for home in ("ggml_sched", "test_locks"):       # inside the block, and around it
        at = 1
        while where := interrupted(use, at, home=home):
            assert not lock.locked, where
            at += 1
        assert at > 10


def straight(values: list) -> list:
    first = values[0]
    twice = first + first
    return [twice, values]


def test_a_call_can_be_interrupted_at_each_of_its_instructions():
    """In each version of CPython: some report only a part of them to tracing functions."""
    lines, at = [], 1
    while where := interrupted(lambda: straight([1]), at, home="test_locks"):
        lines.append(int(where.rpartition(":")[2]))
        at += 1
    start, n = straight.__code__.co_firstlineno, sum(1 for _ in dis.get_instructions(straight))
    inside = [line - start for line in lines if line - start in range(4)]
    assert n - 1 <= len(inside) <= n and set(inside) >= {1, 2, 3}      # where a function begins may not count


def test_one_at_a_time():
    lock = LOCKS["one"]()
    with lock:
        with pytest.raises(gs.Error, match="busy"), lock:
            pass
        seen = []

        def other() -> None:
            try:
                with lock:
                    seen.append("in")
            except gs.Error as error:
                seen.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == ["busy"]
        lock.closed = True
    for _ in range(2):
        with pytest.raises(gs.Error, match="ended"), lock:
            pass


def test_a_fork_unlocks():
    lock = ForkLock()
    with lock:
        child = os.fork()
        if not child:
            code = 1
            try:
                with lock:
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert lock.locked
    assert not lock.locked


def turns(lock: ForkLock) -> list[str]:
    """The order in which threads enter, when one holds the lock while another arrives."""
    order, comes = [], threading.Event()

    def other() -> None:
        comes.set()
        with lock:
            order.append("second")

    thread = threading.Thread(target=other)
    with lock:
        thread.start()
        assert comes.wait(10)
        thread.join(0.05)
        order.append("first")
    thread.join()
    return order


def test_others_wait_until_a_lock_is_given_back():
    lock = ForkLock()
    assert turns(lock) == ["first", "second"] and not lock.locked


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_was_forked_inside_the_block_gives_back_what_it_has_taken():
    lock = ForkLock()
    with lock:
        child = os.fork()
        if not child:
            with lock:
                pass
    if not child:
        code = 1
        try:
            code = 0 if not lock.locked and turns(lock) == ["first", "second"] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert turns(lock) == ["first", "second"]


class Rang(Exception):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_a_signal_ends_waiting():
    """The handler's exception is raised while another thread still holds the lock."""
    lock, held, enough, seen, left = ForkLock(), threading.Event(), threading.Event(), [], []

    def hold() -> None:
        with lock:
            held.set()
            enough.wait(5)
            left.append("the lock")

    def ring(number, frame) -> None:
        seen.append(list(left))
        raise Rang

    thread, before = threading.Thread(target=hold), signal.signal(signal.SIGALRM, ring)
    thread.start()
    try:
        assert held.wait(10)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Rang), lock:
            pass
        assert seen == [[]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        enough.set()
        thread.join()
    assert not lock.locked


def test_a_latch_lets_all_go_that_wait_once_it_is_open():
    latch, gone = Latch(), []

    def wait() -> None:
        latch.wait()
        gone.append(latch.is_open)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    threads[0].join(0.05)
    assert not gone and not latch.is_open
    for _ in range(2):
        latch.open()
    for thread in threads:
        thread.join()
    latch.wait()
    assert gone == [True] * 4


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_a_signal_ends_waiting_for_a_latch():
    def ring(number, frame) -> None:
        raise Rang

    latch, before = Latch(), signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Rang):
            latch.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not latch.is_open
    thread = threading.Thread(target=latch.wait)
    thread.start()
    latch.open()
    thread.join()
