"""The independent checker: a corruption for every reason it can give, and sound plans that must pass."""

import pickle
import re
from dataclasses import replace
from itertools import product
from random import Random

import pytest
from configs import CONFIGURATIONS, sample_paths, sample_plan
from devices import resident_tensor
from processes import run_python
from random_problems import plan_of, random_case
from small_graphs import dry_device, two_layers

import ggml_sched as gs
from ggml_sched.planning.program import Program
from ggml_sched.planning.verify import REASONS, Facts, check, check_dataflow, lives, require_sound
from ggml_sched.planning.verify.dataflow import Memory
from ggml_sched.planning.verify.facts import acts


def problems(plan):
    return check(plan.facts)


# -- forging facts ----------------------------------------------------------------------------------


def edit(facts: Facts, **changes) -> Facts:
    """Facts with some entries of some lists replaced: `edit(facts, offset={3: 64})`."""
    fields = {}
    for field, entries in changes.items():
        old = getattr(facts, field)
        if isinstance(old, list) and isinstance(entries, dict):
            fields[field] = [entries.get(i, value) for i, value in enumerate(old)]
        else:
            fields[field] = entries
    return with_locations(replace(facts, **fields))


def with_locations(facts: Facts) -> Facts:
    """Facts whose program is compiled anew after the edit of backends and offsets."""
    def told(locations):
        return tuple(p._replace(backend=facts.arena_of[p.id], chunk=facts.chunk[p.id], offset=facts.offset[p.id])
                     for p in locations)

    def retold(step):
        if step.kind == "run":
            reads = tuple(r._replace(locations=told(r.locations)) for r in step.reads)
            return step._replace(reads=reads, into=told(step.into))
        return step._replace(locations=told(step.locations))

    return with_steps(facts, [retold(step) for step in facts.program.steps])


def with_steps(facts: Facts, steps) -> Facts:
    """Another program of as many steps."""
    return replace(facts, program=Program(tuple(steps), facts.program.inputs, facts.program.copy_slots))


def rearranged(facts: Facts, order: list[int]) -> Facts:
    """A program of these steps of the old one, in this order; waits for steps that are gone go, too."""
    at = {old: new for new, old in enumerate(order)}
    steps = []
    for new, old in enumerate(order):
        step = facts.program.steps[old]
        waits = [w._replace(step=at[w.step], back=max(w.back, at[w.step] >= new)) for w in step.waits if w.step in at]
        steps.append(step._replace(waits=tuple(waits)))
    return with_steps(facts, steps)


def steps_of(facts: Facts, kind: str) -> list[int]:
    return [k for k, step in enumerate(facts.program.steps) if step.kind == kind]


def changed(facts: Facts, k: int, **fields) -> Facts:
    """Step k with other fields."""
    steps = list(facts.program.steps)
    steps[k] = steps[k]._replace(**fields)
    return with_steps(facts, steps)


