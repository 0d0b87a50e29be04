"""Matrix products: mul_mat and mul_mat_id.

Weights that are not f32 are converted a chunk of rows at a time, so that the work
memory stays small, and BLAS multiplies the chunk.  The chunks have a fixed size: how
many threads share them changes no bit.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ggml_sched._graph import Tensor, Type
from ggml_sched.backends.cpu.oracle.job import Job, load_call
from ggml_sched.backends.cpu.oracle.registry import FLOATS, I32, WEIGHTS, kernel, types
from ggml_sched.backends.cpu.oracle.rows import check_ids

CONVERTED = 1 << 18
"""Elements of a converted chunk: 1 MiB, about a core's cache."""

DIRECT = 1 << 22
"""Elements of a chunk of f32 weights, which need no conversion and are multiplied in place."""

_TYPES = types(frozenset({Type.F32}), WEIGHTS, FLOATS)


def _mul_mat_fits(node: Tensor) -> bool:
    if not _TYPES(node):
        return False
    a, b = node.src
    if a.ne[0] != b.ne[0] or node.ne != (a.ne[1], *b.ne[1:]):
        return False
    return all(n == m if n == 0 else m % n == 0 for n, m in zip(a.ne[2:], b.ne[2:], strict=True))


@kernel("MUL_MAT", fits=_mul_mat_fits)
def mul_mat(job: Job) -> None:
    a, kind, dst = job.src(0), job.type(0), job.dst
    k, n_rows = job.node.src[0].ne[:2]
    if dst.size == 0:
        return
    if k == 0:
        job.part().do(dst.fill, 0)
        return
    x, out = _folded(job, a.shape[:2])
    direct = kind == Type.F32 and a.strides[3] == 4
    limit = DIRECT if direct else CONVERTED
    together = min(a.shape[1], max(1, limit // (n_rows * k)))
    rows = n_rows if together > 1 else min(n_rows, max(1, limit // k))
    for i3 in range(a.shape[0]):
        for i2 in range(0, a.shape[1], together):
            j2 = i2 + together
            for start in range(0, n_rows, rows):
                stop = min(start + rows, n_rows)
                part = job.part()
                w = part.load(a[i3, i2:j2, start:stop], kind, dense=not direct)
                w = w.swapaxes(1, 2)
                left, right = x[i3, :, i2:j2], out[i3, :, i2:j2, :, start:stop]
                if w.shape[0] == 1:
                    w, left, right = w[0], left[:, 0], right[:, 0]
                if left.shape[0] == 1:
                    left, right = left[0], right[0]
                part.do(np.matmul, left, w, right)


def _folded(job: Job, batches: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(b, result) as [a3, r3, a2, r2 * n, columns]: the r2 matrices of b that meet one matrix of a
    (grouped-query attention) become one."""
    b, out = job.values(1), job.dst
    a3, a2 = batches
    if not _foldable(b, a2):
        strided, b = b, job.shared.take(b.shape)
        job.do(np.copyto, b, strided)
    if not _foldable(out, a2):
        out = job.shared.take(out.shape)
        job.after.append(partial(np.copyto, job.dst, out))
    return _fold(b, a3, a2), _fold(out, a3, a2)


def _foldable(array: np.ndarray, a2: int) -> bool:
    """Whether BLAS accepts the array's rows, and neighbouring matrices have the strides of one larger matrix."""
    _, b2, n, _ = array.shape
    return array.strides[3] == 4 and (b2 == a2 or n == 1 or array.strides[1] == n * array.strides[2])


def _fold(array: np.ndarray, a3: int, a2: int) -> np.ndarray:
    b3, b2, n, columns = array.shape
    s3, s2, s1, s0 = array.strides
    r2 = b2 // a2
    # With one row in each matrix, the next row is the next matrix.
    row = s2 if n == 1 and r2 > 1 else s1
    return np.lib.stride_tricks.as_strided(
        array, (a3, b3 // a3, a2, r2 * n, columns), (b3 // a3 * s3, s3, r2 * s2, row, s0))


_ID_TYPES = types(frozenset({Type.F32}), WEIGHTS, FLOATS, I32)


def _mul_mat_id_fits(node: Tensor) -> bool:
    if not _ID_TYPES(node):
        return False
    a, b, ids = node.src
    return (a.ne[0] == b.ne[0] and a.ne[3] == b.ne[3] == ids.ne[2] == ids.ne[3] == 1 and ids.ne[1] == b.ne[2]
            and b.ne[1] > 0 and ids.ne[0] % b.ne[1] == 0 and node.ne == (a.ne[1], ids.ne[0], b.ne[2], 1))


@kernel("MUL_MAT_ID", fits=_mul_mat_id_fits)
def mul_mat_id(job: Job) -> None:
    experts, b, ids = job.src(0)[0], job.values(1)[0], job.src(2)[0, 0]
    kind, n_rows, k = job.type(0), job.node.src[0].ne[1], job.node.src[0].ne[0]
    if job.dst.size == 0:
        return
    if not job.dst.flags.c_contiguous:
        out = job.shared.take(job.dst.shape)
        job.after.append(lambda: np.copyto(job.dst, out))
    else:
        out = job.dst
    out = out.reshape(-1, n_rows)
    n_used, n_slots = ids.shape[1], b.shape[1]
    groups: list[tuple[int, np.ndarray, np.ndarray]] = []

    def group() -> None:
        """Group the (token, slot) pairs and their inputs by expert."""
        check_ids(ids, experts.shape[0], job)
        flat = ids.reshape(-1)
        order = flat.argsort(kind="stable")
        named = flat[order]
        cuts = np.flatnonzero(named[1:] != named[:-1]) + 1
        groups.clear()
        for places in np.split(order, cuts):
            token, slot = np.divmod(places, n_used)
            groups.append((int(flat[places[0]]), places, b[token, slot % n_slots]))

    job.do(group)
    rows = min(n_rows, max(1, CONVERTED // max(k, 1)))
    for start in range(0, n_rows, rows):
        stop = min(start + rows, n_rows)
        part = job.part()
        w = None if kind == Type.F32 else part.temp((stop - start, k))
        part.do(_multiply_groups, groups, experts[:, start:stop], kind, w, out[:, start:stop])
    job.after.append(groups.clear)


def _multiply_groups(groups: list[tuple[int, np.ndarray, np.ndarray]], experts: np.ndarray, kind: Type,
                     converted: np.ndarray | None, out: np.ndarray) -> None:
    """Multiply some rows of each chosen expert with its inputs; `converted` has room for these rows as f32."""
    for expert, places, x in groups:
        w = experts[expert]
        if converted is not None:
            load_call(w, kind, converted)()
            w = converted
        out[places] = x @ w.T
