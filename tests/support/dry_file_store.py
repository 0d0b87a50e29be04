"""A store for planning, made here and not by the package, so that `fit` is compared with plans that it did not make."""

from __future__ import annotations

from collections.abc import Sequence

import ggml_sched as gs
from ggml_sched.backends.store.files import ROOM
from ggml_sched.backends.store.rows import fits, rows_size


class DryFileStore(gs.DryStore):
    """A FileStore without files."""

    def __init__(self, name: str) -> None:
        super().__init__(name, ROOM, 64, supports_op=lambda node: not node.computes or fits(node))

    def work_size(self, nodes: Sequence[gs.Tensor]) -> int:
        return rows_size(nodes, ROOM)
