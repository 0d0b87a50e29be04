"""A stub of CUDA below the real CuPy: CuPy's own bindings, NVRTC and streams run on a machine without a GPU.

    world = cuda_stub.install(devices=2)        # before `import cupy`, once a process
    import cupy

`libcuda.so.1` and cuBLAS are made by the C compiler, and each of their functions jumps to Python.  CuPy's wheels link
CUDA's runtime statically but keep its symbols, so its `cuda*` functions are overwritten in memory with such jumps.
NVRTC is the real one; of its cubins the stub reads names, sizes of parameters and launch bounds, and a launch runs the
same kernel as the emulator (`cuda_emulator`) compiles it.  x86-64 Linux only; `missing()` says what is not there.
"""

from cuda_stub.install import install, missing
from cuda_stub.world import CudaError, World

__all__ = ["CudaError", "World", "install", "missing"]