def spread(facts: Facts) -> Facts:
    """The same plan with every id in memory of its own, so that only its order can be wrong."""
    offset, size, ends = list(facts.offset), list(facts.size), dict.fromkeys(facts.arena_sizes, 0)
    owners = [i for i in range(len(offset)) if facts.view_of[i] < 0 and facts.arena_of[i] >= 0 and offset[i] >= 0]
    for i in owners:
        key = facts.arena_of[i], facts.chunk[i]
        step = facts.alignment[facts.arena_of[i]]
        offset[i] = ends[key]
        size[i] = -(-facts.need[i] // step) * step
        ends[key] += size[i]
    for i, root in enumerate(facts.view_of):
        if root >= 0 and facts.offset[i] >= 0:
            offset[i] = offset[root] + facts.view_offs[i]
    not_inplace = [False] * len(offset)
    return edit(facts, offset=offset, size=size, arena_sizes=ends, shares=list(facts.view_of),
                is_inplace=not_inplace, live_bytes=(0,) * len(facts.backends), overwritten=frozenset())


def with_split(facts: Facts, k: int, **fields) -> Facts:
    return replace(facts, splits=[*facts.splits[:k], facts.splits[k]._replace(**fields), *facts.splits[k + 1 :]])


def take_over(facts: Facts, new: str, old: str) -> Facts:
    """Claim that one tensor is written in place over another."""
    x, y = at(facts, new), at(facts, old)
    return edit(facts, shares={x: y}, is_inplace={x: True}, offset={x: facts.offset[y]}, size={x: 0})


def at(facts: Facts, name: str) -> int:
    return facts.name.index(name)


def layered() -> Facts:
    """x, h1, a1 (over h1), [copy] h2, [copy] a2, flat (a view), out; two splits on A, one on B between."""
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    graph, _ = two_layers(a, b)
    facts = gs.Scheduler([a, b], policy="seed").plan(graph).facts
    assert check(facts) == []
    return facts


def forked(op: str = "silu", output: bool = False) -> Facts:
    """h is read by s = op(h) and, unless it is an output, once more by t = h + s."""
    a = gs.DryBackend("A")
    ctx = gs.Context()
    h = ctx.set_name(ctx.mul_mat(ctx.tensor("f32", (8, 8), "w"), ctx.tensor("f32", (8, 4), "x")), "h")
    s = ctx.set_name(getattr(ctx, op)(h), "s")
    if output:
        ctx.set_output(h)
    facts = gs.Scheduler([a], policy="seed").plan(gs.Graph(s if output else ctx.add(h, s))).facts
    assert check(facts) == []
    return facts


def zigzag() -> Facts:
    """p on B, q on A, r on B again."""
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    x = ctx.tensor("f32", (8, 4), "x")
    for name, backend in (("p", b), ("q", a), ("r", b)):
        x = ctx.set_name(ctx.mul_mat(resident_tensor(backend, (8, 8), f"w{name}"), x), name)
    facts = spread(gs.Scheduler([a, b], policy="seed").plan(gs.Graph(x)).facts)
    assert check(facts) == []
    return facts


def cached(write_on: str = "A") -> Facts:
    """B reads a cache of A, then a node writes to the cache, then B reads it again."""
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    kv = resident_tensor(a, (8, 4), "kv", usage="any")
    x = ctx.tensor("f32", (8, 4), "x")
    before = ctx.set_name(ctx.add(kv, x), "before")
    write = ctx.set_name(ctx.cpy(before, kv), "write")
    after = ctx.set_name(ctx.add(kv, before), "after")
    scheduler = gs.Scheduler([a, b], policy="seed")
    for t, backend in ((x, b), (before, b), (after, b), (write, a if write_on == "A" else b)):
        scheduler.set_tensor_backend(t, backend)
    facts = spread(scheduler.plan(gs.Graph(before, write, after)).facts)
    assert check(facts) == []
    return facts


def forge_wrong_order():
    facts = layered()
    return replace(facts, sequence=[facts.sequence[1], facts.sequence[0], *facts.sequence[2:]])


def forge_bad_copy():
    facts = layered()
    h2 = at(facts, "h2")
    return edit(facts, reads={h2: (facts.reads[h2][0], at(facts, "x"))})


def forge_missing_copy():
    """A node reads the original, which lives on another backend."""
    facts = layered()
    facts = edit(facts, reads={at(facts, "h2"): facts.src[at(facts, "h2")]})
    (run,) = [k for k in steps_of(facts, "run") if facts.program.steps[k].reads and facts.nodes[
        facts.program.steps[k].first] == at(facts, "h2")]
    return changed(facts, run, reads=())


def forge_copy_before_write():
    facts = zigzag()
    last, order = steps_of(facts, "copy")[-1], list(range(len(facts.program)))
    order.remove(last)
    return rearranged(facts, [last, *order])


def forge_read_before_write():
    """The leaf is loaded when its reader has run."""
    facts = zigzag()
    (load,), order = steps_of(facts, "load"), list(range(len(facts.program)))
    order.remove(load)
    return rearranged(facts, [*order, load])


def forge_stale_read():
    """The copy of the cache is not made again after the cache was written to."""
    facts = cached()
    again = [k for k in steps_of(facts, "copy") if facts.program.steps[k].tensor == at(facts, "kv")][-1]
    return rearranged(facts, [k for k in range(len(facts.program)) if k != again])


def forge_partial_read():
    """Only the experts that other ids name are copied."""
    facts, other = mixture()
    k = next(k for k in steps_of(facts, "copy experts") if facts.program.steps[k].ids != other)
    return changed(facts, k, ids=other)


def forge_not_run():
    facts = layered()
    run = steps_of(facts, "run")[0]
    return changed(facts, run, first=facts.program.steps[run].first + 1)


def forge_bad_step():
    facts = layered()
    copy = steps_of(facts, "copy")[0]
    location = facts.program.steps[copy].locations[0]
    return changed(facts, copy, locations=(location._replace(offset=location.offset + 32),))


def forge_unordered():
    facts = layered()
    waiting = next(k for k, step in enumerate(facts.program.steps) if step.waits)
    return changed(facts, waiting, waits=())


def mixture() -> tuple[Facts, int]:
    """A mixture whose experts are streamed from the host, and the id of other ids of the same shape."""
    host, device = gs.DryBackend("host"), dry_device("device", offload=lambda t: t.op == "MUL_MAT_ID")
    ctx = gs.Context()
    value = x = ctx.tensor("f32", (8, 1, 2), "x", input=True)
    ids, other = (ctx.tensor("i32", (1, 2), name, input=True) for name in ("ids", "other"))
    for k in range(3):
        weight = resident_tensor(host, (4, 8, 4) if k == 1 else (8, 4, 4), f"e{k}")
        value = ctx.mul_mat_id(weight, value, ids if k else other)
    facts = gs.Scheduler([device, host]).plan(gs.Graph(value)).facts
    assert check(facts) == [] and x.name == "x"
    copies = steps_of(facts, "copy experts")
    assert len(copies) == 3
    return facts, at(facts, "other")


def forge_missing_input():
    facts = layered()
    program = facts.program
    return replace(facts, program=Program(program.steps, program.inputs[1:], program.copy_slots))


def forge_clobbered_read():
    facts = replace(forked(), overwritten=frozenset({at(forked(), "h")}))
    return edit(facts, offset={at(facts, "s"): facts.offset[at(facts, "h")]})


def forge_inplace_layout():
    a, ctx = gs.DryBackend("A"), gs.Context()
    h = ctx.set_name(ctx.mul_mat(ctx.tensor("f32", (8, 8), "w"), ctx.tensor("f32", (8, 4), "x")), "h")
    s = ctx.set_name(ctx.sum_rows(h), "s")
    return take_over(gs.Scheduler([a], policy="seed").plan(gs.Graph(s)).facts, "s", "h")


def forge_lost_write():
    facts = replace(cached("B"), write_backs={})
    run = next(k for k in steps_of(facts, "run") if facts.program.steps[k].into)
    facts = changed(facts, run, into=())
    return rearranged(facts, [k for k in range(len(facts.program)) if k not in steps_of(facts, "write back")])


CORRUPTIONS = {
    "bad-index": lambda: edit(layered(), arena_of={2: 7}),
    "split-gap": lambda: with_split(layered(), 0, stop=1),
    "wrong-order": forge_wrong_order,
    "wrong-backend": lambda: edit(layered(), assigned={at(layered(), "h1"): 1}),
    "unsupported-op": lambda: edit(layered(), supported={at(layered(), "h1"): False}),
    "resident-moved": lambda: edit(layered(), arena_of={at(layered(), "w1"): 0}, offset={at(layered(), "w1"): 0}),
    "unplaced": lambda: edit(layered(), offset={at(layered(), "a1"): -1}),
    "view-misplaced": lambda: edit(layered(), offset={at(layered(), "flat"): 32}),
    "bad-copy": forge_bad_copy,
    "misaligned": lambda: edit(layered(), offset={at(layered(), "x"): 4}),
    "too-small": lambda: edit(layered(), size={at(layered(), "x"): 96}),
    "out-of-bounds": lambda: edit(layered(), offset={at(layered(), "x"): 224}),
    "live-bytes": lambda: edit(layered(), live_bytes=(1 << 20, 0)),
    "overlap": lambda: edit(layered(), offset={at(layered(), "x"): 128}),
    "inplace-live": lambda: take_over(forked(), "s", "h"),
    "inplace-layout": forge_inplace_layout,
    "inplace-not-tolerated": lambda: edit(layered(), tolerates={at(layered(), "a1"): 0}),
    "output-overwritten": lambda: take_over(forked(output=True), "s", "h"),
    "missing-copy": forge_missing_copy,
    "copy-before-write": forge_copy_before_write,
    "read-before-write": forge_read_before_write,
    "stale-read": forge_stale_read,
    "lost-write": forge_lost_write,
    "partial-read": forge_partial_read,
    "missing-input": forge_missing_input,
    "wrong-overwritten": lambda: replace(forked(), overwritten=forked().overwritten - {at(forked(), "h")}),
    "not-run": forge_not_run,
    "bad-group": lambda: replace(layered(), groups=((0, 2),)),     # nodes of two splits
    "bad-step": forge_bad_step,
    "unordered": forge_unordered,
}


# -- every reason of a failure -------------------------------------------------------------------------------------


def test_every_reason_has_a_corruption():
    # What reads clobbered bytes overlaps first, so that check is tested on its own below; wrong ranges are tested with
    # the other bugs of fetches (test_fetching.py).
    assert set(CORRUPTIONS) | {"clobbered-read", "wrong-range"} == set(REASONS)


def test_a_tensor_that_nothing_overwrites_is_not_refused_to_readers():
    facts = spread(forked())
    assert check(facts) == []
    facts = replace(facts, overwritten=frozenset({at(facts, "h")}))
    assert [p.reason for p in check(facts)] == ["wrong-overwritten"]


@pytest.mark.parametrize(("ne", "nb", "reasons"), [
    ((8, 4, 4, 1), (4, 32, 128, 512), set()),
    ((8, 4, 4, 1), (4, 128, 32, 512), {"partial-read"}),    # the rows of the experts take turns
    ((8, 4, 4, 1), (4, 32, 124, 512), {"partial-read"}),    # one element is of two experts
    ((8, 4, 2, 2), (4, 32, 128, 256), {"partial-read"}),    # a number names two matrices
])
def test_experts_that_share_bytes_do_not_travel_one_by_one(ne, nb, reasons):
    facts, _ = mixture()
    weight = facts.program.steps[steps_of(facts, "copy experts")[0]].tensor
    facts = edit(facts, layout={weight: (facts.layout[weight][0], ne, nb)})
    assert {p.reason for p in check_dataflow(facts)} == reasons


@pytest.mark.parametrize("shape", [(8, 4, 4), (8, 4, 2, 2)])
def test_a_weight_of_four_dimensions_travels_whole(shape):
    host, device = gs.DryBackend("host"), dry_device("device", offload=lambda t: t.op == "MUL_MAT_ID")
    ctx = gs.Context()
    x, ids = ctx.tensor("f32", (8, 1, 2), "x", input=True), ctx.tensor("i32", (1, 2), "ids", input=True)
    weights = [resident_tensor(host, shape, f"e{k}") for k in range(3)]     # so many that they are not kept
    products = [ctx.restore("MUL_MAT_ID", "f32", (4, 1, 2, 1), (4, 16, 16, 32), [w, x, ids]) for w in weights]
    plan = gs.Scheduler([device, host]).plan(gs.Graph(ctx.add(ctx.add(*products[:2]), products[2])))
    plan.verify()
    kinds = {step.kind for step in plan.program.steps if "copy" in step.kind}
    assert kinds == {"copy experts" if len(shape) == 3 else "copy"}


@pytest.mark.parametrize("reason", CORRUPTIONS)
def test_a_corrupted_plan_gives_exactly_its_reason(reason):
    found = check(CORRUPTIONS[reason]())
    assert {p.reason for p in found} == {reason}, [str(p) for p in found]


def test_execution_alone_sees_clobbered_bytes_and_overwritten_outputs():
    assert {p.reason for p in check_dataflow(forge_clobbered_read())} == {"clobbered-read"}
    assert {p.reason for p in check_dataflow(CORRUPTIONS["output-overwritten"]())} == {"output-overwritten"}


def test_messages_name_tensors_backends_and_numbers():
    message = str(check(CORRUPTIONS["overlap"]())[0])
    assert "'h1' (MUL_MAT) at [128, 256) of A" in message and "'x' (NONE) at [128, 256) of A" in message


def test_a_source_in_two_slots_is_not_taken_over():
    a, ctx = gs.DryBackend("A"), gs.Context()
    h = ctx.set_name(ctx.mul_mat(ctx.tensor("f32", (8, 8), "w"), ctx.tensor("f32", (8, 4), "x")), "h")
    s = ctx.set_name(ctx.add(h, h), "s")
    facts = gs.Scheduler([a], policy="seed").plan(gs.Graph(s)).facts
    assert {p.reason for p in check(take_over(facts, "s", "h"))} == {"inplace-not-tolerated"}


def test_what_is_kept_lives_always():
    facts = layered()
    k = steps_of(facts, "copy")[0]
    copy = facts.program.steps[k].locations[0].id
    kept = changed(facts, k, if_changed=True)
    life = next(life for life in lives(kept) if life.id == copy)
    n_acts = sum(1 for _ in acts(facts))
    assert (life.birth, life.death) == (-1, n_acts)


def test_an_unsound_plan_raises_a_hazard_error_with_the_reason():
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    graph, _ = two_layers(a, b)
    plan = gs.Scheduler([a, b], policy="seed").plan(graph)
    plan.verify()
    facts = edit(plan.facts, supported={at(layered(), "h1"): False})
    with pytest.raises(gs.HazardError, match="h1.*A, which does not support it") as caught:
        require_sound(facts)
    assert caught.value.reason == "unsupported-op"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.reason, str(again)) == (caught.value.reason, str(caught.value))


