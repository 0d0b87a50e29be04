"""The configurations that the first generation's reference results were made with.

    name     backends, best first      where resident tensors live (layer l of n)
    c1       CPU                       CPU
    c2half   GPU0, CPU                 l < n // 2 on the CPU, the rest on GPU0
    c2full   GPU0, CPU                 all layers on GPU0
    c4       GPU0, GPU1, GPU2, CPU     layer l on GPU(l * 3 // n)

Outside the layers: token embeddings on the CPU, everything else on the last GPU.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from pathlib import Path

import ggml_sched as gs

DATA = Path(__file__).parents[1] / "data"
CONFIGURATIONS = ("c1", "c2half", "c2full", "c4")
_LAYER = re.compile(r"blk\.(\d+)\.|cache_[a-z]+_l(\d+)")


def graph_names() -> list[str]:
    """The sample graphs, without folder and suffix."""
    return sorted(path.name.removesuffix(".json.gz") for path in (DATA / "graphs").glob("*.json.gz"))


def graph_path(name: str) -> Path:
    return DATA / "graphs" / f"{name}.json.gz"


def golden_names(configuration: str) -> list[str]:
    """The sample graphs that the first generation survived in a configuration."""
    suffix = f".{configuration}.json.gz"
    return sorted(path.name.removesuffix(suffix) for path in (DATA / "golden").glob(f"*{suffix}"))


@functools.cache
def golden(name: str, configuration: str) -> dict:
    with gzip.open(DATA / "golden" / f"{name}.{configuration}.json.gz") as file:
        return json.load(file)


@functools.cache
def graph_file(name: str) -> dict:
    """The parsed graph file, for comparing; not to be changed."""
    with gzip.open(graph_path(name)) as file:
        return json.load(file)


def layer_of(tensor_name: str) -> int | None:
    found = _LAYER.match(tensor_name)
    return int(found.group(1) or found.group(2)) if found else None


class Configured:
    """`backends`, best first, and `place(tensor)` for `gs.load_graph`."""

    def __init__(self, configuration: str, n_layers: int, alignment: int = 64) -> None:
        names = {"c1": ["CPU"], "c4": ["GPU0", "GPU1", "GPU2", "CPU"]}.get(configuration, ["GPU0", "CPU"])
        self.configuration, self.n_layers = configuration, n_layers
        self.backends = tuple(gs.DryBackend(name, alignment=alignment) for name in names)

    def place(self, tensor: gs.Tensor) -> gs.DryBackend:
        layer = layer_of(tensor.name)
        host = self.backends[-1]
        if self.configuration == "c1":
            return host
        if layer is None:
            return host if tensor.name.startswith("token_embd") else self.backends[-2]
        if self.configuration == "c2half":
            return host if layer < self.n_layers // 2 else self.backends[0]
        if self.configuration == "c2full":
            return self.backends[0]
        return self.backends[layer * 3 // self.n_layers]


def configured_graph(name: str, configuration: str, alignment: int = 64) -> tuple[gs.Graph, Configured]:
    """A sample graph with its resident tensors placed."""
    config = Configured(configuration, graph_file(name)["meta"]["n_layer"], alignment)
    return gs.load_graph(graph_path(name), place=config.place), config
