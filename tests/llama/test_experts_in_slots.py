"""Models of experts under a limit that not all experts fit in: bits, bytes, recordings, and limits without slots."""

import errno
import pickle
from collections import Counter

import pytest
from forks import in_child
from ggml_here import IS_HERE, WHY_NOT, backend

import ggml_sched as gs
from ggml_sched import llama
from ggml_sched.backends.store import has_slots
from ggml_sched.experts import LeastFrequentlyUsed, LeastRecentlyUsed, Mixture, Routing, Static, bound, replay
from ggml_sched.llama import ModelClosed, load, random_llama, write_gguf
from ggml_sched.llama.arch import decoder
from ggml_sched.planning.program import Fetch, FetchExperts
from ggml_sched.testing.disk import KINDS, DiskFaults

pytestmark = pytest.mark.skipif(not has_slots(), reason="pages of this system do not give their memory back")

OPTIONS = {"n_ctx": 64, "n_batch": 16}
MODEL = random_llama(7, n_vocab=120, n_embd=64, n_layer=3, n_head=4, n_head_kv=2, n_ff=192, n_expert=8)
LIMIT = 2_500_000
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(MODEL)
    return path


def said(model):
    """Logits of a prompt and of tokens after it."""
    model.reset()
    found = [model.eval(PROMPT)]
    for token in (5, 8, 13, 21, 34, 55, 89):
        found.append(model.eval([token]))
    return b"".join(logits.tobytes() for logits in found)


def banks_of(graph):
    """{weight: its bank} of the weights whose experts are in slots."""
    return {t.name: t.buffer.experts for t in graph.tensors if getattr(t.buffer, "experts", None) is not None}


def one_by_one(model):
    """Logits of the same tokens, each evaluated alone."""
    model.reset()
    return b"".join(model.eval([token]).tobytes() for token in (*PROMPT, 5, 8, 13, 21))


def unlimited(source, **options):
    with load(source, **OPTIONS, **options) as model:
        assert model.slots is None
        return said(model)


@pytest.mark.parametrize("source", ["file", "bytes"])
@pytest.mark.parametrize("policy", ["lru", LeastFrequentlyUsed((0.9,)), Mixture(0.25)])
def test_slots_give_the_bits_of_a_model_without_a_limit(path, policy, source):
    given = path if source == "file" else MODEL
    with load(given, memory=LIMIT, n_threads=1, experts=policy, **OPTIONS) as model:
        assert 8 <= model.slots.n_slots < 24 and model.residency.fetched == ()
        assert said(model) == unlimited(given, n_threads=1) == said(model)
        counted = model.slots.traffic
        assert counted.hits and counted.evictions and counted.nbytes == counted.misses * 3 * 64 * 192 * 4
        assert sum(on.total for on in model.memory().values()) <= LIMIT
        assert model.slots.held_nbytes <= model.slots.nbytes


@pytest.mark.skipif(not IS_HERE, reason=WHY_NOT)
def test_ggml_s_kernels_give_the_same_bits_from_slots(path):
    with backend(1) as ggml:
        right = unlimited(path, backends=[ggml])
        with load(path, [ggml], memory=LIMIT, **OPTIONS) as model:
            assert model.slots is not None and said(model) == right


@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "gpt-oss"])
def test_formats_and_architectures_give_the_same_bits(tmp_path, arch, dtype):
    extra = {"expert_feed_forward_length": 192} if arch != "llama" else None
    if arch == "gpt-oss":
        extra |= {"attention.sliding_window": 8, "attention.key_length": 16, "attention.value_length": 16}
    data = random_llama(3, n_vocab=120, n_embd=128, n_layer=3, n_head=8, n_head_kv=2, n_ff=192, n_expert=8, arch=arch,
                        extra=extra, dtype=dtype)
    (tmp_path / "m").write_bytes(data)
    with load(tmp_path / "m", n_threads=1, **OPTIONS) as free:
        right, whole = said(free), sum(on.total for on in free.memory().values())
    limit = whole - len(data) // 3
    with load(tmp_path / "m", n_threads=1, memory=limit, **OPTIONS) as model:
        assert model.slots is not None and said(model) == right


