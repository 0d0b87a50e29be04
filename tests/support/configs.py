"""The configurations that the first generation's reference results were made with.

    name     backends, best first      where resident tensors live (layer l of n)
    c1       CPU                       CPU
    c2half   GPU0, CPU                 l < n // 2 on the CPU, the rest on GPU0
    c2full   GPU0, CPU                 all layers on GPU0
    c4       GPU0, GPU1, GPU2, CPU     layer l on GPU(l * 3 // n)

Outside the layers: token embeddings on the CPU, everything else on the last GPU.
"""

import functools
import gzip
import json
from pathlib import Path

import ggml_sched as gs
from ggml_sched.cli.plan import CONFIGS, placement

DATA = Path(__file__).parents[1] / "data"
CONFIGURATIONS = tuple(CONFIGS)


def graph_names() -> list[str]:
    """The sample graphs, without folder and suffix."""
    return sorted(path.name.removesuffix(".json.gz") for path in (DATA / "graphs").glob("*.json.gz"))


def sample_paths() -> list[Path]:
    return [graph_path(name) for name in graph_names()]


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
    """The parsed graph file, shared between tests: read only."""
    with gzip.open(graph_path(name)) as file:
        return json.load(file)


class Configured:
    """`backends`, best first, and `place(tensor)` for `gs.load_graph`."""

    def __init__(self, configuration: str, n_layers: int, alignment: int = 64) -> None:
        self.backends = tuple(gs.DryBackend(name, alignment=alignment, accepts_computes=True)
                              for name in CONFIGS[configuration])
        place = placement(configuration, list(self.backends), n_layers)
        self.place = lambda tensor: place(tensor.name)


def configured_graph(name: str, configuration: str, alignment: int = 64) -> tuple[gs.Graph, Configured]:
    """A sample graph with its resident tensors placed."""
    config = Configured(configuration, graph_file(name)["meta"]["n_layer"], alignment)
    return gs.load_graph(graph_path(name), place=config.place), config


def sample_plan(path: Path, configuration: str, policy: str = "seed", alignment: int = 32) -> gs.Plan:
    """The plan of a sample graph over the backends of a configuration."""
    graph, config = configured_graph(path.name.removesuffix(".json.gz"), configuration, alignment)
    return gs.Scheduler(config.backends, policy=policy).plan(graph)
