"""Defects planted in the device layer over CuPy, each of a kind that was there, and the case that has to find it.

`python real_cupy_planted.py NAME` plants one, and runs its case.
"""

import sys
from collections.abc import Callable

import cuda_stub
import real_cupy_cases as cases

import ggml_sched as gs

PLANTED: dict[str, tuple[str, Callable[[], None]]] = {}
"""{name: (the case that fails with it, what plants it)}."""


def finds(case: Callable[[], None]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(plant: Callable[[], None]) -> Callable[[], None]:
        PLANTED[plant.__name__] = case.__name__, plant
        return plant

    return add


@finds(cases.memory_that_is_collected_in_a_capture_is_freed_at_its_end)
def captures_in_thread_local_mode() -> None:
    from cupy.cuda import runtime
    runtime.streamCaptureModeRelaxed = runtime.streamCaptureModeThreadLocal


@finds(cases.memory_collected_by_another_thread_waits_for_the_end_too)
def memory_is_freed_when_it_is_collected() -> None:
    from ggml_sched.backends.cupy import real

    def free_now(device: real.CupyDevice) -> None:
        while device.collected:
            device.call("free", device.collected.pop())

    real.CupyDevice.free_collected = free_now       # type: ignore[method-assign]


@finds(cases.a_backend_makes_the_context_of_its_device_alone)
def the_callers_device_is_set_back_by_number() -> None:
    from ggml_sched.backends.cupy import real

    def leave(self: real._Entered, *what: object) -> None:
        if self.before is not None:
            self.device.runtime.setDevice(max(self.before - 0x7000_0000, 0))

    real._Entered.__exit__ = leave      # type: ignore[method-assign, assignment]


@finds(cases.closing_a_backend_gives_everything_back)
def pinned_memory_lives_as_long_as_its_backend() -> None:
    from ggml_sched.backends.cupy import staging
    staging.Uploads.close = lambda self: None       # type: ignore[method-assign]


@finds(cases.two_backends_of_a_device_have_two_handles_of_cublas)
def backends_share_a_handle_of_cublas() -> None:
    from ggml_sched.backends.cupy import real
    made = real.CupyDevice.blas
    handles: dict[int, object] = {}
    real.CupyDevice.blas = lambda self: handles.setdefault(id(self), made(self))        # type: ignore[assignment]


if __name__ == "__main__":
    case, plant = PLANTED[sys.argv[1]]
    world = cuda_stub.install(devices=3)
    cuda_stub.install = lambda devices=1, late=False: world         # the case's own call
    world.late = case == cases.threads_use_two_devices_at_once.__name__
    plant()
    try:
        getattr(cases, case)()
    except (AssertionError, gs.BackendError):
        print("found")
