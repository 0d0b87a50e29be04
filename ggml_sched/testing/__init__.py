"""For authors of backends: a contract suite, a comparison of two backends, fault injection, a deferred device."""

import sys

# pytest shows the values of a failed assertion only in modules that are registered before they are imported.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite("ggml_sched.testing.contract")