# -- memory that records the writer of each byte --------------------------------------------------------------------


def test_memory_remembers_who_wrote_each_byte():
    memory = Memory()
    memory.write(0, 100, [(0, 100, 1, 0)])
    memory.write(40, 60, [(0, 20, 2, 0)])
    assert memory.read(30, 70) == [(0, 10, 1, 30), (10, 30, 2, 0), (30, 40, 1, 60)]
    memory.write(40, 60, [(0, 20, 1, 40)])
    assert memory.read(0, 100) == [(0, 100, 1, 0)], "pieces that continue one another are one"
    assert memory.read(90, 120) == [(0, 10, 1, 90)], "bytes that were never written are left out"
    memory.write(0, 10, [(0, 10, 2, 0)])
    assert memory.read(0, 100) == [(0, 10, 2, 0), (10, 100, 1, 10)]
    memory.write(0, 100, [])
    assert memory.read(0, 100) == []


# -- sound plans -----------------------------------------------------------------------------------------


EVERY_RUN = {"decode": {("c4", "seed"), ("c4", "default")}, "gpt2-124m-prefill512": {("c2half", "default")},
             "mixtral-8x7b-prefill512": {("c2half", "default")}}


def is_default(name: str, run: tuple[str, str]) -> bool:
    return run in EVERY_RUN.get(name, EVERY_RUN.get(name.rpartition("-")[2], ()))


