"""What `stock` says llama.cpp must be given places weights and caches as the fit does, by llama.cpp's rules."""

import dataclasses
import json
import pickle
import re
from bisect import bisect_right
from pathlib import Path

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.errors import PlacementError
from ggml_sched.graph.graphfile import graph_from_dict, graph_to_dict
from ggml_sched.placement.fit import Refits
from ggml_sched.placement.stock import _StockBackend, stock

GRAPHS = Path(__file__).resolve().parents[1] / "data" / "graphs"
RNG = np.random.default_rng(0)
NAMES = {"A": "CUDA0", "B": "CUDA1", "C": "Vulkan0"}


def devices(*memory: int) -> list[gs.Device]:
    speeds = (1e12, 5e11, 2.5e11)
    return [*(gs.Device(name, nbytes, speed, 4e13) for name, nbytes, speed in zip("ABC", memory, speeds, strict=False)),
            gs.Device("HOST", 1 << 36, 5e10, 1e12, host=True)]


@pytest.fixture(scope="module")
def graphs():
    return [gs.load_graph(str(GRAPHS / f"gpt2-124m-{kind}.json.gz")) for kind in ("decode", "prefill512")]


@pytest.fixture(scope="module")
def plain(graphs):
    """A fit on devices that are all large."""
    return gs.fit(graphs, devices(1 << 33, 1 << 33, 1 << 33))


def placed_as(fit, device_of):
    """The fit with each resident on the device that a function of its name returns."""
    names = [device.name for device in fit.devices]
    return dataclasses.replace(fit, placed=tuple(entry._replace(device=names.index(device_of(entry.name)))
                                                 for entry in fit.placed))


def by_llama_cpp(found, n_layer: int, order_on_host: str = "CPU") -> dict[str, str]:
    """Where llama.cpp has each resident with these parameters: an implementation of its rules of its own."""
    n_gpu = min(found.arguments["n_gpu_layers"], n_layer + 1)
    parts = np.cumsum(np.float32(found.arguments.get("tensor_split", [1] * len(found.order))), dtype=np.float32)

    def of_layer(layer: int) -> str:
        at = layer - (n_layer + 1 - n_gpu)
        if at < 0:
            return order_on_host
        return found.order[bisect_right(list(parts / parts[-1]), np.float32(at) / np.float32(n_gpu))]

    where = {}
    for name in found.residents:
        layer = re.search(r"^blk\.(\d+)\.|_l(\d+)$", name)
        is_output = name.startswith("output")
        where[name] = (of_layer(int(layer[1] or layer[2])) if layer else of_layer(n_layer) if is_output
                       else order_on_host)
        if not name.startswith("cache"):
            where[name] = next((device for pattern, device in found.override_tensor.items()
                                if re.search(pattern, name)), where[name])
    return where


def test_a_fit_on_one_device_needs_no_overrides_but_for_the_embedding(graphs):
    found = stock(gs.fit(graphs, devices(1 << 33)), {"A": "CUDA0"})
    assert found.exact and found.fits and found.moved == {} and found.order == ("CUDA0",)
    assert found.arguments["n_gpu_layers"] in (0, 13) and "tensor_split" not in found.arguments
    assert by_llama_cpp(found, 12, "CPU") == found.residents


def test_random_placements_of_weights_are_expressed_exactly(plain):
    """Caches in an order that llama.cpp has, weights anywhere."""
    for _ in range(8):
        order = [*RNG.permutation(["A", "B", "C"])]
        cuts = sorted(RNG.integers(0, 13, 3))
        layer_of = ["HOST"] * cuts[0] + [order[0]] * (cuts[1] - cuts[0]) + [order[1]] * (cuts[2] - cuts[1])
        layer_of += [order[2]] * (12 - len(layer_of))
        share = RNG.random()

        def where(name: str, layer_of=layer_of, share=share) -> str:
            if name.startswith("cache"):
                return layer_of[int(name.rpartition("_l")[2])]
            layer = re.match(r"blk\.(\d+)\.", name)
            return str(RNG.choice([*"ABC", "HOST"])) if RNG.random() < share or not layer else layer_of[int(layer[1])]

        wanted = placed_as(plain, where)
        found = stock(wanted, NAMES)
        called = {**NAMES, "HOST": "CPU"}
        assert found.exact and found.moved == {}
        assert found.residents == {name: called[device.name] for name, device in wanted.residents.items()}
        assert by_llama_cpp(found, 12) == found.residents
        assert [use.device for use in found.memory] == list(plain.devices)
        assert sum(use.weights for use in found.memory) >= sum(
            entry.nbytes for entry in plain.placed if entry.kind == "weight")


