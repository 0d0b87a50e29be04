"""The CuPy backend: an NVIDIA GPU, or a fake one that computes the same kernels on the host.

Nothing here imports CuPy before a device is opened.
"""