SAMPLES = [pytest.param(path, *run, id="-".join((name, *run)), marks=() if is_default(name, run) else pytest.mark.soak)
           for path in sample_paths() for name in [path.name.removesuffix(".json.gz")]
           for run in product(CONFIGURATIONS, ("seed", "default"))]


@pytest.mark.spread("path", "config policy")
@pytest.mark.parametrize("path, config, policy", SAMPLES)
def test_plans_of_sample_graphs_are_sound(path, config, policy):
    """Decoders, and two prompts, in a configuration with many splits, by one policy or the other; others are soaks."""
    sample_plan(path, config, policy).verify()


@pytest.mark.parametrize("policy", ["seed", "default"])
@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 5))])
def test_plans_of_random_graphs_are_sound(block, policy):
    for seed in range(block * 60, block * 60 + 60):
        assert problems(plan_of(random_case(Random(seed)), policy)) == [], seed


def test_large_graphs_are_checked_in_reasonable_time(ctx):
    x = ctx.tensor("f32", (4,), "x")
    parts = [ctx.mul(x, x) for _ in range(1500)]
    total = parts[0]
    for part in parts[1:]:
        total = ctx.add(total, part)
    assert problems(gs.Scheduler([gs.DryBackend("A")], policy="seed").plan(gs.Graph(*parts, total))) == []


