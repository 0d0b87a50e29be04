# cython: language_level=3
"""Plans as plain values, for plan files and pickles: conversion in both directions.

Owns nothing.  Invariant: whatever the values, plan_take_values makes a plan in which all indices are valid and no chain
of roots has a cycle, or raises GraphError.  ggml_sched.planning.verify checks whether the plan is sound.
"""

import itertools
from operator import itemgetter

from ggml_sched.errors import GraphError, no_host_memory

from libc.stdint cimport int32_t

from ggml_sched._c cimport *
from ggml_sched.core.alloc.gallocr cimport plan_alloc_ids
from ggml_sched.core.graph.types cimport an_integer, ints_tuple
from ggml_sched.core.pack.solve cimport N_PACK_METHODS
from ggml_sched.core.plan.make cimport plan_alloc_arenas, plan_alloc_assign, plan_alloc_groups, plan_alloc_splits


cdef list _list(const an_integer *at, int32_t n):
    """The first n values of an array."""
    return list(ints_tuple(at, n))


cdef list _column(list rows, Py_ssize_t k):
    """Item k of each row, as a list."""
    return list(map(itemgetter(k), rows))


cdef list _joined(list rows):
    """The items of all rows, as one list."""
    return list(itertools.chain.from_iterable(rows))


cdef list _ends(list rows):
    """The index at which each row ends in the list that _joined returns."""
    return list(itertools.accumulate(map(len, rows)))


cdef dict values_of_plan(const gs_plan *p):
    """The plan as {name: an integer, a list of integers, or a list of lists}, as `plan_take_values` reads it."""
    cdef int32_t i, first = 0
    cdef list splits = [], copies = [], write_backs = [], src = [], arenas = [], groups = []
    for i in range(p.n_splits):
        inputs = _list(p.inputs + first, p.split_inputs[i] - first)
        splits.append([p.split_backend[i], p.split_start[i], p.split_stop[i], inputs])
        first = p.split_inputs[i]
    for i in range(p.n_copies):
        copies.append([p.copy_like[i], p.copy_from[i], p.copy_backend[i], p.copy_kept[i]])
    for i in range(p.n_write_backs):
        write_backs.append([p.back_node[i], p.back_copy[i]])
    for i in range(p.n):
        src.append(_list(p.src + p.src_begin[i], p.src_begin[i + 1] - p.src_begin[i]))
    for i in range(p.n_backends):
        sizes = _list(p.chunk_nbytes + p.arena[i].first_chunk, p.arena[i].n_chunks)
        arenas.append([p.arena[i].live_bytes, p.arena[i].stride, p.arena[i].method, sizes])
    for i in range(p.n_groups):
        groups.append(_list(p.group_member + p.group_begin[i], p.group_begin[i + 1] - p.group_begin[i]))
    values = {
        "n_backends": p.n_backends,
        "n_tensors": p.n_tensors,
        "assign": _list(p.assign, p.n_tensors),
        "reason": _list(p.reason, p.n_tensors),
        "splits": splits,
        "copies": copies,
        "places": _list(p.slot_copy, p.n_slots),
        "write_backs": write_backs,
        "home": _list(p.arena_of, p.n),
        "root": _list(p.root, p.n),
        "birth": _list(p.birth, p.n),
        "death": _list(p.death, p.n),
        "trimmed": _list(p.trimmed, p.n),
        "src": src,
        "size": _list(p.size, p.n),
        "view_offs": _list(p.view_offs, p.n),
        "offset": _list(p.offset, p.n),
        "rest": _list(p.rest, p.n),
        "op": _list(p.op, p.n),
        "flags": _list(p.flags, p.n),
        "state": _list(p.state, p.n),
        "seq": _list(p.seq, p.n_seq),
        "arenas": arenas,
    }
    if groups:
        values["groups"] = groups
    return values


cdef list _numbers(object values, str field, object count, object low, object high):
    """Check and return `values`, a list of `count` integers (None: any number) in low .. high.

    GraphError names the field.
    """
    if not isinstance(values, list) or count is not None and len(values) != count:
        raise GraphError(f"plan: {field!r} is not a list of {count} numbers")
    for value in values:
        if type(value) is not int or not low <= value <= high:
            raise GraphError(f"plan: {field!r} holds {value!r}, not an integer in {low} .. {high}")
    return values