def test_caches_in_another_order_are_moved_and_the_rest_is_fitted_again(plain):
    """Layers 0 to 11 on A, B, A, B, ...: llama.cpp has each device's layers in one piece."""
    wanted = placed_as(plain, lambda name: "AB"[int(re.search(r"\d+", name)[0]) % 2] if "l" in name.rpartition("_")[2]
                       and name.startswith("cache") else "A")
    found = stock(wanted, NAMES)
    assert not found.exact and found.fits
    assert by_llama_cpp(found, 12) == found.residents
    caches = [found.residents[f"cache_k_l{layer}"] for layer in range(12)]
    pieces = [device for i, device in enumerate(caches) if i == 0 or caches[i - 1] != device]
    assert len(pieces) == len(set(pieces)), caches
    assert 0 < sum(name.startswith("cache") for name in found.moved) <= 12, "half of the caches stay at least"


def test_pins_stay_where_the_rest_is_fitted_again(graphs):
    """A cache and a matrix that would be elsewhere without their pins; arenas so large that two fits more follow."""
    memory = 100 << 20
    free = gs.fit(graphs, devices(memory))
    held = sorted(name for name, device in free.residents.items() if device.name == "A" and name.endswith("weight"))
    pins = dict.fromkeys(held[::3], "HOST") | {"cache_?_l7": "A", "cache_?_l2": "HOST"}
    fit = gs.fit(graphs, devices(memory), pins=pins)
    assert {entry.name for entry in fit.placed if entry.pinned} == {
        *held[::3], *(f"cache_{kind}_l{layer}" for kind in "kv" for layer in (2, 7))}
    larger = stock(fit, compute=lambda one: {"A": fit.arenas[0] + (16 << 20)})
    assert larger.fits and larger.moved
    for found in (stock(fit), larger):
        assert by_llama_cpp(found, 12) == found.residents
        for entry in fit.placed:
            if entry.pinned:
                assert found.residents[entry.name] == {"A": "A", "HOST": "CPU"}[fit.devices[entry.device].name]


def test_caches_that_are_pinned_as_llama_cpp_cannot_have_them_are_refused(plain):
    """The first layer beside the host, the last on it."""
    names = [device.name for device in plain.devices]
    pinned = {"cache_k_l0": "A", "cache_v_l0": "A", "cache_k_l11": "HOST", "cache_v_l11": "HOST"}
    wanted = dataclasses.replace(plain, placed=tuple(
        entry._replace(device=names.index(pinned[entry.name]), pinned=True) if entry.name in pinned else entry
        for entry in plain.placed))
    with pytest.raises(gs.PlacementError, match="nothing fits the pins"):
        stock(wanted, NAMES)


def test_arenas_that_are_larger_than_the_fit_s_are_made_room_for(graphs):
    memory = 100 << 20
    fit = gs.fit(graphs, devices(memory))
    found = stock(fit)
    assert found.fits and all(use.left >= 0 for use in found.memory)
    assert by_llama_cpp(found, 12) == found.residents
    more = {"A": found.memory[0].arena + (8 << 20), "CPU": 0}
    larger = stock(fit, compute=lambda one: more)
    assert larger.fits and larger.memory[0].arena == more["A"]
    assert larger.memory[0].weights + larger.memory[0].cache + more["A"] <= memory
    hopeless = stock(fit, compute=lambda one: {"A": memory + 1})
    assert not hopeless.fits and hopeless.memory[0].left < 0


