"""Mutated graphs, models and devices: each is refused with a typed error, or placed within the budgets."""

from placement_attack import of_devices, of_files, of_graphs, of_model
from rounds import attack, rounds


@rounds(60, 6_000)
def test_mutated_graphs_are_refused_or_placed(rounds):
    attack(of_graphs, rounds, placed=5)


@rounds(80, 3_000)
def test_mutated_models_are_refused_or_placed(rounds):
    attack(of_model, rounds, placed=1)


@rounds(80, 3_000)
def test_commands_refuse_mutated_files_in_a_line_or_place_them(rounds, tmp_path):
    attack(lambda rng: of_files(rng, tmp_path), rounds, refused=20, placed=1)


@rounds(60, 3_000)
def test_devices_that_cannot_be_are_refused(rounds):
    attack(of_devices, rounds, placed=5, refused=10)