cdef list _rows(object values, str field, object count, tuple highest):
    """Check and return `values`, a list of `count` rows (None: any number).

    Item i of each row must be an integer in 0 .. highest[i]; where highest[i] is None, it may be anything.
    """
    if not isinstance(values, list) or count is not None and len(values) != count:
        raise GraphError(f"plan: {field!r} is not a list of {count} rows")
    for row in values:
        if not isinstance(row, list) or len(row) != len(highest):
            raise GraphError(f"plan: {field!r} holds {row!r}, not {len(highest)} values")
        for value, high in zip(row, highest, strict=True):
            if high is not None:
                _numbers([value], field, 1, 0, high)
    return values


cdef int _put(an_integer *at, list values) except -1:
    """Write values to an array."""
    cdef Py_ssize_t i
    for i in range(len(values)):
        at[i] = values[i]
    return 0


cdef int plan_take_values(gs_plan *p, object values, Py_ssize_t n_nodes) except -1:
    """Fill an empty plan with values, for a graph of n_nodes nodes; GraphError for values that are no plan.

    The caller frees the plan, also after an error.
    """
    cdef Py_ssize_t n, n_tensors, n_backends, n_copies, n_seq, n_src, i
    cdef object get = values.get if isinstance(values, dict) else {}.get
    n_backends, n_tensors = _numbers([get("n_backends"), get("n_tensors")], "n_backends, n_tensors", 2, 0, 1 << 28)
    if not n_backends:
        raise GraphError("plan: no backends")
    top_backend, top_tensor, big = n_backends - 1, n_tensors - 1, (1 << 62) - 1
    copies = _rows(get("copies"), "copies", None, (top_tensor, top_tensor, top_backend, 1))
    n_copies, likes = len(copies), _column(copies, 0)
    places = _numbers(get("places"), "places", None, 0, n_copies - 1)
    if sorted(places) != places:
        raise GraphError("plan: 'places' do not ascend")
    n = n_tensors + n_copies + len(places)
    splits = _rows(get("splits"), "splits", None, (top_backend, n_nodes, n_nodes, None))
    inputs = _column(splits, 3)
    for read in inputs:
        _numbers(read, "splits", None, 0, n_copies - 1)
    backs = _rows(get("write_backs"), "write_backs", None, (top_tensor, n_copies - 1))
    groups = get("groups", [])
    if not isinstance(groups, list):
        raise GraphError(f"plan: 'groups' is {groups!r}")
    for group in groups:
        if len(_numbers(group, "groups", None, 0, n_nodes - 1)) < 2:
            raise GraphError(f"plan: 'groups' holds {group!r}")
    seq = _numbers(get("seq"), "seq", None, 0, n - 1)
    n_seq = len(seq)
    src = _rows_of_ids(get("src"), n)
    n_src = sum(map(len, src))
    root = _numbers(get("root"), "root", n, -1, n - 1)
    _check_roots(root)
    arena_of = _numbers(get("home"), "home", n, -1, top_backend)
    offset = _numbers(get("offset"), "offset", n, -1, big)
    arenas = _rows(get("arenas"), "arenas", n_backends, (big, big, None, None))
    chunks = []
    for _, stride, method, sizes in arenas:
        _numbers([method], "arenas", 1, GS_METHOD_REPLAYED, GS_METHOD_PACKED + N_PACK_METHODS - 1)
        chunks.append(_numbers(sizes, "arenas", None, 0, big))
        if not sizes or sum(sizes) > big or len(sizes) > 1 and not stride:
            raise GraphError(f"plan: an arena of buffers {sizes}, {stride} apart")
    for i in range(n):
        at, stride = arena_of[i], arenas[arena_of[i]][1]
        if offset[i] >= 0 and (at < 0 or stride and offset[i] // stride >= len(chunks[at])):
            raise GraphError(f"plan: id {i} has offset {offset[i]} of backend {at}, where there is no buffer")
    p.n_backends, p.n_tensors, p.n_copies, p.n_slots = n_backends, n_tensors, n_copies, len(places)
    p.n_splits, p.n_inputs, p.n_write_backs = len(splits), sum(map(len, inputs)), len(backs)
    p.n_chunks, p.n_groups = sum(map(len, chunks)), len(groups)
    if (plan_alloc_assign(p) != GS_OK or plan_alloc_splits(p) != GS_OK or plan_alloc_arenas(p) != GS_OK
            or plan_alloc_ids(p, n, n_seq, n_src) != GS_OK
            or groups and plan_alloc_groups(p, sum(map(len, groups))) != GS_OK):
        raise no_host_memory(f"a plan of {n_tensors} tensors")
    # Arrays of one element type lie one after another (plan_alloc_splits, plan_alloc_ids): one _put writes several.
    _put(p.chunk_nbytes, _joined(chunks))
    _put(p.assign, _numbers(get("assign"), "assign", n_tensors, -1, top_backend))
    _put(p.split_backend, [
        *_column(splits, 0), *_column(splits, 1), *_column(splits, 2), *_ends(inputs), *_joined(inputs),
        *likes, *_column(copies, 1), *_column(copies, 2), *_column(copies, 3), *places,
        *_column(backs, 0), *_column(backs, 1),
    ])
    _put(p.size, [
        *_numbers(get("size"), "size", n, 0, big), *_numbers(get("view_offs"), "view_offs", n, 0, big), *offset,
        *_numbers(get("rest"), "rest", n, -1, big),
    ])
    _put(p.like, [
        *range(n_tensors), *likes, *map(likes.__getitem__, places), *arena_of, *root,
        *_numbers(get("birth"), "birth", n, -1, n_seq), *_numbers(get("death"), "death", n, -1, n_seq),
        *_numbers(get("trimmed"), "trimmed", n, 0, n_seq), 0, *_ends(src), *_joined(src), *seq,
    ])
    if groups:
        _put(p.group_begin, [0, *_ends(groups), *_joined(groups)])
    _put(p.reason, _numbers(get("reason"), "reason", n_tensors, 0, GS_N_REASONS - 1))
    _put(p.op, [
        *_numbers(get("op"), "op", n, 0, GS_N_OPS - 1), *_numbers(get("flags"), "flags", n, 0, 255),
        *_numbers(get("state"), "state", n, 0, 255),
    ])
    n = 0
    for i in range(n_backends):
        p.arena[i].nbytes = sum(chunks[i])
        p.arena[i].live_bytes, p.arena[i].stride, p.arena[i].method = arenas[i][0], arenas[i][1], arenas[i][2]
        p.arena[i].first_chunk, p.arena[i].n_chunks = n, len(chunks[i])
        n += len(chunks[i])
    # EXCLUSIVE and WRITTEN follow from the other values: PlanData computes them on first use, as a file may be wrong.
    for i in range(p.n):
        p.state[i] &= ~(GS_STATE_EXCLUSIVE | GS_STATE_WRITTEN)
    return 0


cdef list _rows_of_ids(object src, Py_ssize_t n):
    """Check and return `src`: for each of n ids, the list of the ids that it reads."""
    if not isinstance(src, list) or len(src) != n:
        raise GraphError(f"plan: 'src' is not a list of {n} rows")
    for row in src:
        _numbers(row, "src", None, 0, n - 1)
    return src


cdef int _check_roots(list root) except -1:
    """GraphError if the chain of roots from some id leads back to that id."""
    cdef Py_ssize_t i, k
    cdef bytearray state = bytearray(len(root))     # of each id: 0 not visited, 1 on this chain, 2 its chain has an end
    cdef list way
    for i in range(len(root)):
        way = []
        k = i
        while k >= 0 and state[k] == 0:
            state[k] = 1
            way.append(k)
            k = root[k]
        if k >= 0 and state[k] == 1:
            raise GraphError(f"plan: id {k} shares its own memory")
        for k in way:
            state[k] = 2
    return 0
