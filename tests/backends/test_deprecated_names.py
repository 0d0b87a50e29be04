"""Former names of the API for backend authors work for one release, with a DeprecationWarning that names the new
ones."""

import importlib
import sys

import pytest

import ggml_sched as gs
from ggml_sched.testing import deferred, faulty


@pytest.mark.parametrize(("module", "names"), [
    ("ggml_sched.backends.late", {"LateBackend": deferred.DeferredBackend, "LateEvent": deferred.DeferredEvent,
                                  "LateWorld": deferred.DeferredQueues}),
    ("ggml_sched.backends.faulty", {"FaultyCpuBackend": faulty.FaultyCpuBackend})])
def test_former_modules_warn_and_give_the_same_classes(module, names):
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match="use ggml_sched.testing"):
        old = importlib.import_module(module)
    assert {name: getattr(old, name) for name in old.__all__} == names


def test_the_former_name_of_check_fault_warns_and_fails_alike():
    dry = gs.DryBackend("dry")
    dry.fail_at("copy", 2)
    for _ in range(2):
        assert dry.pending_failures
        with pytest.warns(DeprecationWarning, match="check_fault"):
            if dry.pending_failures["copy"] == 1:
                with pytest.raises(gs.BackendError, match="as asked for"):
                    dry.passes("copy", "a copy")
            else:
                dry.passes("copy", "a copy")