@pytest.mark.parametrize("policy", ["seed", "default"])
def test_small_and_empty_plans_are_sound(ctx, policy):
    x, nothing = ctx.tensor("f32", (4,), "x"), ctx.tensor("f32", (0, 4), "nothing")
    outputs = [x, ctx.reshape(x, 2, 2), ctx.scale(nothing, 2.0), ctx.scale(x, 2.0, inplace=True)]
    for graph in (gs.Graph(), *map(gs.Graph, outputs)):
        backends = [gs.DryBackend("A"), gs.DryBackend("B")]
        assert problems(gs.Scheduler(backends, policy=policy).plan(graph)) == []


@pytest.mark.parametrize("policy", ["seed", "default"])
def test_plans_over_several_buffers_are_sound(ctx, policy):
    a = gs.DryBackend("A", max_buffer_size=512)
    parts = [ctx.scale(ctx.tensor("f32", (64,), f"x{k}"), 2.0) for k in range(6)]
    facts = gs.Scheduler([a], policy=policy).plan(gs.Graph(*parts)).facts
    assert len(facts.arena_sizes) > 1 and check(facts) == []
    last = at(facts, "x5")
    assert {p.reason for p in check(edit(facts, chunk={last: 99}))} == {"bad-index"}


# -- hazards that the checker found in the planner; remove the mark with the hazard ------------------


def through_a_third_party(policy):
    """B reads A's arena and A reads F's buffer, so B is taken to read F's buffer."""
    f, a, b = gs.DryBackend("F"), dry_device("A", reads=("F",)), dry_device("B", reads=("A",))
    ctx = gs.Context()
    y = ctx.mul_mat(resident_tensor(f, (4, 4), "w"), ctx.tensor("f32", (4, 4), "x"))
    scheduler = gs.Scheduler([a, b], policy=policy)
    scheduler.set_tensor_backend(y, b)
    return scheduler.plan(gs.Graph(y)), ctx


def a_larger_taker(policy):
    """ADD takes 64 bytes more than its data and takes over a source that has none to spare."""
    a = dry_device("A", alloc_size=lambda t: t.nbytes + (64 if t.op == "ADD" else 0))
    ctx = gs.Context()
    y = ctx.tensor("f32", (8,), "y")
    return gs.Scheduler([a], policy=policy).plan(gs.Graph(ctx.add(ctx.scale(y, 1.0), y))), ctx


def empty_slot(policy):
    """SOFT_MAX has sources (x, None, sinks); its kernel tolerates slot 1, and sinks are slot 2."""
    a = dry_device("A", inplace=lambda op: 2 if op == "SOFT_MAX" else 0)
    ctx = gs.Context()
    sinks = ctx.scale(ctx.tensor("f32", (1,), "s"), 1.0)
    out = ctx.soft_max(ctx.tensor("f32", (1,), "x"), sinks=sinks)
    return gs.Scheduler([a], policy=policy).plan(gs.Graph(out)), ctx