def test_a_plan_reads_experts_when_they_are_chosen_and_nothing_ahead(path):
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        plan = model.scheduler.plan(model.batch_graph(1, model.cache.padded(1)).graph)
        plan.verify()
        kinds = [type(step) for step in plan.program.steps]
        assert kinds.count(FetchExperts) == 3 and Fetch not in kinds
        said = model.explain("blk.1.ffn_up_exps.weight")
        assert f"{model.slots.n_slots} slots of {model.slots.slot_nbytes:,} bytes are for 24 experts" in said
        assert "those of the experts that are in slots" in said and "file reads others" in said
        assert "would be 24 slots" in said and "stays on CPU" in model.explain("blk.1.attn_q.weight")


def test_a_pickled_plan_keeps_its_banks_of_experts_and_is_verified_without_the_store(path):
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        graph = model.batch_graph(1, model.cache.padded(1)).graph
        plan = model.scheduler.plan(graph)
        banks = {name: bank.number for name, bank in banks_of(graph).items()}
        kept = pickle.loads(pickle.dumps(plan))
    kept.verify()
    found = banks_of(kept.graph)
    assert banks and {name: bank.number for name, bank in found.items()} == banks
    assert len(set(map(id, found.values()))) == len(set(banks.values()))
    assert all(bank.store is kept.backends[0] for bank in found.values()) and kept.program == plan.program


def test_whole_tensors_are_fetched_where_asked_and_where_slots_are_too_few(path):
    right = unlimited(path, n_threads=1)
    with load(path, memory=LIMIT, n_threads=1, experts="whole", **OPTIONS) as model:
        assert model.slots is None and model.residency.nbytes > 0 and said(model) == right
    # A prompt of 10 tokens may use all 8 experts of a layer, which is more than this limit holds.
    with pytest.raises(gs.OutOfMemory, match=r"arenas and work memory, the rest for a window") as raised:
        load(path, memory=0, n_threads=1, **OPTIONS)
    with load(path, memory=raised.value.needed, n_threads=1, **OPTIONS) as model:
        assert model.slots is None and said(model) == right


def test_dense_weights_are_fetched_where_they_do_not_fit_beside_the_fewest_slots(path):
    """A model that only ever gets one token at a time needs two slots."""
    options = {"n_threads": 1, "n_ctx": 64, "n_batch": 1}
    with load(path, **options) as free:
        right = one_by_one(free)
    with pytest.raises(gs.OutOfMemory, match=r" for 2 slots of experts, the rest for a window") as raised:
        load(path, memory=0, **options)
    with pytest.raises(gs.OutOfMemory) as whole:
        load(path, memory=0, experts="whole", **options)
    least = raised.value.needed
    assert least < 0.6 * whole.value.needed
    fetched = []
    for limit in (least, least + 50_000, least + 100_000, least + 200_000, least + 400_000):
        with load(path, memory=limit, **options) as model:
            assert one_by_one(model) == right
            fetched.append(model.residency.nbytes)
            assert model.slots.n_slots == 2 or not fetched[-1]
            assert sum(on.total for on in model.memory().values()) <= limit
            plan = model.scheduler.plan(model.batch_graph(1, model.cache.padded(1)).graph)
            plan.verify()
            kinds = Counter(type(step) for step in plan.program.steps)
            assert kinds[FetchExperts] == 3 and kinds[Fetch] == len(model.residency.fetched)
    assert fetched == sorted(fetched, reverse=True) and fetched[0] > 150_000 and not fetched[-1]


def test_explain_says_what_dense_weights_and_slots_share(path):
    with load(path, memory=500_000, n_threads=1, n_ctx=64, n_batch=1) as model:
        slots, name = model.slots, model.residency.fetched[0]
        said = model.explain(name)
        assert f"and slots for experts of {slots.nbytes:,}, which is what the limit of 500,000 on CPU leaves" in said
        assert "with 1 GiB more it would stay, too" in said
        assert "2 slots" in model.explain("blk.1.ffn_up_exps.weight")
        assert "would be 24 slots" in model.explain("blk.1.ffn_up_exps.weight")


def test_where_everything_fits_there_are_no_slots(path):
    with load(path, memory=1 << 30, n_threads=1, **OPTIONS) as model:
        assert model.slots is None and model.store is None


def test_a_system_without_slots_fetches_whole_tensors(path, monkeypatch):
    monkeypatch.setattr("sys.platform", "plan9")
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        assert model.slots is None and model.residency.nbytes > 0


