# cython: language_level=3
"""The names that Python code uses from the packages in core/, in one module.

The packages in core/ import none of their modules, because the C API, and with it the hook under llama.cpp, needs few
of them.
"""

from ggml_sched import _graph, _host_memory, _plan

__all__ = []
for room in (_graph, _plan):
    # An import statement would fail: _core.pxd declares some of these names as types, which cannot be assigned to.
    globals().update({name: getattr(room, name) for name in room.__all__})
    __all__ += room.__all__

# Allocators in core/ use _host_memory, which they cannot import, because its module imports the core.
_plan.register_host_memory(_host_memory)
