"""The tests of `pytest --pyargs ggml_sched.testing --backend MODULE:NAME`: one class for each part of the contract.

`-k TestOps`, `-k "TestQueues or TestData"` and `-k "MUL_MAT"` select some.
"""

from __future__ import annotations

import pytest

import ggml_sched as gs
from ggml_sched.testing.contract import (
    Contract,
    DataContract,
    FusionContract,
    MemoryContract,
    OpsContract,
    QueuesContract,
    SchedulingContract,
)
from ggml_sched.testing.plugin import Factory, factory_of


class FromCommandLine(Contract):
    """Makes the backend that --backend names."""

    factory: Factory

    @pytest.fixture(autouse=True)
    def _options(self, request: pytest.FixtureRequest) -> None:
        factory = factory_of(request.config)
        if factory is None:
            pytest.exit("which backend?  pytest --pyargs ggml_sched.testing --backend MODULE:NAME",
                        returncode=pytest.ExitCode.USAGE_ERROR)
        self.factory = factory
        error = request.config.getoption("ggml_sched_max_nmse", None)
        if error is not None:
            self.max_nmse = error

    def new_backend(self) -> gs.Backend:
        made = self.factory.make()
        assert made is not None
        return made

    def second_backend(self) -> gs.Backend | None:
        return self.factory.make(name="second")

    def limited_backend(self, memory: int) -> gs.Backend | None:
        return self.factory.make(memory=memory)


class TestMemory(FromCommandLine, MemoryContract):
    pass


class TestData(FromCommandLine, DataContract):
    pass


class TestOps(FromCommandLine, OpsContract):
    pass


class TestQueues(FromCommandLine, QueuesContract):
    pass


class TestFusion(FromCommandLine, FusionContract):
    pass


class TestScheduling(FromCommandLine, SchedulingContract):
    pass