def written_leaf(policy):
    """B's copy of leaf x has memory of its own and is kept, although a node adds another input to x."""
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    x, y = ctx.tensor("f32", (4,), "x"), ctx.tensor("f32", (4,), "y")
    z, w = ctx.add(x, y, inplace=True), ctx.add(x, x)
    scheduler = gs.Scheduler([a, b], policy=policy)
    for t, backend in ((x, a), (y, a), (z, a), (w, b)):
        scheduler.set_tensor_backend(t, backend)
    return scheduler.plan(gs.Graph(z, w)), ctx


HAZARDS = [through_a_third_party, a_larger_taker, empty_slot, written_leaf]


@pytest.mark.parametrize("policy", ["seed", "default"])
@pytest.mark.parametrize("make", HAZARDS)
def test_plans_that_were_unsound_are_sound(make, policy):
    plan, _keep = make(policy)
    assert problems(plan) == []


def test_a_view_that_nothing_reads_of_a_leaf_without_memory_is_planned():
    program = """
import ggml_sched as gs
ctx = gs.Context()
x, c = ctx.tensor("f32", (4,), "x"), ctx.tensor("f32", (4,), "c")
gs.Scheduler([gs.DryBackend("A")]).plan(gs.Graph(ctx.view_1d(c, 4), ctx.add(x, x))).verify()
"""
    run_python("-c", program)


@pytest.mark.parametrize("policy", ["seed", "default"])
def test_a_node_with_memory_where_its_op_is_not_supported_is_refused(ctx, policy):
    a, b = gs.DryBackend("A", supports_op=lambda t: t.op != "SCALE"), gs.DryBackend("B")
    y = ctx.set_name(ctx.scale(ctx.tensor("f32", (8,), "x"), 1.0), "y")
    a.alloc_tensors(ctx)
    with pytest.raises(gs.PlacementError, match="'y'.*'A'"):
        gs.Scheduler([a, b], policy=policy).plan(gs.Graph(y))


def test_reuse_at_a_views_offset_is_sound_there_and_nowhere_else(ctx):
    x = ctx.tensor("f32", (64, 1), "x", input=True)
    large = ctx.repeat(x, ctx.tensor("f32", (64, 16), "like"))
    taker = ctx.relu(ctx.view_2d(large, 64, 4, large.nb[1], 5 * large.nb[1]))
    graph = gs.Graph(ctx.set_output(ctx.add(ctx.sqr(taker), x)))
    facts = gs.Scheduler([gs.DryBackend("A")]).plan(graph).facts
    assert facts.is_inplace[graph.id_of(taker)] and check(facts) == []
    i, at = graph.id_of(taker), facts.offset[graph.id_of(large)]
    # At the front, a row too early, a row too late: bytes of the source that it does not read at that place.
    for rows in (0, 4, 6):
        assert {p.reason for p in check(edit(facts, offset={i: at + rows * 256}))} >= {"inplace-layout"}


# -- every claim -----------------------------------------------------------------------------------------


def with_wait(facts: Facts, step: int, back: int) -> Facts:
    """The first step with a wait waits for this step instead."""
    k = next(k for k, s in enumerate(facts.program.steps) if s.waits)
    return changed(facts, k, waits=(facts.program.steps[k].waits[0]._replace(step=step, back=back),))


def with_read(facts: Facts, k: int, **fields) -> Facts:
    reads = facts.program.steps[k].reads
    return changed(facts, k, reads=(reads[0]._replace(**fields), *reads[1:]))


def with_chunk(facts: Facts, i: int, chunk: int) -> Facts:
    return replace(facts, chunk=[*facts.chunk[:i], chunk, *facts.chunk[i + 1 :]])


def with_experts_for(op: str) -> Facts:
    """An op other than MUL_MAT_ID reads the partially copied experts."""
    facts = mixture()[0]
    return edit(facts, op={facts.nodes[0]: op})


def ringed() -> Facts:
    """Copies with two copy slots each."""
    a, b = gs.DryBackend("A"), gs.DryBackend("B")
    graph, _ = two_layers(a, b)
    facts = gs.Scheduler([a, b], copies=2).plan(graph).facts
    assert check(facts) == [] and facts.slots
    return facts


def forge_taken_from_nobody() -> Facts:
    """s is marked as in-place reuse, and has the offset of h, which is not its source."""
    facts = forked()
    return edit(facts, is_inplace={at(facts, "s"): True}, offset={at(facts, "s"): facts.offset[at(facts, "h")]})


