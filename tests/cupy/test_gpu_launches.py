"""How many launches a token takes, how many bytes they move, and what the host calls: counted, so that no change makes
them more unnoticed.  docs/gpu.md has these figures."""

from collections import Counter
from pathlib import Path

import gpu_launches
import gpu_model
import pytest
from gpu_launches import Launched, family, graph_of, host_calls, launched

from ggml_sched.backends.cupy.ops import attention, library, matrix


@pytest.mark.parametrize(("model", "rows", "layer", "others"), [
    ("llama-2-7b", 256, 6, 4), ("llama-2-7b", 4096, 6, 4), ("llama-3-8b", 256, 6, 4)])
def test_launches_of_a_token(model, rows, layer, others):
    """`layer`: in each layer; `others`: rows of the embeddings, the first and the last norm, the logits."""
    n_layers = gpu_launches.MODELS[model][1]["block_count"]
    assert len(launched(graph_of(model, rows))) == n_layers * layer + others


def test_launches_of_a_layer():
    found = launched(graph_of("llama-2-7b", 256))
    names = [family(launch.kernel) for launch in found[2:8]]
    assert names == ["matvec", "turn_heads", "attention", "matvec", "matvec", "matvec"]
    assert [launch.goes_on for launch in found[2:8]] == [False, False, False, True, True, True]


def test_graphs_of_llama_cpp_take_as_many():
    """Beside them, rows of the last layer's outputs are selected twice, of the residual between a product and its norm,
    which keeps its launch."""
    found = Counter(family(launch.kernel) for launch in launched(gpu_launches.recorded("llama-2-7b-fa-decode")))
    assert found.total() == 32 * 6 + 4 + 3
    assert found["quantize"] == 0


def test_bytes_of_a_token():
    """All weights once, and the rows of the cache; what else a token moves is a hundredth of that."""
    found = launched(graph_of("llama-2-7b", 256))
    weights = (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000) // 32 * 18
    cache = 32 * 2 * 256 * 4096 * 2
    read, written = sum(launch.read for launch in found), sum(launch.written for launch in found)
    assert weights + cache <= read < 1.005 * (weights + cache)
    assert written < 0.004 * read


def test_the_host_calls_one_graph_a_token():
    calls = host_calls(graph_of("llama-2-7b", 256))
    assert (calls.launches, calls.graph_launches) == (0, 1)
    assert calls.copies_in <= 6 and calls.copies_out <= 2 and calls.waits <= 1


def test_the_script_prints_a_table(capsys):
    assert gpu_launches.main(["llama-2-7b", "--rows", "512"]) == 0
    page = capsys.readouterr().out
    assert "llama-2-7b, a token at 512 rows: 196 launches" in page and "| matvec | 129 |" in page


def test_launches_of_a_layer_of_experts():
    found = [family(launch.kernel) for launch in launched(graph_of("qwen3moe-30b", 256))]
    assert len(found) == 48 * 11 + 3
    assert found[2:13] == ["matvec", "turn_heads", "attention", "matvec", "norm_rows", "matvec", "choose_experts",
                           "matvec", "matvec", "weighted_sum", "norm_rows"]