def test_an_error_says_how_to_evaluate_a_batch_whose_last_layer_uses_more_experts_than_there_are_slots(tmp_path):
    """For few outputs it computes with few tokens, which choose few experts."""
    path, options = tmp_path / "model.gguf", {"n_ctx": 100, "n_batch": 64, "n_threads": 1}
    path.write_bytes(random_llama(1, n_vocab=120, n_embd=128, n_layer=1, n_head=4, n_head_kv=2, n_ff=160, n_expert=8,
                                  dtype="f16"))
    with load(path, memory=1_150_000, **options) as model:
        assert 4 <= model.slots.n_slots < 8
        for _ in range(2):
            with pytest.raises(gs.OutOfMemory, match="6 experts of bank 0 are used together") as raised:
                model.eval(PROMPT)
            assert raised.value.needed == 6 * model.slots.slot_nbytes > raised.value.available == model.slots.nbytes
            assert any("the batch has 10 outputs, the limit leaves room for 2 at most" in note
                       for note in raised.value.__notes__)
        assert len(model.eval(PROMPT, last_only=True)) == 1


def test_other_banks_have_slots_where_nodes_read_one_bank_otherwise(path, monkeypatch):
    """Layer 1 also computes its first expert for every token, as `gs.fit` sees it, too."""

    def with_shared(b, x, layer, *rest):
        y = experts_of(b, x, layer, *rest)
        if layer != 1:
            return y
        up, down = (b.weights[f"blk.1.ffn_{what}_exps.weight"] for what in ("up", "down"))
        first = [b.ctx.view_2d(w, w.ne[0], w.ne[1], w.nb[1]) for w in (up, down)]
        return b.ctx.add(y, b.ctx.mul_mat(first[1], b.ctx.mul_mat(first[0], x)))

    experts_of = decoder.experts
    monkeypatch.setattr(decoder, "experts", with_shared)
    right = unlimited(path, n_threads=1)
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        assert [bank.name for bank in model.slots.banks] == ["blk.0", "blk.2"]
        assert 8 <= model.slots.n_slots < 16 and said(model) == right == said(model)
        assert sum(on.total for on in model.memory().values()) <= LIMIT
        assert "fetched from file in each evaluation" in model.explain("blk.1.ffn_up_exps.weight")
        assert "16 experts, 8 of them of blk.2" in model.explain("blk.2.ffn_up_exps.weight")
    with gs.CpuBackend(1, name="CPU") as host:
        graphs = llama.model_graphs(path, 64, 4, kv_type="f16", backends=[host])
        fit = gs.fit(graphs, [gs.Device("CPU", LIMIT, 1e10, 1e11, host=True, backend=host, fetch=gs.Link(1e9, 1e-5))])
        with load(path, place=fit) as model:
            assert {*fit.fetching.slots.names} == model.residency.slots.names and model.slots.n_experts == 16


def test_other_banks_have_slots_where_one_is_not_aligned_in_the_file(tmp_path):
    path = tmp_path / "model.gguf"
    with llama.open_gguf(MODEL) as file:
        tensors = {name: (info.type, info.ne, bytes(file.data(info))) for name, info in file.tensors.items()}
        late = {name: tensors.pop(name) for name in [*tensors] if name.startswith("blk.1.") and "_exps" in name}
        odd = {"blk.1.attn_rot_embd": ("f32", (1,), bytes(4))}
        write_gguf(path, file.metadata, {**tensors, **odd, **late}, alignment=4)
    right = unlimited(path, n_threads=1)
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        assert [bank.name for bank in model.slots.banks] == ["blk.0", "blk.2"]
        assert said(model) == right == said(model)


def test_two_backends_fetch_whole_tensors(path):
    with gs.CpuBackend(1, "A") as a, gs.CpuBackend(1, "B") as b, \
            load(path, [a, b], memory={a: LIMIT, b: 1_300_000}, **OPTIONS) as model:
        assert model.slots is None
        assert len(model.eval([3]))


def test_a_wrong_policy_is_refused_before_anything_is_read(path):
    with pytest.raises(ValueError, match="'fifo' is no policy for experts: lfu, lru, mixture, whole$"):
        load(path, experts="fifo")
    with pytest.raises(TypeError, match="begin, or is one of lfu, lru, mixture, whole, not 3$"):
        load(path, experts=3)


def test_an_error_of_the_disk_undoes_the_evaluation_and_the_model_works_afterwards(path, monkeypatch):
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        right = said(model)
        file = type(model.weights._files[0].file)
        real = file.preadv

        def fail(self, fd, out, offset):
            if len(out) > 16384:        # not a row of the embedding
                raise OSError(errno.EIO, "bad block")
            return real(self, fd, out, offset)

        for _ in range(3):
            monkeypatch.setattr(file, "preadv", fail)
            with pytest.raises(gs.FetchError, match=r"expert \d") as raised:
                said(model)
            assert raised.value.tensor.endswith("_exps.weight") and raised.value.code == errno.EIO
            monkeypatch.setattr(file, "preadv", real)
            assert said(model) == right
        assert model.slots.held_nbytes <= model.slots.nbytes


