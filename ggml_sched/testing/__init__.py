"""For authors of backends: tests of what a backend must do (contract), a comparison of two backends (compare),
injected failures (faults, faulty), and a device that runs queued work as late as it may (deferred)."""

import sys

# pytest shows the values of a failed assertion only in modules that are registered before they are imported.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("ggml_sched.testing.contract")
