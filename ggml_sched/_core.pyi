"""The types of `ggml_sched._core`."""

from ggml_sched import _graph, _pack, _plan
from ggml_sched._graph import *  # noqa: F403
from ggml_sched._pack import *  # noqa: F403
from ggml_sched._plan import *  # noqa: F403

__all__: list[str] = []
__all__ += _graph.__all__
__all__ += _pack.__all__
__all__ += _plan.__all__
