"""Graphs, models and devices with a few mistakes, placed: each is refused with a typed error, or what comes out holds.

`placed` places graphs, and checks what it gets: budgets kept, plans verified, bounds in order, texts made.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

from byte_attack import mutated_bytes
from graph_attack import good_file, mutated
from model_attack import mutated_model
from small_models import devices, layered

import ggml_sched as gs
from ggml_sched import cli
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict
from ggml_sched.llama import model_graphs

RATES = (0, -1, 0.5, 1, 1e3, 1e30, 1e31, 1e300, float("inf"), float("-inf"), float("nan"), None, "fast", True)
SIZES = (0, 1, 63, 64, 4096, 1 << 20, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, -1, 0.5, float("nan"), None, "much")
NAMES = ("GPU0", "CPU", "", "a b", "GPU0\n", "\0", 7, None)
FIELDS = {"name": NAMES, "memory": SIZES, "reserve": SIZES, "bandwidth": RATES, "flops": RATES, "launch": RATES,
          "split": RATES, "host": (True, False), "alignment": (0, 1, 3, 64, 4096, 1 << 40, 1 << 63, -64, None),
          "bandwidths": ({}, {"q4_0": 0}, {"what": 1e9}, {"f32": 1e12}, 5), "flops_of": ({"attention": 1e3}, [1])}
ROOM = (4_000, 40_000, 300_000, 1 << 24)
"""Bytes that devices are made for: less and more than what the models take."""


def placed(graphs: Sequence[gs.Graph], given: Sequence[gs.Device], rng: random.Random) -> str:
    """ "refused" or "placed"."""
    goal = rng.choice((None, "prompt", [1.0] * len(graphs)))
    try:
        fit = gs.fit(graphs, given, gs.Link(5e8, 1e-6), goal=goal, stream=rng.random() < 0.3,
                     fill=rng.choice((1.0, 0.5)), within=rng.choice((0.005, 0.1)))
    except gs.Error as error:
        assert str(error)
        return "refused"
    fit.verify()
    assert fit.bound <= fit.rules_bound <= fit.seconds
    assert all(use.left >= 0 for use in fit.memory)
    assert str(fit)
    assert json.loads(fit.to_json())["seconds"] == fit.seconds
    for entry in fit.placed[:2]:
        assert fit.explain(entry.name)
    with contextlib.suppress(gs.PlacementError):        # its names are not llama.cpp's, or llama.cpp cannot have it
        assert str(fit.llama_cpp())
    return "placed"


def of_graphs(rng: random.Random) -> str:
    """The graphs of a token and of a prompt, or a random graph, one of them with mistakes."""
    if rng.random() < 0.7:
        kind = {"tied": rng.random() < 0.3, "caches": rng.random() < 0.5}
        seed = rng.random()
        files = [graph_to_dict(layered(random.Random(seed), 2, tokens, **kind)) for tokens in (1, rng.choice((4, 64)))]
    else:
        files = [good_file(rng)]
    mutated(rng, rng.choice(files))
    try:
        graphs = [graph_from_dict(data) for data in files]
    except gs.Error:
        return "not loaded"
    return placed(graphs, devices(rng, rng.choice((2, 2, 3)), rng.choice(ROOM)), rng)


def of_model(rng: random.Random) -> str:
    """A model file with mistakes, by its metadata alone."""
    try:
        graphs = model_graphs(mutated_model(rng), rng.choice((None, 8, 64)), rng.choice((1, 8)),
                              kv_type=rng.choice(("f16", "f16", "f16", "q8_0")), flash=rng.choice((True, False)))
    except (gs.Error, ValueError):      # ValueError: rows of the cache are no whole blocks of its type
        return "not loaded"
    return placed(graphs, devices(rng, rng.choice((1, 2)), rng.choice(ROOM)), rng)


def of_files(rng: random.Random, folder: Path) -> str:
    """A file with mistakes, of a model or a graph, given to `ggml-sched fit` and `ggml-sched plan --device`."""
    is_model = rng.random() < 0.5
    if is_model:
        path, data = folder / "model.gguf", mutated_model(rng)
    else:
        path = folder / "graph.json"
        data = json.dumps(mutated(rng, graph_to_dict(layered(random.Random(1), 1)))).encode()
        data = mutated_bytes(rng, data) if rng.random() < 0.3 else data
    path.write_bytes(data)
    given = ["--device", f"GPU:{rng.choice(ROOM)}B:1TB/s:80TF", "--device", f"CPU:{rng.choice(ROOM)}B:60GB/s:1TF"]
    options = [[], ["--json"], ["--goal", "8+4"], ["--pin", "*=CPU"], ["--stream"]]
    if is_model:
        options += [["--kv-type", "q8_0"], ["--no-flash"]]
        given += ["--batch", rng.choice(("1", "8")), "--context", rng.choice(("0", "8", "64", "100000", str(1 << 62)))]
    command = [rng.choice(("fit", "plan")), str(path), *given, *rng.choice(options)]
    if command[0] == "plan" and "--json" in command:
        command.remove("--json")
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.main(command)
    said, failed = out.getvalue(), errors.getvalue()
    assert code == (0 if said and not said.startswith("it does not fit") and '"fits": false' not in said else 1)
    assert bool(said) != bool(failed)
    assert failed.count("\n") <= 1
    if said and "--json" in command:
        json.loads(said)
    return "placed" if code == 0 else "does not fit" if said else "refused"


def of_devices(rng: random.Random) -> str:
    """Devices and links with numbers that no device has."""
    graph = layered(random.Random(rng.randrange(4)), 1)
    given = devices(rng, rng.choice((2, 3)), rng.choice(ROOM))
    at = rng.randrange(len(given))
    field = rng.choice(tuple(FIELDS))
    try:
        given[at] = given[at].replace(**{field: rng.choice(FIELDS[field])})
        a, b = rng.choice(NAMES[:4]), rng.choice(NAMES[:4])
        link = {(a, b): gs.Link(rng.choice(RATES), rng.choice(RATES))} if rng.random() < 0.3 else None
        fit = gs.fit([graph], given, link)
    except (gs.OutOfMemory, TypeError, ValueError) as error:
        assert str(error)
        return "refused"
    fit.verify()
    assert 0 <= fit.bound <= fit.rules_bound <= fit.seconds < float("inf")
    assert str(fit)
    return "placed"
