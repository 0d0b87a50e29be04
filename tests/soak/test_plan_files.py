"""Plan files with one number changed: each is refused, or every tensor reads as its value or not at all.

The expected results come from a graph whose tensors all have memory of their own.  A tensor that the true plan
lets a caller read must be readable by an accepted plan, too, unless that plan places tensors elsewhere.
"""

import json
import random

from devices import poisoned
from random_graphs import Built, decode
from random_results import raw, set_all
from rounds import attack, rounds

import ggml_sched as gs
from ggml_sched.planning.planfile import plan_from_dict, plan_to_dict

LAYOUT = ("offset", "home", "arenas", "root", "state", "order")
"""Fields whose change is another plan, and may be a sound one that reuses other memory."""


def reads(built: Built) -> dict[int, bytes | None]:
    """The bytes of each node that computes, by id; None where reading is refused."""
    found = {}
    for i, t in enumerate(built.graph.tensors):
        if t.op not in ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE") and not t.is_resident and t.nbytes:
            try:
                t.numpy()
                found[i] = raw(t)
            except gs.HazardError:
                found[i] = None
    return found


def computed(built: Built, backends: list, change=None) -> dict[int, bytes | None]:
    """The results that can be read after a compute with the scheduler's plan, or with a changed plan that it adopts."""
    with gs.Scheduler(backends) as scheduler:
        for pick, node in enumerate(built.graph.nodes):
            if pick % 3 == 1:
                scheduler.set_tensor_backend(node, backends[pick % len(backends)])
        plan = scheduler.plan(built.graph)
        if change is not None:
            data = change(json.loads(json.dumps(plan_to_dict(plan))))
            plan = plan_from_dict(data, built.graph, backends)
            plan.verify()
            scheduler.adopt(plan)
        scheduler.alloc(built.graph)
        set_all(built)
        scheduler.compute(built.graph)
        return reads(built)


def in_memory_of_its_own(built: Built, backends: list) -> dict[int, bytes | None]:
    """The same where every node is an output."""
    for t in built.graph.nodes:
        built.ctx.set_output(t)
    return computed(built, backends)


def changed(data: dict, rng: random.Random) -> tuple[dict, str]:
    """One number of the plan is another; and the name of its field."""
    field = rng.choice(sorted(name for name, value in data["plan"].items() if isinstance(value, list) and value))
    rows, k = data["plan"][field], rng.randrange(len(data["plan"][field]))
    while isinstance(rows[k], list) and rows[k]:
        rows = rows[k]
        k = rng.randrange(len(rows))
    if isinstance(rows[k], list):
        rows[k] = [0]
    elif rng.random() < 0.1:
        del rows[k]
    else:
        old = rows[k]
        choices = [0, -1, 1, 2, old + 1, old - 1, old + 32, old - 32, old ^ 2, old ^ 1, 2 * old, 1 << 40]
        rows[k] = rng.choice([value for value in choices if value != old])
    return data, field


def of_one_number(rng: random.Random) -> str:
    recipe = decode(rng.randbytes(10 + 4 * rng.randint(2, 16)))
    backends = [poisoned(name) for name in "ab"[: rng.randint(1, 2)]]
    try:
        built, full = Built(recipe, keeps=False), Built(recipe, keeps=False)
        backends[-1].alloc_tensors(built.homes[0])
        backends[-1].alloc_tensors(full.homes[0])
        expected, true = in_memory_of_its_own(full, backends), computed(built, backends)
        changes = []

        def change(data: dict) -> dict:
            data, field = changed(data, rng)
            changes.append(field)
            return data

        try:
            found = computed(built, backends, change)
        except gs.Error:
            return "refused"
        for i, value in found.items():
            what = f"{changes[0]} changed: {built.graph.tensors[i]!r}"
            assert value is None or value == expected[i], f"{what} reads as something else"
            assert changes[0] in LAYOUT or (value is None) == (true[i] is None), f"{what} is read by one plan alone"
        return "accepted"
    finally:
        for backend in backends:
            backend.close()


@rounds(80, 20_000)
def test_a_plan_with_one_number_changed_is_refused_or_reads_nothing_else(rounds):
    attack(of_one_number, rounds, refused=8, accepted=8)
