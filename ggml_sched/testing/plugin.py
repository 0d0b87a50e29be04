"""The pytest plugin of the contract suite: its options, lines about the backend above the tests, and their time limit.

    pytest --pyargs ggml_sched.testing --backend mypackage:MyBackend

loads it (see _ggml_sched_pytest.py, which the package installs beside itself).  Where the package is not installed, as
in a working tree, add `-p ggml_sched.testing.plugin`.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

import ggml_sched as gs
from ggml_sched.backend import overrides
from ggml_sched.testing.contract.base import supported
from ggml_sched.testing.contract.cases import CASES

OPTION = "ggml_sched_backend"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ggml-sched", "the contract of a backend (ggml_sched.testing)")
    group.addoption("--backend", dest=OPTION, metavar="MODULE:NAME", help=(
        "a class over ggml_sched.Backend, or a function that returns a backend.  It is called with name= and memory= "
        "if it has such parameters: with two names for tests of two backends, with memory for tests of a bound"))
    group.addoption("--max-nmse", dest="ggml_sched_max_nmse", type=float, metavar="ERROR", help=(
        "the permitted error of f32 results: sum((a - b)**2) / sum(b**2), default 1e-6"))
    group.addoption("--time-limit", dest="ggml_sched_time_limit", type=float, default=60.0, metavar="SECONDS", help=(
        "a test that takes longer, because it waits for ever, ends the run, with the stacks of all threads; "
        "default 60, 0 for no limit"))


def pytest_configure(config: pytest.Config) -> None:
    # Collects the suite in projects with any names of test files (pytest's python_files).
    config.addinivalue_line("python_files", "ggml_sched/testing/test_backend.py")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):      # of pytest-xdist; the process that starts it has checked
        _description(session.config)        # with -q, too, for which pytest asks for no header


def pytest_report_header(config: pytest.Config) -> list[str]:
    return _description(config)


def _description(config: pytest.Config) -> list[str]:
    """The lines about the backend; UsageError if it cannot be made."""
    factory = factory_of(config)
    if factory is None:
        return []
    if DESCRIPTION not in config.stash:
        try:
            config.stash[DESCRIPTION] = factory.description()
        except pytest.skip.Exception as skipped:
            config.stash[DESCRIPTION] = [f"backend: none, {skipped}"]
        except (Exception, SystemExit, pytest.fail.Exception) as error:
            raise pytest.UsageError(_described(factory.path, error)) from error
    return config.stash[DESCRIPTION]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    limit: float = item.config.getoption("ggml_sched_time_limit")
    if factory_of(item.config) is None or not limit > 0:
        return (yield)
    timer = threading.Timer(limit, _give_up, (item, limit))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def _give_up(item: pytest.Item, limit: float) -> None:
    """End the process after a test's time limit: the test still waits, and its thread can not be interrupted."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(2)
    print(f"{item.nodeid} has not ended after {limit:g} s (--time-limit): the stacks of all threads stand above",
          file=sys.__stderr__, flush=True)
    os._exit(pytest.ExitCode.TESTS_FAILED)


class Factory:
    """Makes backends: `make(name=, memory=)` calls the class or function of --backend with those of the two that are
    given, and returns None if it does not take one of them."""

    def __init__(self, path: str) -> None:
        self.path = path
        module_name, _, name = path.partition(":")
        if not name:
            raise pytest.UsageError(f"--backend {path}: MODULE:NAME is needed, such as mypackage:MyBackend")
        # Modules in the working directory are found, as `python -m pytest` does.
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            target: Any = import_module(module_name)
            for part in name.split("."):
                target = getattr(target, part)
        except Exception as error:
            raise pytest.UsageError(_described(path, error)) from error
        if not callable(target):
            raise pytest.UsageError(f"--backend {path}: {target!r} is neither a class nor a function")
        self._make = cast("Callable[..., gs.Backend]", target)
        self._parameters = _parameters(target)

    def make(self, name: str | None = None, memory: int | None = None) -> gs.Backend | None:
        """A backend; None if `name` or `memory` is given, and the class or function has no such parameter."""
        given: dict[str, object] = {}
        for parameter, value in (("name", name), ("memory", memory)):
            known = self._parameters.get(parameter)
            if value is not None:
                if known is None:
                    return None
                given[parameter] = value
            elif parameter == "name" and known is inspect.Parameter.empty:
                given["name"] = self.path.rpartition(":")[2]
        try:
            made = self._make(**given)
        except (Exception, SystemExit) as error:
            error.add_note(f"raised by --backend {self.path}, called with {given or 'nothing'}")
            raise
        if not isinstance(made, gs.Backend):
            raise TypeError(f"--backend {self.path} returned {made!r}, which is no ggml_sched.Backend")
        return made

    def description(self) -> list[str]:
        """Lines about the backend: what it declares, and the ops that it supports."""
        backend = cast("gs.Backend", self.make())
        with backend:
            flags = [flag for flag in ("has_memory", "is_host", "asynchronous", "concurrent_copies", "takes_at_once")
                     if getattr(backend, flag)]
            flags += [method for method in ("event_record", "graph_plan_create", "cpy_tensor_from", "cpy_tensor_to",
                                            "cpy_tensor_async", "fusion_groups", "offload_op", "work_size")
                      if overrides(backend, method)]
            flags += ["a second one"] if "name" in self._parameters else []
            flags += ["a bound on memory"] if "memory" in self._parameters else []
            n_cases = sum(supported(backend, case.made()[1]) for case in CASES)
            return [f"backend: {backend!r}, alignment {backend.alignment}",
                    f"declares: {', '.join(flags) or 'nothing'}",
                    f"supports: {n_cases} of {len(CASES)} cases of ops"]


def _parameters(target: Callable[..., object]) -> dict[str, object]:
    """{parameter: its default} of a class or a function; a backend class without an `__init__` of its own takes a
    name."""
    if isinstance(target, type) and issubclass(target, gs.Backend) and target.__init__ is gs.Backend.__init__:
        return {"name": inspect.Parameter.empty}
    try:
        return {name: parameter.default for name, parameter in inspect.signature(target).parameters.items()}
    except ValueError:      # a compiled function without a signature
        return {}


def _described(path: str, error: BaseException) -> str:
    """The text of an exception in the code that --backend names: its last line of code, and the message with its
    notes."""
    return f"--backend {path}\n{''.join(traceback.format_exception(error, limit=-1)).rstrip()}"


def factory_of(config: pytest.Config) -> Factory | None:
    """The factory of --backend; None if the option is missing.  Raises UsageError if its value is wrong."""
    path = config.getoption(OPTION, None)
    if path is None:
        return None
    held = config.stash.get(FACTORY, None)
    if held is None:
        held = config.stash[FACTORY] = Factory(path)
    return held


FACTORY = pytest.StashKey[Factory]()
DESCRIPTION = pytest.StashKey[list[str]]()