def forge_shared_ring() -> Facts:
    """The second copy slot lies where a node computes: the first compute does not use it."""
    facts = ringed()
    step = facts.program.steps[steps_of(facts, "copy")[0]]
    node = next(i for i in facts.nodes if facts.arena_of[i] == step.backend and facts.shares[i] < 0)
    return edit(facts, offset={step.locations[1].id: facts.offset[node]})


def forge_kept_copy() -> Facts:
    """The source is not set anew, so the copy is not made again, but a node has changed the source."""
    facts = spread(written_leaf("seed")[0].facts)
    return changed(facts, steps_of(facts, "copy")[0], if_changed=True)


def without_step(facts: Facts, kind: str) -> Facts:
    return rearranged(facts, [k for k in range(len(facts.program)) if k not in steps_of(facts, kind)])


def window(ready: bool = True) -> Facts:
    """A node of B writes to a cache of A through a copy; no other node reads the cache."""
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    kv = resident_tensor(a, (8, 4), "kv", usage="any")
    write = ctx.set_name(ctx.set_rows(kv, ctx.tensor("f32", (8, 1), "row"), ctx.tensor("i64", (1,), "at")), "write")
    scheduler = gs.Scheduler([a, b], policy="seed")
    for t in (write, *write.src[:2]):
        if t is not kv:
            scheduler.set_tensor_backend(t, b)
    facts = spread(scheduler.plan(gs.Graph(write)).facts)
    assert check(facts) == [] and steps_of(facts, "write back")
    return facts


def forge_unready_window() -> Facts:
    """The rows that the node does not write were not copied first."""
    facts = window()
    return changed(facts, steps_of(facts, "copy")[0], tensor=at(facts, "row"))