def test_room_is_made_around_the_caches_that_llama_cpp_has(graphs, monkeypatch):
    """Tables are made anew for other pins, and caches that move away take weights with them."""
    fit = gs.fit(graphs, devices(100 << 20))
    pinned, found = [], Refits.search

    def search(self, pins, more):
        pinned.append((dict(pins), any(more)))
        return found(self, pins, more)

    monkeypatch.setattr(Refits, "search", search)
    first = stock(fit, compute=lambda one: dict(zip(("A", "CPU"), fit.arenas, strict=True)))
    caches = {name: device for name, device in first.residents.items() if name.startswith("cache")}
    assert first.fits
    pinned.clear()
    larger = {"A": fit.arenas[0] + (12 << 20), "CPU": fit.arenas[1]}
    room = stock(fit, compute=lambda one: larger)
    assert room.fits and room.memory[0].arena == larger["A"]
    assert any(more for _, more in pinned)
    for pins, _ in pinned:
        assert {name: "CPU" if device == "HOST" else device for name, device in pins.items()} == caches
    assert {name: device for name, device in room.residents.items() if name in caches} == caches


def test_the_command_has_what_the_graphs_show(graphs):
    found = stock(gs.fit(graphs, devices(1 << 33, 1 << 33, 1 << 33)), NAMES, type_k="q8_0")
    words = found.command("my model.gguf").split()
    assert words[:3] == ["llama-server", "-m", "'my"] and found.command().count("-ot") == len(found.override_tensor)
    given = dict(zip(words, words[1:], strict=False))
    assert [given[flag] for flag in ("-c", "-b", "-ub", "-ctk", "-ctv")] == ["1024", "512", "512", "q8_0", "f16"]
    assert given["-fa"] == "off" and given["--device"].split(",") == list(found.order) and "--no-op-offload" in words
    assert given["-ngl"] == str(found.arguments["n_gpu_layers"])
    assert found.settings["override_tensor"] == dict(found.override_tensor)
    assert json.loads(json.dumps(found.to_dict()))["command"] == found.command()
    assert found.command() in str(found) and "left" in str(found)


def test_the_context_is_that_of_the_caches_where_graphs_do_not_say(graphs):
    parts = [graph_to_dict(graph) for graph in graphs]
    for part in parts:
        del part["meta"]["n_ctx"]
    found = stock(gs.fit([graph_from_dict(part) for part in parts], devices(1 << 33)), {"A": "CUDA0"})
    assert found.arguments["n_ctx"] == 1024


@pytest.mark.parametrize("n_seqs, expected", [(1, None), (4, 4)])
def test_several_sequences_are_an_argument(graphs, n_seqs, expected):
    parts = [graph_to_dict(graph) for graph in graphs]
    for part in parts:
        part["meta"]["n_seqs"] = n_seqs
    found = stock(gs.fit([graph_from_dict(part) for part in parts], devices(1 << 33)), {"A": "CUDA0"})
    assert found.arguments.get("n_seq_max") == expected


def test_a_description_is_a_value(graphs):
    fit = gs.fit(graphs, devices(200 << 20))
    one, two = stock(fit), stock(fit)
    assert one == two and pickle.loads(pickle.dumps(one)) == one and one != stock(fit, n_ctx=2048)


def test_a_tied_embedding_is_named_so_that_llama_cpp_makes_no_copy_for_the_output(graphs, plain):
    untied = stock(placed_as(plain, lambda name: "HOST" if name == "token_embd.weight" else "A"), NAMES)
    assert r"^token_embd\.weight$" not in untied.override_tensor, "llama.cpp has it on the host"
    fields = [graph_to_dict(graph) for graph in graphs]
    for one in fields:
        ids = {tensor["name"]: i for i, tensor in enumerate(one["tensors"])}
        for tensor in one["tensors"]:
            tensor["src"] = [ids["token_embd.weight"] if i == ids["output.weight"] else i
                             for i in tensor.get("src", [])]
        one["tensors"][ids["output.weight"]] |= {"name": "unused", "resident": "", "flags": ["input"]}
    tied = gs.fit([graph_from_dict(one) for one in fields], devices(1 << 33, 1 << 33, 1 << 33))
    for device, called in {"HOST": "CPU", "A": "CUDA0"}.items():
        wanted = placed_as(tied, lambda name, device=device: device if name == "token_embd.weight" else "A")
        found = stock(wanted, NAMES)
        assert found.override_tensor[r"^token_embd\.weight$"] == called and found.exact


