"""Seeded faults of the disk below a model: right logits or a typed error, and a model that works afterwards."""

import signal
from collections import Counter

import pytest

import ggml_sched as gs
from ggml_sched.llama import load, random_llama
from ggml_sched.testing.disk import KINDS, DiskFaults

MODEL = random_llama(5, n_vocab=120, n_embd=64, n_layer=4, n_head=4, n_head_kv=2, n_ff=160)
OPTIONS = {"n_ctx": 64, "n_threads": 1, "n_batch": 16}
TOKENS = [3, 14, 15, 92, 65, 35]


def tokens_of(seed):
    return TOKENS[: 1 + seed % 6]


class Faulty:
    """A model under a limit, whose file has faults, and what it should say."""

    def __init__(self, path, direct=None):
        path.write_bytes(MODEL)
        with load(path, **OPTIONS) as free:
            self.expected = {n: free.eval(TOKENS[:n]).tobytes() for n in range(1, 7) if free.reset() is None}
            whole = sum(on.total for on in free.memory().values())
        self.model = load(path, memory=whole - 250_000, **OPTIONS)
        assert self.model.residency.fetched
        self.buffer = self.model.weights._files[0]
        if direct is False:
            self.buffer.file.give_up_direct()

    def evaluate(self, seed):
        self.model.reset()
        return self.model.eval(tokens_of(seed)).tobytes() == self.expected[len(tokens_of(seed))]

    def with_faults(self, seed, counts, interrupts):
        faults = DiskFaults(seed, rate=(0.02, 0.1, 0.5)[seed % 3])
        with faults.on(self.buffer):
            try:
                interrupts.arm()
                is_right = self.evaluate(seed)
                interrupts.is_armed = False
                assert is_right, (seed, faults.happened)
                counts["right"] += 1
                assert not set(faults.happened) & {"error", "shortened", "changed"}, seed
            except gs.FetchError as error:
                interrupts.is_armed = False
                counts["error"] += 1
                assert error.path and error.tensor and str(error.start) in str(error)
            except KeyboardInterrupt:
                counts["interrupt"] += 1
                assert "interrupt" in faults.happened
            except gs.Error as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
        counts.update(faults.happened)

    def queued(self, seed, counts):
        """More computes than the queue holds, while the disk fails."""
        model, faults = self.model, DiskFaults(seed, 0.05, [kind for kind in KINDS if kind != "interrupt"])
        model.reset()
        model.eval(TOKENS[:2])
        graph = model.batch_graph(1, model.cache.padded(1)).graph
        with faults.on(self.buffer):
            try:
                for _ in range(70):
                    model.scheduler.compute_async(graph)
                model.scheduler.synchronize()
            except gs.FetchError:
                counts["error"] += 1
        counts.update(faults.happened)


class Interrupts:
    """SIGINT raises KeyboardInterrupt once after each `arm`: a signal that comes late interrupts nothing else."""

    is_armed = False

    def arm(self):
        self.is_armed = True

    def __call__(self, number, frame):
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt


@pytest.fixture
def interrupts():
    handler = Interrupts()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


def run(faulty, seeds, interrupts):
    counts = Counter()
    for seed in seeds:
        if seed % 25 == 24:
            faulty.queued(seed, counts)
        else:
            faulty.with_faults(seed, counts, interrupts)
        assert faulty.evaluate(seed), f"after seed {seed}"
    return counts


@pytest.mark.parametrize("direct", [None, False])
def test_a_hundred_seeds_of_faults(direct, tmp_path, interrupts):
    faulty = Faulty(tmp_path / "model.gguf", direct)
    counts = run(faulty, range(50) if direct is None else range(50, 100), interrupts)
    assert min(counts["right"], counts["error"], counts["interrupt"]) > 0
    faulty.model.close()


@pytest.mark.soak
def test_two_thousand_seeds_of_faults(tmp_path, interrupts):
    faulty = Faulty(tmp_path / "model.gguf")
    counts = run(faulty, range(2000), interrupts)
    assert min(counts[kind] for kind in (*KINDS, "right", "error")) > 0
    faulty.model.close()


def test_faults_are_those_of_the_seed(tmp_path):
    faulty = Faulty(tmp_path / "model.gguf")
    found = []
    for _ in range(2):
        faults = DiskFaults(5, 0.3, ["short", "slow"])
        with faults.on(faulty.buffer):
            assert faulty.evaluate(0)
        found.append(faults.happened)
    assert found[0] == found[1] != []
    with pytest.raises(ValueError, match="'flood' is not one of short"):
        DiskFaults(1, 0.1, ["flood"])
    faulty.model.close()