def test_operations_of_attention():
    """Of the cells that a causal mask leaves: scores and values, a product and a sum each."""
    for model, heads in (("llama-2-7b", 32), ("llama-3-8b", 32)):
        found = [launch for launch in launched(graph_of(model, 4096, 4096)) if family(launch.kernel) == "attention"]
        assert {launch.kernel for launch in found} == {"attention_mma.tiles_128_64"}
        assert {launch.operations for launch in found} == {2 * 2 * 128 * heads * 4096 * 4097 // 2}
        one, *_ = (launch for launch in launched(graph_of(model, 256)) if family(launch.kernel) == "attention")
        assert (one.kernel.partition(".")[0], one.operations) == ("attention", 2 * 2 * 128 * heads * 256)


# -- the model of time ----------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "device", "rows", "n_tokens"), gpu_model.PUBLISHED)
def test_the_model_of_time_meets_what_is_published(model, device, rows, n_tokens):
    """Of llama.cpp: long contexts, where the rate of the memory counts, and prompts, where that of operations does."""
    found = gpu_model.rate(model, device, rows, n_tokens)
    assert found == pytest.approx(gpu_model.PUBLISHED[model, device, rows, n_tokens], rel=0.1)


@pytest.mark.parametrize(("model", "device", "rows", "n_tokens"), gpu_model.MORE_LAUNCHES)
def test_the_model_is_faster_than_what_takes_more_launches_by_no_more_than_they_cost(model, device, rows, n_tokens):
    """llama.cpp takes 16 for a layer, of which a small one adds the gap and some accesses to memory that wait for each
    other."""
    gpu, published = gpu_model.DEVICES[device], gpu_model.MORE_LAUNCHES[model, device, rows, n_tokens]
    found = launched(graph_of(model, rows, n_tokens), gpu.n_multiprocessors)
    n_more = 16 * gpu_launches.MODELS[model][1]["block_count"] + 4 - len(found)
    cost = (1 / published - gpu_model.token(found, gpu)) / n_more
    assert gpu.gap < cost < gpu.gap + 4 * gpu.latency


def test_operations_take_time_where_they_are_many():
    """Of a prompt of 512 tokens more than its bytes; of a token less.  Behind the last attention one token is left."""
    gpu = gpu_model.DEVICES["H200"]
    many, one = (launched(graph_of("llama-2-7b", 512, n), gpu.n_multiprocessors) for n in (512, 1))
    unit, others = 3 * 4096 * 11008, 4 * 4096**2
    products = {name: sum(launch.operations for launch in many if family(launch.kernel) == name)
                for name in ("mma", "matvec")}
    assert products == {"mma": 2 * 512 * (32 * others + 31 * unit), "matvec": 2 * (unit + 4096 * 32000)}
    without = [launch._replace(operations=0) for launch in many]
    assert gpu_model.token(many, gpu) > 2 * gpu_model.token(without, gpu)
    assert gpu_model.token(many, gpu) > sum(x.operations for x in many) / (gpu.tensor * gpu_model.TILES)
    assert gpu_model.token(one, gpu) == gpu_model.token([x._replace(operations=0) for x in one], gpu)
    assert 0.1 < gpu_model.dense_share(many, gpu) < gpu_model.TILES


def documented() -> dict[str, dict[str, str]]:
    """The table of docs/gpu.md whose columns are devices: {row: {device: cell}}."""
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text(encoding="utf-8")
    lines = page[page.index("| about |"):].partition("\n\n")[0].splitlines()
    (_, *devices), _, *rows = ([cell.strip() for cell in line.strip(" |").split("|")] for line in lines)
    return {row: dict(zip(devices, cells, strict=True)) for row, *cells in rows}


@pytest.mark.parametrize("device", gpu_model.DEVICES)
def test_the_documentation_has_what_the_model_says(device):
    gpu, table = gpu_model.DEVICES[device], documented()
    one, some, many = (launched(graph_of("llama-2-7b", rows, n), gpu.n_multiprocessors)
                       for rows, n in ((256, 1), (512, 512), (4096, 4096)))
    target = gpu_model.TARGETS.get(device)
    assert [row[device] for row in table.values()] == [
        f"{gpu_model.share(one, gpu):.2f}", f"{target:.2f}" if target else "–",
        f"{gpu_model.share(one, gpu, overlap=True):.2f}", f"{gpu_model.token(some, gpu) * 1e3:,.0f}",
        f"{gpu_model.token(many, gpu) * 1e3:,.0f}", f"{gpu_model.dense_share(many, gpu):.2f}"]


@pytest.mark.parametrize("device", gpu_model.TARGETS)
def test_the_model_says_that_a_token_reaches_the_targets(device):
    """Without launches that overlap, which add to it on devices that can, and nothing elsewhere."""
    gpu = gpu_model.DEVICES[device]
    found = launched(graph_of("llama-2-7b", 256), gpu.n_multiprocessors)
    alone, overlapped = (gpu_model.share(found, gpu, overlap) for overlap in (False, True))
    assert gpu_model.TARGETS[device] <= alone <= overlapped < 1
    assert (overlapped > alone + 0.05) == gpu.overlaps


@pytest.mark.parametrize(("model", "device", "gain"), [
    ("qwen3moe-30b", "H200", 0.04), ("qwen3moe-30b", "A100", 0.03), ("qwen3moe-30b", "3060", 0.0),
    ("llama-3-8b", "H200", 0.0), ("llama-3-8b", "4090", 0.0)])
def test_warps_share_rows_nowhere_where_the_model_says_that_it_loses(model, device, gain, monkeypatch):
    """`gain`: at least this share of the time, that of the choice of experts above all."""
    gpu = gpu_model.DEVICES[device]
    shared = launched(graph_of(model, 256), gpu.n_multiprocessors)
    monkeypatch.setattr(matrix, "_share", lambda *_: matrix.WARPS * matrix.ROWS)
    alone = launched(graph_of(model, 256), gpu.n_multiprocessors)
    for a, b in zip(shared, alone, strict=True):
        assert gpu_model.seconds(a, gpu) <= gpu_model.seconds(b, gpu)
    assert gpu_model.token(shared, gpu) <= (1 - gain) * gpu_model.token(alone, gpu)


def share_of_attention(found: list[Launched], gpu: gpu_model.GPU) -> float:
    times = gpu_model.each(found, gpu)
    return sum(time for launch, time in zip(found, times, strict=True)
               if family(launch.kernel) == "attention") / sum(times)


@pytest.mark.parametrize(("device", "most", "alone"), [
    ("H200", 0.1, 0.5), ("A100", 0.1, 0.5), ("4090", 0.15, 0.2), ("3060", 0.15, 0.2)])
def test_attention_of_a_long_prompt_by_the_model(device, most, alone):
    """The share of the time of 4,096 tokens; `alone`: of the same in f32."""
    gpu = gpu_model.DEVICES[device]
    found = launched(graph_of("llama-2-7b", 4096, 4096), gpu.n_multiprocessors)
    in_f32 = [launch._replace(kernel="attention.half_128_8") if family(launch.kernel) == "attention" else launch
              for launch in found]
    assert share_of_attention(found, gpu) < most
    assert share_of_attention(in_f32, gpu) > alone


@pytest.mark.parametrize(("device", "gain"), [("H200", 0.1), ("A100", 0.1), ("4090", -0.03), ("3060", -0.01)])
def test_heads_of_a_long_cache_are_computed_on_tensor_cores_where_the_model_says_that_it_pays(
        device, gain, monkeypatch):
    """`gain`: at least this share of the time of attention, of a llama-3-70b's eight query heads to a key head."""
    gpu = gpu_model.DEVICES[device]
    arch, metadata = gpu_launches.MODELS["llama-3-8b"]
    wide = metadata | {"embedding_length": 8192, "attention.head_count": 64, "block_count": 1}
    monkeypatch.setitem(gpu_launches.MODELS, "wide", (arch, wide))

    def time() -> tuple[str, float]:
        one, = (launch for launch in launched(graph_of("wide", attention.MANY_CELLS), gpu.n_multiprocessors)
                if family(launch.kernel) == "attention")
        return one.kernel, gpu_model.seconds(one, gpu)

    kernel, on_tensor_cores = time()
    monkeypatch.setattr(attention, "_tile", lambda node: None)
    other, in_f32 = time()
    assert (kernel, other) == ("attention_mma.tiles_128_16", "attention.half_128_8")
    assert on_tensor_cores < (1 - gain) * in_f32


def test_what_tiles_must_reach_for_the_library_to_be_worse():
    """docs/gpu.md and ops/library.py have these shares."""
    needed = {name: round(gpu_model.needed_of_tiles(gpu, library.MANY_QUANTISED), 2)
              for name, gpu in gpu_model.DEVICES.items()}
    assert needed == {"H200": 0.15, "A100": 0.19, "4090": 0.11, "3090": 0.2, "3060": 0.21}
    for gpu in gpu_model.DEVICES.values():
        shares = [gpu_model.needed_of_tiles(gpu, columns) for columns in (16, 64, 192, 512, 4096)]
        assert shares == sorted(shares) and shares[-1] < gpu_model.LIBRARY / 2


def test_weights_that_are_read_ahead():
    """Of each row its first 2048 bytes; none of experts, whose numbers are not known before."""
    first = launched(graph_of("llama-2-7b", 256))[2]
    assert first.ahead == 3 * 4096 * 2048
    found = [launch for launch in launched(graph_of("qwen3moe-30b", 256)) if family(launch.kernel) == "matvec"]
    assert [launch.ahead > 0 for launch in found[:5]] == [True, True, True, False, False]


def test_a_launch_takes_no_less_time_than_its_bytes_and_its_gap():
    gpu = gpu_model.DEVICES["H200"]
    large = Launched("matvec_plain.q4_0_1", 100_000, 128, 1 << 30, 1 << 10, asked=2304)
    time = gpu_model.seconds(large, gpu)
    assert (1 << 30) / gpu.copies + gpu.gap < time < 1.1 * (1 << 30) / gpu.copies
    one = gpu_model.seconds(large._replace(blocks=1), gpu)
    assert one > 50 * time                  # a block alone has few bytes in flight
    assert gpu_model.seconds(large._replace(read=0, written=0), gpu) < 3e-6


def test_the_page_of_the_model(capsys):
    assert gpu_model.main(["llama-2-7b", "--device", "3060"]) == 0
    page = capsys.readouterr().out
    assert "llama-2-7b on 3060, 1 token at 256 rows: 196 launches, ~" in page
    assert page.rstrip().endswith("Times are estimates: none was measured.")