@pytest.mark.parametrize(("names", "message"), [({"Z": "CUDA0"}, "no device of the fit has the name 'Z'"),
                                                ({"A": "CUDA0", "B": "CUDA0"}, "two devices have one name")])
def test_names_that_devices_do_not_have_are_errors(names, message, plain):
    with pytest.raises(ValueError, match=message):
        stock(plain, names)


def test_several_models_and_foreign_names_are_errors(plain):
    with pytest.raises(PlacementError, match=r"fit\.model\(k\)"):
        stock(dataclasses.replace(plain, models=(0, 1)))
    other = tuple(entry._replace(name="memory") if entry.kind == "kv" else entry for entry in plain.placed)
    with pytest.raises(PlacementError, match="'memory' does not name its layer"):
        stock(dataclasses.replace(plain, placed=other))


def test_numbers_of_layers_that_no_model_has_are_errors(plain, graphs):
    far = tuple(entry._replace(name="blk.100000.ffn_up.weight") if entry.name == "blk.1.ffn_up.weight" else entry
                for entry in plain.placed)
    with pytest.raises(PlacementError, match="100001 layers, by the names and the metadata of the graphs"):
        stock(dataclasses.replace(plain, placed=far))
    fields = graph_to_dict(graphs[0])
    fields["meta"]["n_layer"] = 100000
    with pytest.raises(PlacementError, match="100000 layers"):
        stock(gs.fit([graph_from_dict(fields)], devices(1 << 33)))


def test_layers_are_counted_as_llama_cpp_divides_them():
    """The parts of tensor_split are numbers of layers: the divisions in single precision meet exactly at the cuts."""
    for total in range(1, 200):
        for cut in {1, total // 3, total // 2, total - 1} - {0, total}:
            parts = np.cumsum(np.float32([cut, total - cut]), dtype=np.float32)
            got = [bisect_right(list(parts / parts[-1]), np.float32(at) / np.float32(total)) for at in range(total)]
            assert got == [0] * cut + [1] * (total - cut)


@pytest.mark.parametrize(("op", "rows", "offloaded"), [("MUL_MAT", 31, False), ("MUL_MAT", 32, True),
                                                       ("MUL_MAT_ID", 31, False), ("MUL_MAT_ID", 32, True),
                                                       ("GET_ROWS", 32, False)])
def test_ops_of_32_rows_come_to_a_device_for_weights_of_the_host(op, rows, offloaded):
    """ggml's rule for backends that offload: 32 rows or more, along axis 2 for experts, but never rows by number."""
    with gs.Context() as ctx:
        weights = ctx.tensor("f32", (8, 64, 2) if op == "MUL_MAT_ID" else (8, 64))
        node = {"MUL_MAT": lambda: ctx.mul_mat(weights, ctx.tensor("f32", (8, rows))),
                "MUL_MAT_ID": lambda: ctx.mul_mat_id(weights, ctx.tensor("f32", (8, 1, rows)),
                                                     ctx.tensor("i32", (1, rows))),
                "GET_ROWS": lambda: ctx.get_rows(weights, ctx.tensor("i32", (rows,)))}[op]()
        gpu, host = devices(1 << 33)
        assert _StockBackend(gpu, True).offload_op(node) is offloaded
        assert not _StockBackend(gpu, False).offload_op(node)
        assert not _StockBackend(host, True).offload_op(node)


def test_what_a_fit_and_stock_return_cannot_be_changed(plain):
    found = stock(plain, NAMES)
    for value in (plain, plain.devices[0], plain.prices[0], found, found.memory[0], gs.Link(1e9)):
        for field in dataclasses.fields(value):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, field.name, None)
