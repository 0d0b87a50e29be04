"""Random batches: after the first graph of each kind nothing is planned, no buffer grows, no device is waited for."""

import pytest
from random_batches import ARCHITECTURES, Idle, measure

MAX_KINDS = 9
"""One token; no outputs, few, more and all; and the last four for embeddings."""


def check(arch: str, n_batches: int, seed: int, backends: int = 1, **options) -> None:
    devices = [Idle(1, name=f"idle{i}") for i in range(backends)]
    try:
        counts = measure(arch, n_batches, seed, devices, **options)
    finally:
        for device in devices:
            device.close()
    assert counts["graphs"] > n_batches // 2 and counts["kinds"] <= MAX_KINDS
    assert (counts["planned"], counts["grown"], counts["waited"]) == (0, 0, 0)


@pytest.mark.parametrize(("arch", "flash"), [("llama", False), ("gemma3", True), ("mamba", False)])
def test_replayed_plans_are_sound(arch, flash):
    check(arch, 12, 1, flash=flash)


@pytest.mark.spread("arch", "flash")
@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("flash", [False, True], ids=["softmax", "flash"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "deepseek2"])
def test_a_first_graph_of_each_kind_serves_all(arch, flash):
    check(arch, 50, 1, flash=flash)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("options", [{"backends": 2}, {"n_seq": 3}, {"kv_type": "f16"}, {"n_ctx": 100}],
                         ids=["two backends", "three sequences", "f16 cache", "odd context"])
def test_a_first_graph_of_each_kind_serves_all_in_other_models(options):
    check("llama", 50, 2, **options)


@pytest.mark.usefixtures("unverified")
@pytest.mark.soak
@pytest.mark.parametrize("flash", [False, True], ids=["softmax", "flash"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ten_thousand_batches(arch, flash):
    check(arch, 10_000, 3, flash=flash)
