# cython: language_level=3
"""The names that Python code uses from the packages in core/, in one module."""

from ggml_sched.core import first_generation, graph, pack, plan

__all__ = []
for room in (graph, pack, first_generation, plan):
    # No import statement: _core.pxd declares some of these names as types, which cannot be assigned to.
    globals().update({name: getattr(room, name) for name in room.__all__})
    __all__ += room.__all__
