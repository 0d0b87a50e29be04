"""A GPU without a GPU: the kernels compiled by the host's C++ compiler, streams that run as late as they may.

For tests.  Needs g++ (or what CXX names) when a kernel is first asked for.
"""

from ggml_sched.backends.cupy.fake.device import Counts, FakeDevice
from ggml_sched.backends.cupy.fake.world import FakeWorld

__all__ = ["Counts", "FakeDevice", "FakeWorld"]
