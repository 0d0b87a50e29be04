"""A suite of tests for authors of backends: what each method of a backend must do.

It needs pytest (`pip install 'ggml-sched[test]'`).  From a shell, with the installed package:

    pytest --pyargs ggml_sched.testing --backend mypackage:MyBackend

Or in a test module of your own, which may define more (see `Contract`):

    from ggml_sched.testing.contract import BackendContract

    class TestMyBackend(BackendContract):
        def new_backend(self):
            return MyBackend()

What the backend does not declare is skipped, with the reason: ops that `supports_op` refuses, memory (`has_memory`), a
bound on it (`limited_backend`), `asynchronous`, `concurrent_copies`, `takes_at_once`, `is_host`, in-place sources and
fusion groups.
"""

from ggml_sched.testing.contract import cases
from ggml_sched.testing.contract.base import Contract
from ggml_sched.testing.contract.cases import Case, Leafs
from ggml_sched.testing.contract.data import DataContract
from ggml_sched.testing.contract.fusion import FusionContract
from ggml_sched.testing.contract.memory import MemoryContract
from ggml_sched.testing.contract.ops import OpsContract
from ggml_sched.testing.contract.queues import QueuesContract
from ggml_sched.testing.contract.scheduling import SchedulingContract

__all__ = ["CASES", "PATTERNS", "BackendContract", "Case", "Contract", "DataContract", "FusionContract", "Leafs",
           "MemoryContract", "OpsContract", "QueuesContract", "SchedulingContract"]

CASES = cases.CASES
"""The nodes that kernels are tested with; names begin with the op."""

PATTERNS = cases.PATTERNS
"""{ops: makes nodes that backends often compute as one kernel}."""


class BackendContract(MemoryContract, DataContract, OpsContract, QueuesContract, FusionContract, SchedulingContract):
    """All parts of the contract.  Subclass it and define `new_backend`; the subclass' name begins with `Test`."""
