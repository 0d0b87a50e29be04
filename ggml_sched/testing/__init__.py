"""For authors of backends: a suite of tests of what a backend must do (contract, and `pytest --pyargs
ggml_sched.testing`), a comparison of two backends (compare), recorded calls (recording), injected failures (faults,
faulty), and a device that runs queued work as late as it may (deferred)."""

import sys

# pytest shows the values of a failed assertion only in modules that are registered before they are imported.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("ggml_sched.testing.contract")
