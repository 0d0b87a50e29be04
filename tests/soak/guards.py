"""The guards that tests hold: one-line edits that each take one of them away, and the tests that notice it.

mutations.py makes the edits.  tests/package/test_guard_list.py sees to it that they go on fitting the code.
"""

from __future__ import annotations

from typing import NamedTuple

import guards_backends
import guards_files
import guards_fusion
import guards_hook
import guards_models


class Edit(NamedTuple):
    """Replace `before`, which stands once in the file, by `after`; one of the tests then fails."""

    path: str
    tests: str
    guard: str
    before: str
    after: str


def _edits() -> list[Edit]:
    found = []

    def of(path: str, tests: str, *edits: tuple[str, str, str]) -> None:
        found.extend(Edit(path, tests, *edit) for edit in edits)

    of("ggml_sched/planning/compiler.py",
       "tests/planner/test_guards.py tests/planner/test_program_alone.py tests/executor",
       ("one reader of expert weights", "if read[weight] == 1}", "}"),
       ("ids computed in the same split", "None if start <= self.position[self.memory[ids]] < stop else ids", "ids"),
       ("experts of a weight in a ring or kept", "if not keeps and not self._is_placed(i):", "if True:"),
       ("ids that a node writes over", "or self.written and int(self.memory[ids]) in self.written:", "or False:"),
       ("copies ahead of what is written later",
        "if len(self.places[c]) > 1 and self._is_unwritten(self.copies[c][0])]", "if len(self.places[c]) > 1]"),
       ("keeping what others use",
        "keeps = self._is_leaf(i) and (bool(self.kept[c]) or all(self._is_exclusive(place.id) for place in places))",
        "keeps = self._is_leaf(i)"),
       ("keeping what a node computes", "keeps = self._is_leaf(i) and (", "keeps = ("),
       ("bytes that are read before they are written", "if not known.cover(int(self.view_offs[s]),",
        "if False and (int(self.view_offs[s]),"),
       ("bytes that stay as they were", "return not known.cover(0, int(self.nbytes[leaf]))", "return False"),
       ("what is written to is not read", "== leaf) & ~self._is_blind", "== leaf)"),
       ("only one slot is not read", "self.slot[self.entry] == slots[self.op[self.reader]]",
        "slots[self.op[self.reader]] >= 0"),
       ("some rows are not all", "if self.memory[i] == leaf and self.op[i] not in PARTIAL_OPS:",
        "if self.memory[i] == leaf:"),
       ("gaps are not written", "known.add(starts + int(self.view_offs[i]), size)",
        "known.add(np.array([int(self.view_offs[i])]), int(self.nbytes[i]))"),
       ("experts that are interleaved", " if experts_lie_apart(graph.tensors[src[0]])}", "}"),
       ("what nodes keep is touched", "touched.update(int(self.memory[i]) for i in self._ids_of_deps())", "pass"),
       ("the waits of keepers", ", *self._accesses_of_keepers(step_at)]", "]"),
       ("the waits of write-backs", "yield step.tensor, k, 1\n                continue", "continue"),
       ("ids are read by copies of experts", "yield step.ids, k, 0", "pass"),
       ("who owns pushed copies", "pushes = len(places) > 1 and self.concurrent[backend] and owner >= 0",
        "pushes = len(places) > 1 and owner >= 0"))
    of("ggml_sched/planning/waits.py", "tests/planner/test_ordering.py",
       ("waits for the compute before", "_want(wanted[first], queues, Wait(second, period))", "pass"),
       ("reads do not wait for reads", " & (writes | writes[k])", ""),
       ("what is left out orders nothing", "() if keeps[i] else wanted[i].values()", "wanted[i].values()"),
       ("backends that compute or take data", "note(i, j, 1)", "pass"),
       ("the latest wait includes others", "if known is None or (wait.back, -wait.step) < (known.back, -known.step):",
        "if known is None:"))
    of("ggml_sched/core/pack/run.pxi", "tests/core/test_pack.py",
       ("proofs count in the sizes' common divisor", "grain = pack_grain(p)\n        work.out.proven",
        "grain = 1\n        work.out.proven"),
       ("the first packing is kept however large", " or work.out.method == PACK_METHOD_NONE:", ":"),
       ("joined problems prove nothing", "elif found == SEARCH_IMPOSSIBLE and p == work.p:",
        "elif found == SEARCH_IMPOSSIBLE:"),
       ("never worse than best fit", "if status == GS_OK and out.arena > out.proven and not work.fitted:", "if False:"))
    of("ggml_sched/core/pack/prepare.pxi", "tests/core/test_pack.py",
       ("a shuffled problem is the same", "return p.size[a] > p.size[b]", "return False"))
    of("ggml_sched/core/pack/fill.pxi", "tests/core/test_pack.py",
       ("holes are filled", "    if seed:\n        fill_holes", "    if False:\n        fill_holes"))
    of("ggml_sched/core/pack/two_ends.pxi", "tests/core/test_pack.py",
       ("which neighbour stays longer", "return gap.below < 0 or gap.above >= 0 and stop[gap.below] >= stop[gap.above]",
        "return True"))
    of("ggml_sched/core/pack/blocks.pxi", "tests/planner/test_default_extremes.py",
       ("no chunk ends beyond 63 bits", "or gs_checked_add(offset, b.stride, &end) != GS_OK):", "):"))

    # -- planning --

    of("ggml_sched/core/plan/default.pxi", "tests/planner/test_guards.py tests/planner/test_default_placement.py "
       "tests/planner/test_beyond_upstream.py tests/planner/test_verify.py::"
       "test_a_node_with_memory_where_its_op_is_not_supported_is_refused",
       ("a copy of what was written since is made again", "w.version[g.view_src[id]] += 1", "pass"),
       ("copies are of a version", "if copy < 0 or w.copy_version.at[copy] != w.version[root]:", "if copy < 0:"),
       ("streamed weights are not kept", "r.usage[s] == GS_USAGE_WEIGHTS and not streams:",
        "r.usage[s] == GS_USAGE_WEIGHTS:"),
       ("only weights are kept", "if r.resident[s] >= 0 and r.usage[s] == GS_USAGE_WEIGHTS and not streams:",
        "if r.resident[s] >= 0 and not streams:"),
       ("few offloaded weights are kept", "total[here] > 2 * largest[here] and", "total[here] > 0 and"),
       ("each streamed weight opens a split", "or streams and has_streamed:", "or False:"),
       ("a write that goes back ends its split", "                closed = True\n", "                pass\n"),
       ("what has memory is not assigned", "if r.user[i] >= 0 and (r.resident[i] < 0 or g.kind[i] & GS_KIND_WRITES):",
        "if r.user[i] >= 0:"),
       ("a backend spreads over what it supports",
        "and not g.kind[id] & GS_KIND_WRITES and request_supports(r, near, id)", "and not g.kind[id] & GS_KIND_WRITES"),
       ("only what a backend supports is offloaded", "+ id] and request_supports(r, b, id):", "+ id]:"),
       ("upgrades share memory one way", "request_reads(r, b, here) and", ""),
       ("upgrades share memory the other way", "request_reads(r, here, b) and", ""),
       ("upgrades are to what supports the node",
        "if not (request_reads(r, b, here) and request_reads(r, here, b) and request_supports(r, b, id)):",
        "if not (request_reads(r, b, here) and request_reads(r, here, b)):"),
       ("an assigned node is not upgraded", "(r.user == NULL or r.user[id] < 0) and", ""),
       ("a node with memory that its backend does not run", "if r.resident[id] >= 0 and g.view_src[id] < 0:",
        "if False:"),
       ("leftovers go to who supports them", "        if not request_supports(r, b, id):\n            continue\n", ""))
    of("ggml_sched/core/plan/splits.pxi", "tests/executor/test_copies_ring.py tests/planner/test_beyond_upstream.py "
       "tests/executor/test_late.py",
       ("weights have one place", " and not is_foreign_weight(r, w.copy_like.at[c])\n", "\n"),
       ("a copy that is written through has one place", "return w.copy_like.at[c] == w.copy_from.at[c] and ",
        "return "),
       ("inputs are copied first", "if g.op[g.memory[w.copy_like.at[c]]] != GS_OP_NONE:", "if True:"),
       ("a node that writes through a copy reads it",
        "if g.memory[s] == root and g.view_offs[s] == g.view_offs[id] and", "if False and"))
    of("ggml_sched/core/plan/request.pxi", "tests/planner/test_guards.py tests/planner/test_homes.py "
       "tests/planner/test_default_placement.py tests/core/test_graphs.py::"
       "test_closed_contexts_are_refused_everywhere tests/core/test_graphs.py::"
       "test_closing_a_context_after_allocating_is_noticed tests/executor/test_scheduler_life.py "
       "tests/planner/test_answers.py",
       ("usage is in the key", "(<uint64_t>last_index << 2) | last_usage) ^", "(<uint64_t>last_index << 2)) ^"),
       ("who reads a buffer is in the key", "<uint64_t>hash(self.readers[last_buffer]) if r.shares else 0", "0"),
       ("assignments are in the key",
        "self.key = gs_mix(self.key, (<uint64_t>i << 16) | <uint64_t>(k + 1) | <uint64_t>1 << 63)", "pass"),
       ("closed contexts", "            if home.closed:", "            if False:"),
       ("a weight whose buffer was closed", "if lease == <void *>None:", "if False:"),
       ("residents of files without a home", "if t._resident is not None and (g.n_readers[i] or g.n_viewers[i]):",
        "if False:"),
       ("plans of graphs that name no residents", "cdef uint64_t h = self.graph.names_residents",
        "cdef uint64_t h = 0"),
       ("a weight that no backend reads", "        for k in self.readers_of(buffer):\n            return k\n",
        "        return 0\n"),
       ("the answers of a failed attempt", "        self.drop_answers()\n        self.ask_about_buffers()",
        "        self.ask_about_buffers()"),
       ("answers of two versions", "if devices.epoch() == epoch:", "if True:"))
    of("ggml_sched/core/plan/devices.pxi", "tests/planner/test_answers.py tests/executor/test_prepared.py "
       "tests/executor/test_scheduler_life.py tests/backends/test_buffers_that_lie.py",
       ("answers of another version", "                self.answers.forget()\n                self._epoch += 1",
        "                self._epoch += 1"),
       ("plans of another version", "self._epoch += 1", "pass"),
       ("prepared computes end with a weight's buffer", "            if buffer.closed:", "            if False:"),
       ("prepared computes end when weights move", "graph.residence_epoch() == residence and", ""),
       ("prepared computes end with the answers", " and self.epoch() == answers", ""))
    of("ggml_sched/core/plan/answers.pxi", "tests/planner/test_answers.py",
       ("answers are found by the whole kind",
        "if found.n_words == n_words and memcmp(found.words, words, n_words * sizeof(uint64_t)) == 0:", "if True:"))
    of("ggml_sched/core/plan/ask.pxi", "tests/planner/test_answers.py",
       ("what is known is not asked", "            if self.known[k]:\n                continue\n", ""))
    of("ggml_sched/core/graph/kinds.pxi", "tests/planner/test_answers.py",
       ("parameters tell kinds apart", "        if g.param[p + i] != g.param[q + i]:", "        if False:"),
       ("layouts of sources tell kinds apart",
        " or not layout_equal(&g.layout[g.src[at + i]], &g.layout[g.src[bt + i]])", ""),
       ("layouts tell kinds apart", "\n            or not layout_equal(&g.layout[a], &g.layout[b])", ""))
    of("ggml_sched/core/plan/bind.pxi", "tests/executor/test_scheduler_life.py tests/executor/test_memory_rules.py "
       "tests/executor/test_queued_memory.py tests/executor/test_inputs.py tests/executor/test_prepared.py",
       ("a plan is bound to its graph", "if f.n_tensors != graph.flat.n_tensors:", "if False:"),
       ("another scheduler's queued computes are waited for", "        lease.drain()\n", "        pass\n"),
       ("another scheduler's addresses are displaced", "lease.displaced = True", "pass"),
       ("offsets count in chunks", "            offset %= stride\n", ""))
    of("ggml_sched/core/plan/alone.pxi", "tests/planner/test_program_alone.py",
       ("alone: what nodes keep is loaded", "use[g.memory[g.dep[i]]] |= USE_KEPT", "pass"),
       ("alone: one backend", "if p.split_backend[i] != p.split_backend[0]:", "if False:"),
       ("alone: nothing is copied", "if p.n_copies or p.n_inputs or p.n_write_backs or p.n_splits == 0",
        "if p.n_splits == 0"),
       ("alone: leafs that nodes write to", "if use[i] & USE_WRITTEN or p.home[i]", "if p.home[i]"))
    of("ggml_sched/core/plan/replay.pxi", "tests/planner/test_reserve.py tests/planner/test_guards.py",
       ("a smaller graph runs where the reserved one did", "\n            or not still_supported(r, reserved.assign)",
        ""))
    of("ggml_sched/core/plan/make.pxi", "tests/planner/test_beyond_upstream.py tests/planner/test_verify.py "
       "tests/executor/test_copies_ring.py tests/executor/test_late.py tests/planner/test_guards.py",
       ("copies of what nodes write to are made again", "            if f.state[r] & GS_STATE_WRITTEN:",
        "            if False:"),
       ("a leaf that is written over is loaded again", "            f.state[r] &= ~GS_STATE_EXCLUSIVE\n", ""),
       ("memory of its own is nobody else's",
        "if f.offset[k] < f.offset[i] + f.size[i] and f.offset[i] < f.offset[k] + f.size[k]:", "if False:"))

    # -- allocation --

    of("ggml_sched/core/alloc/placing.pxi", "tests/planner/test_guards.py tests/planner/test_reserve.py "
       "tests/core/test_first_generation_failures.py tests/planner/test_keep_until.py",
       ("a taker stays inside what was measured", " and place + f.size[i] <= room", ""),
       ("a taker stays aligned", "place % alignment[f.home[i]] == 0 and ", ""),
       ("takers at an offset are the default policy's",
        "return alignment != NULL and place % alignment[f.home[i]] == 0",
        "return (alignment == NULL or place % alignment[f.home[i]] == 0)"),
       ("nothing is larger than measured", "or f.size[i] > measured.size[i]:", "or False:"),
       ("a taker has the layout of its source", "if layout_equal(&f.layout[f.like[i]], &f.layout[f.like[s]]):",
        "if True:"))
    of("ggml_sched/core/alloc/gallocr.pxi", "tests/core/test_allocators.py "
       "tests/core/test_first_generation_failures.py tests/planner/test_tail.py tests/core/test_restored_tensors.py "
       "tests/planner/test_keep_until.py tests/executor/test_memory_rules.py tests/core/test_reference_comparison.py "
       "tests/planner/test_late_leafs.py",
       ("only the last reader takes over", "if (f.n_children[s] != 1 or f.n_views[s]", "if (f.n_views[s]"),
       ("what has views is not taken over", "or f.n_views[s] or", "or"),
       ("inputs and outputs are not taken over",
        "\n            or (f.flags[s] | f.flags[r]) & (GS_FLAG_INPUT | GS_FLAG_OUTPUT)):", "):"),
       ("only the last view hands its root over", "if f.n_views[r] != 1 or f.n_children[r] != 0:", "if False:"),
       ("views hand over aligned memory", "            if f.offset[s] % arena.alignment:\n", "            if False:\n"),
       ("memory of another arena is not taken over", "or f.home[r] != f.home[id]", ""),
       ("the first generation hands nothing over inside memory",
        "            if arena.reuse != GS_REUSE_ALL:\n", "            if False:\n"),
       ("a taker does not reach into what was given back",
        "if place + f.size[id] > (f.rest[owner] if f.birth[owner] >= 0 else f.size[owner]):", "if False:"),
       ("the first generation gives no tails back",
        "if arena.reuse == GS_REUSE_FIRST or f.birth", "if f.birth"),
       ("outputs stay", "    if f.flags[s] & GS_FLAG_OUTPUT:\n        return GS_OK ",
        "    if False:\n        return GS_OK "),
       ("an output in a chain keeps its memory", "while f.root[id] >= 0 and not f.flags[id] & GS_FLAG_OUTPUT:",
        "while f.root[id] >= 0:"),
       ("views keep their roots", "        if f.n_children[r] or f.n_views[r]:\n            return GS_OK\n", ""),
       ("inputs that are born late wait on the host",
        "f.offset[id] < high:\n            f.state[id] |= GS_STATE_LATE\n", "f.offset[id] < high:\n            pass\n"),
       ("so do those whose offsets come later", "f.birth[id] > 0:\n        f.state[id] |= GS_STATE_LATE\n",
        "f.birth[id] > 0:\n        pass\n"),
       ("what outlives a compute is there from the start", "(leafs_first or f.like[i] != i)", "leafs_first"),
       ("what a node keeps is there until it is done",
        "(f.dep_begin[id], f.dep_begin[id + 1]):\n            status = gallocr_drop(f, arenas, f.dep[k], now)\n",
        "(f.dep_begin[id], f.dep_begin[id + 1]):\n            status = GS_OK\n"),
       ("memory is freed at barriers", "            if order == NULL:\n", "            if True:\n"))
    of("ggml_sched/core/alloc/arenas.pxi", "tests/planner/test_tail.py tests/planner/test_random_reuse.py",
       ("reuse that costs more than it saves", "        status = weigh_reuse(a)\n", "        pass\n"))
    of("ggml_sched/core/alloc/offsets.pxi", "tests/planner/test_tail.py tests/executor/test_memory_rules.py",
       ("one buffer is not larger than a chunk", "taken = status == GS_OK and packing.arena <= blocks.chunk",
        "taken = status == GS_OK"))
    of("ggml_sched/core/pack/blocks.pxi", "tests/core/test_allocators.py tests/executor/test_memory_rules.py "
       "tests/planner/test_beyond_upstream.py",
       ("the later of two equal holes", "if size <= b.at[i].size <= best:", "if size <= b.at[i].size < best:"),
       ("the last block is the last resort", "    for i in range(b.n - 1):\n", "    for i in range(b.n):\n"),
       ("chunks do not touch", "b.stride = b.chunk + alignment", "b.stride = b.chunk"))
    of("ggml_sched/core/alloc/tallocr.pxi", "tests/core/test_allocators.py tests/backends/test_buffers_that_lie.py "
       "tests/executor/test_queued_memory.py tests/core/test_graphs.py tests/core/test_first_generation_failures.py",
       ("a closed allocator", "if self.closed or self.buffer.closed:", "if False:"),
       ("views are not allocated", "        if t.view_src is not None:", "        if False:"),
       ("what has an address is not allocated", "        if t.settled() is not None:", "        if False:"),
       ("a hook that raises takes the address back", "                self.forget(t)\n", ""),
       ("queued computes end before a tensor is freed", "        self.buffer.settle()\n        if not self.is_measure:",
        "        if not self.is_measure:"),
       ("queued computes end before a reset", "        self.buffer.settle()\n        self.end_leases()",
        "        self.end_leases()"))
    of("ggml_sched/core/alloc/graph_allocator.pxi", "tests/core/test_allocators.py "
       "tests/core/test_first_generation_failures.py tests/core/test_graphs.py tests/executor/test_queued_memory.py "
       "tests/executor/test_random_execution.py",
       ("free blocks come back after a failure", "                if saved != NULL and saved[k].at != NULL:",
        "                if False:"),
       ("addresses go when a hook raises", "            for t in bound:\n                t.bind(None, 0, None)\n", ""))

    # -- graphs and places --

    of("ggml_sched/core/graph/wiring.pxi", "tests/core/test_restored_tensors.py",
       ("a root that is a view", "    if root is not None and root.view_src is not None:", "    if False:"),
       ("leafs have no sources", "        if src:\n", "        if False:\n"),
       ("leafs view no nodes", "        if root is not None and root.layout.op != GS_OP_NONE:", "        if False:"),
       ("ops have their sources", "        if i >= len(src) or src[i] is None:", "        if i >= len(src):"),
       ("nothing is written to shared bytes", "    if layout_may_overlap(layout):", "    if False:"),
       ("nothing is computed with gaps",
        "    if root is None and not layout_contiguous(layout) and not layout_is_empty(layout):", "    if False:"),
       ("a node writes to what it names", "            if s is not None and (s is root or s.view_src is root):",
        "            if True:"),
       ("a view has its source's root", "    if root is not s and root is not s.view_src:", "    if False:"))
    of("ggml_sched/core/graph/places.pxi", "tests/executor/test_queued_memory.py "
       "tests/backends/test_buffers_that_lie.py tests/core/test_allocators.py tests/backends/test_backend_contract.py "
       "tests/executor/test_scheduler_life.py tests/executor/test_async.py",
       ("queued computes end before a buffer closes", "        if not self.closed:\n            self.settle()\n", ""),
       ("settling waits", "                lease.drain()\n", "                pass\n"),
       ("buffers know who computes on them", "            watch_buffers(graph, self)\n", "            pass\n"),
       ("a buffer of the backend", "    if buffer.backend is not backend:", "    if False:"),
       ("a buffer is given once", "    if buffer.given:", "    if False:"),
       ("a buffer as large as asked for", "    if buffer.size < size:", "    if False:"),
       ("a buffer that is too small is given back", "        buffer.close()\n        raise BackendError",
        "        raise BackendError"),
       ("sizes hold the tensor", "    if not t.layout.nbytes <= found <= 0x7fffffffffffffff:",
        "    if not found <= 0x7fffffffffffffff:"))

    # -- the checker and plan files --

    corruptions = (
        "tests/planner/test_verify.py::test_a_corrupted_plan_gives_exactly_its_reason tests/planner/test_verify.py::"
        "test_every_claim_of_a_plan_is_checked tests/planner/test_verify.py::"
        "test_the_last_node_of_a_plan_must_be_in_a_split tests/planner/test_verify.py::"
        "test_a_copy_that_no_split_makes_is_missing tests/planner/test_verify.py::"
        "test_a_source_in_two_slots_is_not_taken_over tests/planner/test_verify.py::test_what_is_kept_lives_always "
        "tests/planner/test_verify.py::test_a_kept_copy_of_what_nodes_write_to_is_stale_in_the_next_compute "
        "tests/planner/test_verify.py::test_execution_alone_sees_clobbered_bytes tests/planner/test_verify.py::"
        "test_execution_alone_sees_an_overwritten_output tests/planner/test_verify.py::"
        "test_an_unsound_plan_raises_a_hazard_error_with_the_reason tests/planner/test_verify.py::"
        "test_what_a_node_keeps_has_an_address tests/planner/test_verify.py::test_plans_that_were_unsound_are_sound")
    of("ggml_sched/planning/verify/structure.py", corruptions,
       ("a split's backend", "0 <= split.backend < n_backends,", "True,"),
       ("the copies of a split", '0 <= c < n_copies, f"split', 'True, f"split'),
       ("what a copy copies", "0 <= like < n,", "True,"),
       ("where a copy goes", "0 <= b < n_backends,", "True,"),
       ("what goes back", "0 <= i < n and 0 <= c < n_copies,", "True,"),
       ("an id's home", "-1 <= home < n_backends,", "True,"),
       ("an id's chunk", "home < 0 or (home, chunk) in facts.arena_sizes,", "True,"),
       ("whose memory is shared", "-1 <= shares < total,", "True,"),
       ("what is read", "and max(reads, default=-1) < total,", ","),
       ("empty slots are read by nobody", " and all((s < 0) == (p < 0) for s, p in zip(src, reads, strict=True))", ""),
       ("a step's queue", "    if not 0 <= step.backend < len(facts.backends):", "    if False:"),
       ("waits are for steps before", "0 <= wait.step < n_steps and wait.back >= (wait.step >= k)",
        "0 <= wait.step < n_steps"),
       ("waits are for steps", "0 <= wait.step < n_steps and wait.back >= (wait.step >= k)",
        "wait.back >= (wait.step >= k)"),
       ("places are of ids", "all(0 <= place.id < len(facts.name) for place in places)", "True"),
       ("steps have places", "if not all(places and all(", "if not all(all("),
       ("a step's tensor", "return 0 <= step.tensor < n and (", "return ("),
       ("a step's ids", '(step.kind != "copy experts" or 0 <= step.ids < n)', "True"),
       ("a run's nodes", "return 0 <= step.first <= step.last < n_nodes and all(", "return all("),
       ("a run reads for its own nodes", "step.first <= read.position <= step.last and", ""),
       ("a run reads into slots", " and 0 <= read.slot < len(facts.src[facts.nodes[read.position]])", ""),
       ("splits follow one another", "if split.start != at or split.stop <= split.start:",
        "if split.stop <= split.start:"),
       ("splits have nodes", "if split.start != at or split.stop <= split.start:", "if split.start != at:"),
       ("a split makes its own copies", "if facts.copies[c][1] != split.backend:", "if False:"),
       ("the last split ends with the graph", "    if at != len(facts.nodes) and", "    if False and"),
       ("the sequence is that of the splits", "    if not found and expected != facts.sequence:", "    if False:"),
       ("a node runs where its split does", "            if facts.assigned[i] != split.backend:",
        "            if False:"),
       ("a node runs where it is supported", "            elif not facts.supported[i]:", "            elif False:"),
       ("only copies stand for sources", "if p != s and (p < facts.n_tensors or", "if p != s and ("),
       ("copies have the layout of sources", " or facts.layout[p] != facts.layout[s]):", "):"),
       ("places are the plan's", "            if place[1:] != (facts.home[i], facts.chunk[i], facts.offset[i]):",
        "            if False:"),
       ("copies stand in the queue of one of their ends",
        '        elif step.kind in ("load", "copy") and step.backend not in _ends(facts, step):',
        "        elif False:"),
       ("every node runs", "    if ran != [i for i in facts.nodes if facts.computes(i)]:", "    if False:"),
       ("a run is in the queue of its nodes", "        if facts.assigned[i] != step.backend:", "        if False:"),
       ("a run reads what the plan says", "        if read != facts.reads[i]:", "        if False:"),
       ("a run writes where the plan says",
        "        if facts.into(step, i, 0) != (i if copy is None else facts.n_tensors + copy):", "        if False:"),
       ("residents stay", "        if facts.home[i] >= 0 or facts.offset[i] >= 0:", "        if False:"),
       ("residents are where they can be read", "        elif facts.view_of[i] < 0 and facts.assigned[i] not in",
        "        elif False and facts.assigned[i] not in"),
       ("what is touched has an address",
        "        if min(facts.home[i], facts.offset[i], facts.home[root], facts.offset[root]) < 0:",
        "        if False:"),
       ("views lie in their roots", "        elif root != i and facts.address(i) != (facts.address(root)[0], start):",
        "        elif False:"),
       ("copies lie where they go",
        "        elif i >= facts.n_tensors and facts.home[i] != facts.copies[i - facts.n_tensors][1]:",
        "        elif False:"),
       ("sources have addresses", "            touched.update(p for p in facts.reads[act.id] if p >= 0)\n", ""),
       ("what is kept has an address", "            touched.update(facts.deps.get(act.id, ()))\n", ""))
    of("ggml_sched/planning/verify/memory.py", corruptions +
       " tests/planner/test_keep_until.py",
       ("alignment", "        if facts.offset[i] % alignment:", "        if False:"),
       ("sizes that backends ask for", "        if facts.shares[i] < 0 and facts.size[i] < facts.need[i]:",
        "        if False:"),
       ("arenas have ends", "        if facts.offset[i] + max(facts.need[i], facts.nbytes[i]) > arena:",
        "        if False:"),
       ("live bytes", "        if not 0 <= live <= room:", "        if False:"),
       ("rings live always", "    always = facts.keeps | facts.ring\n", "    always = facts.keeps\n"),
       ("what is kept lives always", "    always = facts.keeps | facts.ring\n", "    always = facts.ring\n"),
       ("what nodes keep lives", "            for s in facts.deps.get(i, ()):\n                touch(s, time)\n", ""),
       ("results live to the end",
        "    for i in readable(facts):\n        if facts.memory(i) in birth:\n            touch(i, end)\n", ""),
       ("memory is taken over by who says so",
        "    if not (facts.took_over[x] and _holder(facts, x) == _holder(facts, y)):",
        "    if not facts.took_over[x]:"),
       ("sharing is said", "    if not (facts.took_over[x] and _holder(facts, x) == _holder(facts, y)):",
        "    if not _holder(facts, x) == _holder(facts, y):"),
       ("the old owner is dead", "    if old.death > new.birth:", "    if False:"),
       ("a source of equal layout", "    if not same:", "    if False:"),
       ("kernels tolerate it", " or not facts.tolerates[x] >> same[0] & 1:", ":"),
       ("a source in one slot", "    if len(slots) > 1 or", "    if"))
    of("ggml_sched/planning/verify/dataflow.py", corruptions +
       " tests/planner/test_keep_until.py tests/planner/test_verify.py::"
       "test_experts_that_share_bytes_do_not_travel_one_by_one tests/executor/test_late.py::test_every_wait_is_needed "
       "tests/executor/test_late.py::"
       "test_the_checker_sees_a_load_that_does_not_wait_for_readers_on_other_backends",
       ("computes after the first",
        "rounds = 1 + max(program.turns, program.reach, 4 * program.turns * bool(facts.keeps))", "rounds = 1"),
       ("inputs that are not named", "for i in sorted(self.needed - set(facts.program.inputs)):", "for i in ():"),
       ("experts that share bytes", "if not self.experts_lie_apart(step.tensor):", "if False:"),
       ("copies of what is not there", "        if missing:", "        if False:"),
       ("one report for a copy", "            self.bad.add(place)\n", ""),
       ("memory that a backend cannot read", "            if here not in facts.readers(p):", "            if False:"),
       ("copies that nobody made", "            elif p >= facts.n_tensors and p not in self.done:",
        "            elif False:"),
       ("experts that other ids name",
        "                if p in self.experts and not self.names_experts(i, slot, reads):",
        "                if False:"),
       ("experts for another op", '(self.facts.op[i] == "MUL_MAT_ID" and slot == 0', "(slot == 0"),
       ("writes that reach", "        if here not in facts.readers(into):", "        if False:"),
       ("bytes that a node leaves alone",
        "        elif facts.view_of[i] >= 0 and facts.view_of[i] not in own:", "        elif False:"),
       ("results at the end",
        '                self.compare(i, i, "after the compute, the caller reads", "output-overwritten", False)',
        "                pass"),
       ("residents at the end",
        '                self.compare(i, i, "after the compute, the next one reads", "lost-write", False)',
        "                pass"),
       ("writes wait for readers", "                others += readers.values()", "                pass"),
       ("steps wait for writers", "            others = [] if writer is None else [writer]", "            others = []"),
       ("a kept place holds a version", "        if self.seen.get(place) == version:",
        "        if place in self.seen:"),
       ("bytes that are missing", "        if expected == actual or p in self.bad:", "        if True:"))
    of("ggml_sched/planning/verify/__init__.py", corruptions,
       ("the dataflow is checked", " or check_dataflow(facts)", ""),
       ("the memory is checked", " or check_memory(facts)", ""),
       ("the structure is checked", "check_structure(facts) or ", ""))
    refusals = (
        "tests/planner/test_planfile.py::test_a_wrong_claim_is_refused_with_the_reason tests/planner/test_planfile.py::"
        "test_the_plan_of_a_smaller_graph_is_refused tests/planner/test_planfile.py::"
        "test_a_file_without_end_is_refused tests/planner/test_planfile.py::test_a_file_that_holds_no_plan_is_refused "
        "tests/planner/test_planfile.py::test_a_file_of_another_version_is_refused tests/planner/test_planfile.py::"
        "test_residents_elsewhere_are_refused_with_the_tensor tests/planner/test_planfile.py::"
        "test_other_answers_are_refused_with_the_tensor tests/planner/test_planfile.py::"
        "test_other_backends_are_refused_with_the_reason tests/planner/test_planfile.py::test_another_graph_is_refused")
    of("ggml_sched/planning/planfile.py", refusals,
       ("files have an end", "    if len(text) > MAX_FILE_BYTES:", "    if False:"),
       ("no JSON", "    except (ValueError, RecursionError) as error:", "    except ValueError as error:"),
       ("another kind of file", 'if not isinstance(data, dict) or data.get("format") != FORMAT:',
        "if not isinstance(data, dict):"),
       ("no dictionary", 'if not isinstance(data, dict) or data.get("format") != FORMAT:',
        'if data.get("format") != FORMAT:'),
       ("another version", '    if data.get("version") not in (1, VERSION):', "    if False:"),
       ("a policy", '    if not isinstance(data.get("policy"), str):', "    if False:"),
       ("another graph", '    if data.get("graph") != f"{graph.fingerprint:032x}":', "    if False:"),
       ("another number of tensors or backends",
        "    if made.n_tensors != len(graph.tensors) or len(made.buffer_sizes) != len(backends):", "    if False:"),
       ("wrong plans",
        '    except GraphError as error:\n        raise FileFormatError(f"{where}: {error}") from error\n    if made',
        '    except ZeroDivisionError as error:\n        raise FileFormatError(f"{where}: {error}") from error\n    '
        "if made"),
       ("other answers", '    if data.get("needs") != needs:', "    if False:"),
       ("another program", '    if data.get("program") != program_values(made._program):', "    if False:"),
       ("the order is of positions",
        "if not isinstance(order, list) or not all(type(k) is int and 0 <= k < len(graph) for k in order):",
        "if not isinstance(order, list):"),
       ("the order is a list",
        "if not isinstance(order, list) or not all(type(k) is int and 0 <= k < len(graph) for k in order):",
        "if not all(type(k) is int and 0 <= k < len(graph) for k in order):"),
       ("an order that sources forbid",
        '    except GraphError as error:\n        raise FileFormatError(f"{where}: {error}") from error\n\n',
        '    except ZeroDivisionError as error:\n        raise FileFormatError(f"{where}: {error}") from error\n\n'),
       ("backends are dictionaries", "    if not isinstance(old, list) or not all(isinstance(b, dict) for b in old):",
        "    if not isinstance(old, list):"),
       ("as many backends", "    if len(old) != len(new):", "    if False:"),
       ("equal backends", "            if a.get(field) != value:", "            if False:"),
       ("residents are a dictionary", "    if not isinstance(old, dict):", "    if False:"),
       ("equal residents", "        if old.get(i) != new.get(i):", "        if False:"),
       ("residents without a number", "names.get(i, i[:40])", "names[i]"),
       ("as many answers", "    if not isinstance(old, list) or len(old) != len(new):",
        "    if not isinstance(old, list):"))

    # -- data --

    of("ggml_sched/graph/hostdata.py", "tests/core/test_allocators.py::"
       "test_an_input_that_is_there_from_the_start_has_its_data_at_once tests/executor/test_reading_results.py "
       "tests/executor/test_results.py "
       "tests/executor/test_inputs.py tests/backends/test_values_out_of_range.py tests/backends/test_cpu_backend.py "
       "tests/backends/test_quants.py tests/core/test_first_generation_failures.py tests/executor/test_async.py "
       "tests/executor/test_queued_memory.py tests/executor/test_tensor_copy.py tests/backends/test_ops_copies.py "
       "tests/executor/test_copies_ring.py",
       ("results whose memory served others", "        tensor.lease.guard(tensor)\n", "        pass\n"),
       ("elements without end", "    if wrong is not None:\n", "    if False:\n"),
       ("elements without end that do not share bytes",
        "if count <= MAX_SHARED or count // kind.block_size * kind.type_size <= tensor.nbytes:",
        "if count <= MAX_SHARED:"),
       ("arrays that the host cannot hold", "    except MemoryError as error:",
        "    except ZeroDivisionError as error:"),
       ("as many blocks as there are",
        "        if values.size != tensor.n_elements // kind.block_size * kind.type_size:", "        if False:"),
       ("the shape of an array",
        "    elif _squeezed(values.shape) != _squeezed(shape_of(tensor)) and values.shape != (tensor.n_elements,):",
        "    elif False:"),
       ("bytes between rows stay", "    if tensor.is_contiguous:\n        span =", "    if True:\n        span ="),
       ("the host keeps what is set", "    if _is_staged(tensor):\n        _stash", "    if False:\n        _stash"),
       ("an allocator's leafs have their data at once", "        if not tensor.lease.through:\n            return\n",
        "        return\n"),
       ("queued computes end before data is set", "    wait_for_queued(tensor)\n    backend.set_tensor(tensor, span)",
        "    backend.set_tensor(tensor, span)"),
       ("queued computes end before results are looked for", "        wait_for_queued(tensor)\n    if tensor.lease",
        "        pass\n    if tensor.lease"),
       ("integers that NumPy would round", "        if all(isinstance(value, int) for value in objects.flat):",
        "        if False:"),
       ("only numbers are taken", '    if not ints and not np.can_cast(values.dtype, dtype, "same_kind"):',
        "    if False:"),
       ("integers in the range of the type", "            if not limits.min <= int(value) <= limits.max:",
        "            if False:"),
       ("what a node wrote over a leaf is read from memory",
        "return _is_staged(tensor) and not tensor.root.overwritten", "return _is_staged(tensor)"),
       ("inputs that were never set are not read", "if held is None and tensor.nbytes and not zeros:", "if False:"),
       ("views of nodes are not staged",
        "    while not tensor.computes and tensor.src:\n        tensor = tensor.src[0]\n", ""),
       ("a new version is loaded", "    root.touch()\n", ""),
       ("what is set after a node wrote", "root.overwritten, root.stash = False, stash", "root.stash = stash"),
       ("setting a view keeps the rest", "        held = _span(root, zeros=True)\n",
        "        held = bytearray(root.nbytes)\n"),
       ("integers beyond all floats", "    except OverflowError as error:", "    except ZeroDivisionError as error:"),
       ("tensors without memory", "    if backend is None:\n", "    if False:\n"))
    # -- models --

    of("ggml_sched/llama/gguf.py", "tests/llama/test_weights.py",
       ("a model is opened by its first part", "    if number != 0:\n", "    if False:\n"),
       ("parts are found by a name that counts them",
        "    if named is None or (int(named[2]), int(named[3])) != (1, n_parts):", "    if named is None:"),
       ("parts say which they are", "        if told != (k, n_parts):", "        if False:"),
       ("a tensor is in one part", "            if name in first.tensors:", "            if False:"),
       ("as many tensors as were told", "    if total is not None and total != len(first.tensors):", "    if False:"),
       ("bytes have no other parts", "    if n_parts > 1:\n", "    if False:\n"),
       ("a number of parts", "    if type(value) is not int or not 0 <= value <= MAX_PARTS:",
        "    if type(value) is not int:"),
       ("parts are closed together", "            part.close()\n", "            pass\n"),
       ("unknown types have no bytes", "        if type(info.type) is int:", "        if False:"))
    of("ggml_sched/llama/weights.py", "tests/llama/test_weights.py",
       ("unknown types are refused", "        if not isinstance(info.type, Type):", "        if False:"),
       ("what the architecture does not have", "if name not in known and not any(", "if False and not any("),
       ("only files are file-backed", "file_backed = file.mapped", "file_backed = True"),
       ("pages go as they are copied",
        "                part.forget(info.offset + start, info.offset + start + piece.nbytes)\n", ""),
       ("what is copied is reported", "                report.add(piece.nbytes)\n", ""),
       ("what is mapped is reported", "            report.add(stop - start)\n", ""))
    of("ggml_sched/backends/cpu/oracle/recurrent.py", "tests/backends/test_ops_recurrent.py",
       ("states that are there", "    job.do(check_ids, ids, table.shape[0], job)\n", ""),
       ("softplus of large steps", "np.where(step > LINEAR, step, np.log1p(np.exp(step)))", "np.log1p(np.exp(step))"),
       ("one state is kept", " or int_param(node, 0) not in (0, 1):", ":"))

    of("ggml_sched/backend.py", "tests/backends/test_backend_contract.py tests/backends/test_cpu_backend.py "
       "tests/backends/test_values_out_of_range.py tests/executor/test_tensor_copy.py "
       "tests/planner/test_beyond_upstream.py::test_a_host_weight_is_sent_again_after_it_was_set "
       "tests/executor/test_async.py::test_default_events_wait_when_they_are_recorded "
       "tests/executor/test_memory_rules.py tests/executor/test_scheduler_life.py tests/core/test_graphs.py",
       ("one buffer has a limit", "if self.max_buffer_size is not None and total > self.max_buffer_size:", "if False:"),
       ("addresses go when a hook raises", "                bind_resident(tensor, None, 0)\n",
        "                pass\n"),
       ("a buffer goes when a hook raises",
        "                bind_resident(tensor, None, 0)\n            buffer.close()\n",
        "                bind_resident(tensor, None, 0)\n"),
       ("what a scheduler lent is no address", "if tensor.view_src is None and (lent or tensor.buffer is None):",
        "if tensor.view_src is None and tensor.buffer is None:"),
       ("what has an address keeps it", "if tensor.view_src is None and (lent or tensor.buffer is None):",
        "if tensor.view_src is None:"),
       ("data is new when it is set", "            tensor.touch()\n            self.set_tensor_async",
        "            self.set_tensor_async"),
       ("setting is complete on return",
        "            self.set_tensor_async(tensor, view, offset)\n            self.synchronize()\n",
        "            self.set_tensor_async(tensor, view, offset)\n"),
       ("getting is complete on return",
        "            self.get_tensor_async(tensor, view, offset)\n            self.synchronize()\n",
        "            self.get_tensor_async(tensor, view, offset)\n"),
       ("tensors without address",
        '        if tensor.buffer is None:\n            raise PlacementError(f"tensor {tensor.name!r} has no '
        'address")\n        if', "        if"),
       ("tensors elsewhere", "        if tensor.backend is not self:", "        if False:"),
       ("ranges outside a tensor", "if offset < 0 or size > tensor.nbytes or offset > tensor.nbytes - size:",
        "if offset < 0:"),
       ("ranges before a tensor", "if offset < 0 or size > tensor.nbytes or offset > tensor.nbytes - size:",
        "if size > tensor.nbytes or offset > tensor.nbytes - size:"),
       ("buffers are filled with bytes", "        if not 0 <= index(value) <= 255:", "        if False:"),
       ("copies to itself", "    if src is dst:\n        return\n", ""),
       ("copies of equal layout", "    if not same_layout(src, dst):", "    if False:"),
       ("copies between addresses",
        '        if tensor.buffer is None:\n            raise PlacementError(f"tensor {tensor.name!r} has no '
        'address")\n    if src', "        pass\n    if src"),
       ("a copy is new data", "    dst.touch()\n    if here", "    if here"),
       ("copies are complete on return", "        here.synchronize()\n", ""),
       ("copies by the source are complete on return", "        there.synchronize()\n", ""),
       ("bytes between elements stay", "    if src.nbytes == _dense_bytes(src):", "    if True:"),
       ("recording waits", "        self.synchronize()\n\n    def event_wait", "        pass\n\n    def event_wait"),
       ("waiting for events of others", "        event.backend.event_synchronize(event)\n\n", "        pass\n\n"))

    # -- computing --

    of("ggml_sched/planning/planner.py", "tests/planner/test_guards.py tests/planner/test_reserve.py "
       "tests/planner/test_reorder.py::test_branches_are_taken_one_after_the_other_when_that_keeps_less_alive "
       "tests/planner/test_reorder.py::test_a_reordered_graph_computes_the_same_and_is_allocated_once "
       "tests/planner/test_reorder.py::test_where_one_order_exceeds_a_budget_the_other_is_taken "
       "tests/planner/test_planfile.py::test_an_adopted_plan_that_exceeds_a_budget_is_refused "
       "tests/planner/test_planfile.py::test_a_loaded_plan_computes tests/executor/test_scheduler_life.py "
       "tests/executor/test_memory_rules.py::test_what_is_held_counts_as_available_for_the_next_graph "
       "tests/executor/test_memory_rules.py::test_kept_weights_take_turns_where_they_do_not_fit "
       "tests/executor/test_memory_rules.py::test_a_plan_that_does_not_fit_is_refused_before_anything_is_allocated "
       "tests/planner/test_answers.py::test_answers_of_another_version_are_asked_for_anew "
       "tests/planner/test_answers.py::test_a_reset_forgets_answers",
       ("a leaner plan fits, too", "if self._excess(leaner, held) is None:", "if True:"),
       ("kept weights take turns", "        if any(plan.data.kept):", "        if False:"),
       ("streaming is in the key", "request.key, policy.stream, limits", "request.key, limits"),
       ("limits of buffers are in the key", "policy.stream, limits, self.devices.epoch()",
        "policy.stream, self.devices.epoch()"),
       ("answers are in the key", "limits, self.devices.epoch()", "limits"),
       ("residents are in the key", "return graph.fingerprint, request.key,", "return graph.fingerprint,"),
       ("what is held counts as available", "limit = free + held()[i]", "limit = free"),
       ("work memory counts", "needed = arena + work", "needed = arena"),
       ("work memory that is held counts as available", " + backend.work_held", ""),
       ("adopted plans fit", "        if excess is not None:\n            raise excess\n", ""),
       ("the other order may fit",
        "            return self._plan_order(graph, self._orders[graph], assigned, held)\n        try:",
        "            raise\n        try:"),
       ("the other order may not fit", "            return given\n", "            raise\n"),
       ("the smaller of two orders", "return min(given, other, key=lambda found: sum(found[0].buffer_sizes))",
        "return other"),
       ("the cache is bounded", "while len(self._cache) > self.cache_size:", "while False:"),
       ("what is used stays in the cache", "            self._cache.move_to_end(key)\n", "            pass\n"),
       ("without a cache nothing is replayed", "if self.cache_size and not policy.stream:", "if not policy.stream:"),
       ("a reset forgets what was adopted", "        self._adopted.clear()\n", ""),
       ("a reset forgets what was planned", "        self._cache.clear()\n", ""),
       ("a reset forgets what was reserved", "        self._reserved.clear()\n", ""),
       ("budgets", "            if needed > limit:", "            if False:"))
    of("ggml_sched/threads/_locks.pyx", "tests/executor/test_scheduler_life.py tests/executor/test_locks.py",
       ("one call at a time", "        if self.locked:\n            raise", "        if False:\n            raise"),
       ("a closed scheduler", "        if self.closed:\n", "        if False:\n"),
       ("a fork unlocks", "        if self.pid != getpid():", "        if False:"),
       ("a lock is waited for", "        if not PyThread_acquire_lock(self.lock, NOWAIT_LOCK):", "        if False:"),
       ("a lock is given back", "            PyThread_release_lock(self.lock)\n", ""),
       ("nothing is given back that a fork took away", "        if self.locked:\n            self.locked = False\n",
        "        if True:\n            self.locked = False\n"),
       ("waiting ends with a signal", "                PyErr_CheckSignals()\n", ""))
    of("ggml_sched/execution/scheduler.py", "tests/executor/test_scheduler_life.py tests/executor/test_arena_growth.py "
       "tests/planner/test_planfile.py::test_what_is_adopted_fits_the_scheduler tests/planner/test_planfile.py::"
       "test_an_adopted_plan_is_used_though_the_graph_was_allocated_before tests/planner/test_planfile.py::"
       "test_a_loaded_plan_computes tests/executor/test_copies_ring.py::test_the_first_generation_knows_no_ring "
       "tests/executor/test_callbacks.py::test_ask_alone_makes_no_sense tests/planner/test_default_placement.py::"
       "test_a_stranger_is_refused tests/planner/test_default_placement.py::"
       "test_assignments_work_before_and_after_planning_and_survive_a_reset tests/executor/test_prepared.py "
       "tests/executor/test_async.py",
       ("a backend twice", "        if len({id(backend) for backend in backends}) != len(backends):",
        "        if False:"),
       ("plans of other backends", "            if plan.backends != self.backends or plan.policy != self.policy:",
        "            if plan.policy != self.policy:"),
       ("plans of other policies", "            if plan.backends != self.backends or plan.policy != self.policy:",
        "            if plan.backends != self.backends:"),
       ("unsound plans", "            plan.verify()\n", ""),
       ("an adopted plan is used from now on",
        "            self._planner.adopt(plan, self._assigned)\n            self._allocations.forget_assignments()\n",
        "            self._planner.adopt(plan, self._assigned)\n"),
       ("after a failure it is as before", "                self._allocations.put(*before)\n",
        "                pass\n"),
       ("queued computes end before another compute",
        "            if not self._pipeline.is_idle and not self._pipeline.is_in_order:\n"
        "                self._synchronize()\n", ""),
       ("ask needs a callback", "        if ask is not None and callback is None:", "        if False:"),
       ("strangers are not assigned to", "            if backend is not None:\n                self._index(backend)\n",
        ""),
       ("an assignment ends what was planned",
        "                self._assigned[t] = backend\n            self._allocations.forget_assignments()\n",
        "                self._assigned[t] = backend\n"),
       ("errors of queued computes are raised", "        if error is not None:\n            raise error\n", ""),
       ("closing again", "        if self.closed:\n            return\n", ""),
       ("closing gives arenas back", "self._allocations.vacate, self._arenas.close, self._pipeline.close",
        "self._allocations.vacate, self._pipeline.close"),
       ("closing ends threads", "self._allocations.vacate, self._arenas.close, self._pipeline.close",
        "self._allocations.vacate, self._arenas.close"))
    of("ggml_sched/execution/arenas.py", "tests/executor/test_scheduler_life.py tests/executor/test_arena_growth.py "
       "tests/executor/test_inputs.py tests/executor/test_prepared.py tests/executor/test_memory_rules.py::"
       "test_chunks_grow_and_serve_smaller_graphs tests/executor/test_failure_injection.py::"
       "test_failures_while_giving_back_leave_nothing_behind",
       ("closed arenas do not hold", "if buffer.closed or buffer.size < size:", "if buffer.size < size:"),
       ("small arenas do not hold", "if buffer.closed or buffer.size < size:", "if buffer.closed:"),
       ("arenas that held may be closed", "            return self.are_open()\n", "            return True\n"),
       ("as many chunks", "            if len(held) < len(wanted):", "            if False:"),
       ("old ones go where both do not fit", "        return free is not None and free <",
        "        return False and free <"),
       ("old ones come back", "            self._exchange(crowded, vacate)\n", "            pass\n"),
       ("new ones go when not all can be had", "            each(buffer.close for buffer in fresh.values())\n", ""),
       ("old ones go", "        each(buffer.close for buffer in replaced)\n", ""),
       ("who lives in them is told", '                fresh[i, chunk].usage = "compute"\n            vacate()\n',
        '                fresh[i, chunk].usage = "compute"\n'),
       ("all are given back", "        each(buffer.close for buffer in held)\n", ""))
    of("ggml_sched/execution/allocation_cache.py",
       "tests/executor/test_prepared.py tests/executor/test_scheduler_life.py "
       "tests/executor/test_inputs.py tests/executor/test_copies_ring.py tests/executor/test_async.py "
       "tests/planner/test_answers.py::test_answers_of_another_version_are_asked_for_anew "
       "tests/executor/test_queued_memory.py",
       ("what has changed is allocated anew", "if not self._is_fresh(current, graph) or not current.lease.alive:",
        "if not current.lease.alive:"),
       ("displaced tensors are addressed again", "            if current.lease.displaced:", "            if False:"),
       ("assignments", "found.assignments == self._assignments", "True"),
       ("closed buffers", "residents + self._arenas.all", "residents"),
       ("weights and answers", "self._devices.unchanged(graph, found.watched, found.epoch, found.answers)", "True"),
       ("without a cache nothing is used again", "return (self._capacity > 0 and ", "return ("),
       ("queued computes end before buffers go",
        '        """End every allocation: the buffers are about to go."""\n        self.drain()\n',
        '        """End every allocation: the buffers are about to go."""\n'),
       ("queued computes end before another graph", "            return\n        self.drain()\n",
        "            return\n"),
       ("data is moved again after a failure", "            self.current.forget(self._pipeline.why)\n",
        "            pass\n"),
       ("what rests ends with the buffers", "        ended = [*self._resting.values()] + ([self.current] if",
        "        ended = ([self.current] if"),
       ("the current one ends with the buffers", " + ([self.current] if self.current is not None else [])", ""),
       ("graphs that are gone keep nothing", "                released.append(self._resting.pop(found.key))\n",
        "                pass\n"),
       ("what is replaced is released", "            released.append(self._resting.pop(id(asked)))\n",
        "            self._resting.pop(id(asked))\n"),
       ("no more rest than may", "        while len(self._resting) > self._capacity:", "        while False:"))
    late = " ".join(f"tests/executor/test_late.py::{name}" for name in (
        "test_queued_computes_use_their_own_inputs", "test_the_caller_waits_for_nothing_but_results",
        "test_an_error_that_comes_late_is_raised_by_synchronize_and_everything_works_again",
        "test_one_compute_after_the_other_gives_the_same", "test_what_a_third_device_sends_is_there_when_it_is_read",
        "test_an_input_is_not_loaded_before_another_device_has_read_the_one_before",
        "test_nothing_is_issued_behind_a_failure", "test_no_more_computes_are_queued_than_may_be",
        "test_copies_that_only_their_source_can_make_give_the_same",
        "test_who_waits_for_a_step_that_was_left_out_waits_for_those_before_it",
        "test_copies_that_go_through_the_host_give_the_same"))
    of("ggml_sched/execution/allocation.py",
       "tests/executor/test_results.py tests/executor/test_reading_results.py tests/executor/test_inputs.py "
       "tests/executor/test_prepared.py tests/executor/test_callbacks.py tests/executor/test_copies_ring.py "
       "tests/executor/test_straight.py "
       "tests/executor/test_queued_memory.py tests/executor/test_scheduler_life.py "
       "tests/executor/test_async.py tests/executor/test_failure_injection.py::"
       "test_a_backend_that_fails_to_synchronize_does_not_hide_the_first_error "
       "tests/planner/test_beyond_upstream.py " + late,
       ("results whose memory was reused", "if i >= 0 and allocation.data.is_overwritten(i):", "if False:"),
       ("a callback reads while it runs", "if allocation is None or allocation.is_running:", "if allocation is None:"),
       ("what was set is on the host", '            if node.op == "NONE" and not node.overwritten:',
        "            if False:"),
       ("leafs that a node wrote to", '            if node.op == "NONE" and not node.overwritten:',
        '            if node.op == "NONE":'),
       ("data is moved again when it comes back", "        self._seen.forget()\n        self._lose_results()",
        "        self._lose_results()"),
       ("no results when it comes back", "        self._lose_results()\n", ""),
       ("displaced tensors are bound again", "        if self.lease.revive():\n",
        "        self.lease.revive()\n        if False:\n"),
       ("addresses end", "        self.lease.end()\n", ""),
       ("what was prepared is freed", "            each(step.free for step in steps)\n", "            pass\n"),
       ("data is moved again after a failed compute",
        "        except BaseException as error:\n            self.forget(str(error))\n"
        "            self._wait(quietly=True)\n",
        "        except BaseException:\n            self._wait(quietly=True)\n"),
       ("backends are done after a failure", "            self._wait(quietly=True)\n", ""),
       ("the first error is raised", "            if not quietly:\n                raise\n", "            raise\n"),
       ("a compute waits for its backends", "        self._wait()\n", ""),
       ("what is on its way stays alive", "            self.is_running = False\n        self._end(",
        "            self.is_running = False\n            compute = alive = None\n        self._end("),
       ("reading waits for what is queued", "            self.lease.queue(self.graph(), pipeline.drain_weakly)\n", ""),
       ("results of a compute that failed", "        self._seen.forget()\n        self._end(0)",
        "        self._seen.forget()"),
       ("results of a queued compute that failed", "        allocation.check_queued()\n", ""),
       ("results that were never computed", "not allocation.has_computed(node):", "False:"),
       ("results behind a stop", "self._positions[stopped_at] + 1", "len(self.nodes)"),
       ("waits on steps that were left out", "            self._ends[k] = self._last[bound.backend]\n",
        "            pass\n"),
       ("observed runs wait", "                    bound.backend.event_wait(event)\n", "                    pass\n"),
       ("a callback sees what was computed", "                        bound.backend.synchronize()\n", ""),
       ("a stop stops",
        "                        if says_no(callback(node)):\n                            return node\n",
        "                        callback(node)\n"),
       ("a stop after a write stops",
        "                if says_no(callback(node)):\n                    return node\n        return None",
        "                callback(node)\n        return None"))
    of("ggml_sched/execution/_steps.pyx",
       late +
       " tests/executor/test_copies_ring.py tests/executor/test_callbacks.py tests/executor/test_prepared.py "
       "tests/executor/test_async.py tests/planner/test_beyond_upstream.py tests/executor/test_tensor_copy.py "
       "tests/executor/test_inputs.py tests/executor/test_results.py tests/executor/test_reading_results.py "
       "tests/executor/test_straight.py",
       ("inputs are set", "        if leaf.stash is None:\n            if not zero:",
        "        if leaf.stash is None:\n            if False:"),
       ("what a graph writes to is new data", "        if root.is_resident:\n            root.version += 1\n",
        "        if root.is_resident:\n            pass\n"),
       ("leafs that a graph writes to", "            root.overwritten = first < n_done\n", "            pass\n"),
       ("leafs that were not written yet", "root.overwritten = first < n_done", "root.overwritten = True"),
       ("a place holds a version", "        if self.versions.get(place) == version:",
        "        if place in self.versions:"),
       ("what is there is not brought again", "        if self.versions.get(place) == version:", "        if False:"),
       ("backends that were given ways of their own",
        "                or not is_method(self.tensor.c_buffer().backend.set_tensor_async, Backend.set_tensor_async)):",
        "                ):"),
       ("backends that are not done are waited for", "    if waits:\n        each(waits)\n", ""),
       ("memory that was closed", "    if backend is None:\n", "    if False:\n"),
       ("loads wait", "                backend.event_wait(event)\n", "                pass\n"),
       ("ids in range", "            if 0 <= i < src.ne[2]:\n", "            if True:\n"),
       ("runs wait", "            self.backend.event_wait(event)\n", "            pass\n"),
       ("copies wait", "        queue.event_wait(event)\n", "        pass\n"),
       ("pushes are to who takes data", "if queue is there and here.concurrent_copies and", "if queue is there and"),
       ("pushes are from the source's queue", "if queue is there and here.concurrent_copies and",
        "if here.concurrent_copies and"),
       ("the copying backend follows the queue", "        _let_follow(backend, queue)\n", ""),
       ("the queue follows the copying backend", "            return _let_follow(queue, backend)\n",
        "            return None\n"),
       ("the queue follows what the host brings", "    return _let_follow(queue, here)\n", "    return None\n"),
       ("events are waited for", "    later.event_wait(event)\n", ""),
       ("events are recorded", "    earlier.event_record(event)\n", ""),
       ("NumPy's no is one", " or isinstance(answer, np.bool_) and not answer", ""))
    of("ggml_sched/execution/pipeline.py",
       "tests/executor/test_async.py tests/executor/test_queued_memory.py " + late +
       " tests/executor/test_overlap.py tests/executor/test_copies_ring.py tests/executor/test_failure_injection.py::"
       "test_a_backend_that_fails_to_synchronize_does_not_hide_the_first_error",
       ("what is behind a failure is skipped", "        if compute.number < state.failed:", "        if True:"),
       ("what is issued behind a failure is skipped", "            elif compute.number < self._state.failed:",
        "            else:"),
       ("steps wait for steps", "            other.issued.wait()\n", "            pass\n"),
       ("the end of a step is an event", "            ticket.event = end\n", "            pass\n"),
       ("so many computes in flight", "        while len(self._in_flight) >= self._limit:", "        while False:"),
       ("the end of a compute is waited for", "                ticket.event.backend.event_synchronize(ticket.event)\n",
        "                pass\n"),
       ("steps that were left out", "            elif task.awaited and task.backend in self._last:",
        "            elif False:"),
       ("draining waits for threads", "        state.wait()\n        for backend", "        for backend"),
       ("draining waits for backends", "                backend.synchronize()\n", "                pass\n"),
       ("late errors are kept", "            except Exception as error:\n                state.fail(error)\n",
        "            except Exception:\n                pass\n"),
       ("an error is raised once", "error, self._state.error, self._state.failed = self._state.error, None, inf",
        "error = self._state.error"),
       ("closing ends threads", "            crew.close()\n        self._start_anew()\n\n    def _crew",
        "            pass\n        self._start_anew()\n\n    def _crew"))
    for group in (*guards_models.GROUPS, *guards_files.GROUPS, *guards_backends.GROUPS, *guards_fusion.GROUPS,
                  *guards_hook.GROUPS):
        of(*group)
    return found


EDITS = _edits()