CLAIMS = {
    # Indices out of range.
    "a split's backend": (lambda: with_split(layered(), 0, backend=2), "bad-index", "split 0 is on backend 2 of 2"),
    "a split's copy": (lambda: with_split(layered(), 1, inputs=(2,)), "bad-index", "split 1 makes copy 2 of 2"),
    "what a copy copies": (lambda: replace(layered(), copies=[(9, 1), (5, 0)]), "bad-index", "copies tensor 9 of 9"),
    "where a copy goes": (lambda: replace(layered(), copies=[(4, -1), (5, 0)]), "bad-index", "goes to backend -1 of 2"),
    "who writes back": (lambda: replace(cached("B"), write_backs={5: 1}), "bad-index", "node 5 of 5 computes"),
    "what is written back": (lambda: replace(cached("B"), write_backs={3: 2}), "bad-index", "into copy 2 of 2"),
    "an arena": (lambda: replace(layered(), arena_of=[-2, *layered().arena_of[1:]]), "bad-index",
                 "'w2' .*on backend -2 of 2"),
    "a chunk": (lambda: with_locations(with_chunk(layered(), 2, 1)), "bad-index", "'x' .*lies in chunk 1 of A"),
    "whose memory is shared": (lambda: edit(layered(), shares={4: 11}), "bad-index", "the memory of id 11 of 11"),
    "what is read": (lambda: edit(layered(), reads={4: (11,)}), "bad-index", r"reads ids \(11,\)"),
    "an empty slot that is read": (lambda: edit(layered(), reads={4: (-1,)}), "bad-index", r"reads ids \(-1,\)"),
    "too few sources": (lambda: edit(layered(), reads={4: ()}), "bad-index", r"reads ids \(\)"),
    "a step's queue": (lambda: changed(layered(), 0, backend=2), "bad-index", "step 0 of 6 points at nothing"),
    "a wait for no step": (lambda: with_wait(layered(), 6, 1), "bad-index", "step 2 of 6 points"),
    "a wait for a step to come": (lambda: with_wait(layered(), 3, 0), "bad-index", "step 2 of 6 points"),
    "a wait for itself": (lambda: with_wait(layered(), 2, 0), "bad-index", "step 2 of 6 points"),
    "a location of no id": (
        lambda: changed(layered(), 0, locations=(layered().program.steps[0].locations[0]._replace(id=11),)),
        "bad-index", "step 0 of 6 points"),
    "a step without a location": (lambda: changed(layered(), 0, locations=()), "bad-index", "step 0 of 6 points"),
    "what a step brings": (lambda: changed(layered(), 0, tensor=9), "bad-index", "step 0 of 6 points"),
    "ids of no tensor": (lambda: changed(mixture()[0], 0, ids=9), "bad-index", "step 0 of 9 points"),
    "a run of no node": (lambda: changed(layered(), 5, last=6), "bad-index", "step 5 of 6 points"),
    "a run backwards": (lambda: changed(layered(), 1, first=1, last=0), "bad-index", "step 1 of 6 points"),
    "a read of another run": (lambda: with_read(layered(), 3, position=0), "bad-index", "step 3 of 6 points"),
    "a read into no slot": (lambda: with_read(layered(), 3, slot=2), "bad-index", "step 3 of 6 points"),
    # Splits and nodes.
    "a split of no nodes": (lambda: with_split(with_split(layered(), 0, stop=3), 1, start=3), "split-gap",
                            r"split 1 has nodes \[3, 3\)"),
    "a last node in no split": (lambda: with_split(layered(), 2, stop=5), "split-gap", "the splits end at node 5 of 6"),
    "a node in two splits": (lambda: with_split(layered(), 1, start=1), "split-gap", r"split 1 has nodes \[1, 3\)"),
    "a copy in another's split": (lambda: with_split(with_split(layered(), 1, inputs=(1,)), 2, inputs=(0,)),
                                  "wrong-backend", "split 1 on B makes 'A#h2'"),
    "a copy elsewhere": (lambda: edit(layered(), arena_of={9: 0}), "wrong-backend", "'B#a1' .*lies at"),
    "a tensor in place of another": (lambda: edit(layered(), reads={4: (2,)}), "bad-copy", "'a1' .* reads 'x'"),
    "a copy of another shape": (lambda: edit(layered(), layout={9: ("f32", (4, 8, 1, 1), (4, 16, 128, 128))}),
                                "bad-copy", "'h2' .* reads 'B#a1'"),
    # Steps.
    "a copy in a third queue": (lambda: changed(three(), steps_of(three(), "copy")[0], backend=2), "bad-step",
                                "from the queue of C, where neither end"),
    "a run in another queue": (lambda: changed(layered(), 3, backend=0), "bad-step",
                               "step 3 on A runs 'h2' .*puts on B"),
    "a copy that no step makes": (lambda: without_step(zigzag(), "copy"), "missing-copy", "which was not made"),
    "a run that reads no copy": (lambda: changed(zigzag(), 3, reads=()), "bad-step", r"on ids \(1, 4\), the plan"),
    "a run into other memory": (lambda: changed(cached("B"), 3, into=()), "bad-step", "into other memory than"),
    # Backends and offsets.
    "a resident that its backend cannot read": (lambda: edit(layered(), assigned={1: 1}), "resident-moved",
                                           "'w1' .*declared to be on B, which cannot read it"),
    "a source without a place": (lambda: edit(layered(), offset={2: -1}), "unplaced", "'x' .*no address"),
    "a ring's place that others use": (forge_shared_ring, "overlap", "overlaps"),
    "in-place reuse of a tensor that is no source": (forge_taken_from_nobody, "overlap", "'s' .*overlaps 'h'"),
    "in-place reuse that is not declared": (lambda: edit(layered(), is_inplace={at(layered(), "a1"): False}),
                                             "overlap",
                                             "'a1' .*overlaps 'h1'"),
    "in-place reuse of an output": (lambda: take_over(forked(output=True), "s", "h"), "output-overwritten",
                                     "'s' .*reuses 'h'"),
    # Data.
    "experts that another op reads": (lambda: with_experts_for("MUL_MAT"), "partial-read", "experts that other ids"),
    "a window that is not brought": (forge_unready_window, "read-before-write", "'write' .* writes into"),
    "a copy that is kept though nodes write to its source": (forge_kept_copy, "stale-read", "'B#x' .*misses what"),
    "a write that does not go back": (lambda: without_step(window(), "write back"), "lost-write",
                                      "after the compute, the next one reads 'kv'"),
}


def three() -> Facts:
    """As zigzag, with an unused backend C."""
    facts = zigzag()
    return replace(facts, backends=("A", "B", "C"), alignment=(*facts.alignment, 32),
                   arena_readers=(*facts.arena_readers, frozenset({2})), live_bytes=(*facts.live_bytes, 0))


@pytest.mark.parametrize("claim", CLAIMS)
def test_every_claim_of_a_plan_is_checked(claim):
    make, reason, message = CLAIMS[claim]
    found = check(make())
    assert any(p.reason == reason and re.search(message, str(p)) for p in found), [str(p) for p in found]


def test_what_a_node_keeps_has_an_address():
    ctx, a = gs.Context(), gs.DryBackend("A")
    x = ctx.tensor("f32", 8, "x")
    held = ctx.set_name(ctx.sqr(x), "held")
    y = ctx.set_name(ctx.neg(x), "y")
    ctx.keep_until(held, y)
    facts = gs.Scheduler([a], policy="seed").plan(gs.Graph(y)).facts
    assert check(facts) == []
    run = changed(facts, steps_of(facts, "run")[0], first=facts.position[at(facts, "y")])
    assert {p.reason for p in check(edit(run, offset={at(facts, "held"): -1}))} == {"unplaced"}