@pytest.mark.parametrize(("options", "rates"), [
    ({"memory": LIMIT, **OPTIONS}, (0.01, 0.05, 0.3)),
    ({"memory": 500_000, "n_ctx": 64, "n_batch": 1}, (0.0005, 0.005, 0.05))], ids=["dense stay", "some are fetched"])
@pytest.mark.parametrize("direct", [None, False])
def test_whatever_happens_to_the_disk_logits_are_right_or_an_error_is_typed(path, direct, options, rates):
    counts = Counter()
    with load(path, n_threads=1, **options) as model:
        assert model.slots is not None
        right, buffer = said(model), model.weights._files[0]
        for seed in range(12):
            faults = DiskFaults(seed, rate=rates[seed % 3], kinds=[k for k in KINDS if k != "interrupt"])
            if direct is False:
                buffer.file.give_up_direct()
            with faults.on(buffer):
                try:
                    assert said(model) == right, (seed, faults.happened)
                    counts["right"] += 1
                except gs.FetchError as error:
                    counts["error"] += 1
                    assert error.path and error.tensor
            assert model.slots.held_nbytes <= model.slots.nbytes
            buffer.file.reopen_direct()
        assert said(model) == right
        assert sum(on.total for on in model.memory().values()) <= options["memory"]
    assert counts["error"] > 2 and counts["right"]


def test_closing_leaves_nothing_open(path):
    model = load(path, memory=LIMIT, n_threads=1, **OPTIONS)
    slots = model.slots
    model.eval([1])
    model.close()
    assert all(bank.buffer.closed for bank in slots.banks) and model.slots is None
    assert sum(on.total for on in model.memory().values()) == 0


# -- recordings ----------------------------------------------------------------------------------------------------


def recorded(model):
    with model.record_experts() as recording:
        bits = said(model)
    return recording, bits


def test_a_recording_has_what_each_layer_used_with_and_without_slots(path):
    with load(path, n_threads=1, **OPTIONS) as free:
        right = said(free)
        recording, bits = recorded(free)
        assert bits == right
    assert [bank.name for bank in recording.banks] == ["blk.0", "blk.1", "blk.2"]
    assert [visit.bank for visit in recording.visits] == [0, 1, 2] * 8
    assert all(len(token) == 2 for visit in recording.visits for token in visit.experts)
    assert [len(visit.experts) for visit in recording.visits] == [10] * 3 + [1] * 21
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        assert recorded(model)[0] == recording


@pytest.mark.parametrize("policy", [LeastRecentlyUsed(), LeastFrequentlyUsed(), Mixture()])
def test_a_replay_counts_what_a_run_has_read(path, policy):
    with load(path, memory=LIMIT, n_threads=1, experts=policy, **OPTIONS) as model:
        recording, _ = recorded(model)
        counted, n_slots = model.slots.traffic, model.slots.n_slots
    found = replay(recording, policy, n_slots)
    assert found == counted
    assert bound(recording, n_slots).nbytes <= found.nbytes


def test_a_profile_of_a_recording_serves_the_next_run(path):
    with load(path, n_threads=1, **OPTIONS) as free:
        recording, right = recorded(free)
    with load(path, memory=LIMIT, n_threads=1, experts=Static(recording.profile), **OPTIONS) as model:
        assert said(model) == right
        assert model.slots.traffic == replay(recording, Static(recording.profile), model.slots.n_slots)


def test_a_model_is_recorded_once_at_a_time_and_one_without_experts_has_nothing_to_record(path):
    with load(path, n_threads=1, **OPTIONS) as model, model.record_experts(), \
            pytest.raises(RuntimeError, match="already"), model.record_experts():
        pass
    with pytest.raises(ModelClosed), model.record_experts():
        pass
    with load(random_llama(1), n_threads=1, **OPTIONS) as model, model.record_experts() as recording:
        model.eval([1])
        assert recording == Routing([])


def check(holds):
    assert holds


def test_a_child_process_has_slots_of_its_own(path):
    with load(path, memory=LIMIT, n_threads=1, **OPTIONS) as model:
        right = said(model)
        assert in_child(lambda: check(said(model) == right)) == 0
        assert said(model) == right
