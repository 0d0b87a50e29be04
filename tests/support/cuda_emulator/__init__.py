"""An emulated CUDA device: kernels compiled by the host's C++ compiler, streams that run as late as events permit.

Needs g++ (or the compiler that CXX names) when a module's first kernel is looked up.
"""

from cuda_emulator.device import Counts, EmulatedDevice
from cuda_emulator.simulator import Simulator

__all__ = ["Counts", "EmulatedDevice", "Simulator"]
