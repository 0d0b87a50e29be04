"""Mutated graph files: each is refused with a gs.Error, or planned and computed as it is written."""

import gzip
import json
import random

from byte_attack import mutated_bytes
from configs import sample_paths
from graph_attack import attempt, good_file, mutated
from rounds import attack, rounds

import ggml_sched as gs


def structured(rng: random.Random) -> str:
    """A random graph with a few changes that look like a graph."""
    return attempt(mutated(rng, good_file(rng)), rng)


def of_bytes(rng: random.Random, path) -> str:
    """The text of a random graph, or its gzip file, with a few bytes changed."""
    text = json.dumps(good_file(rng)).encode()
    packed = rng.random() < 0.3
    path = path / ("mutated.json.gz" if packed else "mutated.json")
    path.write_bytes(mutated_bytes(rng, gzip.compress(text, mtime=0) if packed else text))
    try:
        gs.load_graph(path)
    except gs.Error:
        return "refused"
    return "loaded"


def of_a_sample(rng: random.Random) -> str:
    """A real graph with a few changes."""
    return attempt(mutated(rng, json.loads(gzip.decompress(rng.choice(sample_paths()).read_bytes()))), rng)


def test_graphs_as_they_are_compute():
    attack(lambda rng: attempt(good_file(rng), rng), 30, computed=20)


@rounds(250, 30_000)
def test_mutated_graphs_are_refused_or_computed_as_written(rounds):
    attack(structured, rounds, refused=25, computed=25)


@rounds(300, 30_000)
def test_mutated_files_are_refused_or_loaded(rounds, tmp_path):
    attack(lambda rng: of_bytes(rng, tmp_path), rounds, refused=5, loaded=5)


@rounds(3, 300)
def test_a_mutated_sample_is_refused_or_planned(rounds):
    attack(of_a_sample, rounds)
