"""What fit raises where nothing fits: sums, pins that are too large, and which smaller context would suffice."""

from types import SimpleNamespace

import pytest

import ggml_sched as gs
from ggml_sched.placement.refusal import Least, refusal

GPU, HOST = gs.Device("GPU", 1000, 1e12, 1e13), gs.Device("CPU", 2000, 5e10, 1e12, host=True, reserve=500)


def model(weights: int, cache: int, n_ctx: int | None = 4096) -> SimpleNamespace:
    """What is read of the trials of a model with a weight and a cache, which take 10 bytes more on a device."""
    sizes = {"w": weights, "k": cache}
    return SimpleNamespace(sizes=sizes, kinds={"w": "weight", "k": "kv"}, bytes_on=lambda d, name: sizes[name] + 10,
                           graphs=[SimpleNamespace(meta={} if n_ctx is None else {"n_ctx": n_ctx})])


def said(*models: SimpleNamespace, pins=None, on_host: int | None = None, arenas: int = 0) -> list[str]:
    least = None if on_host is None else Least(on_host, arenas)
    error = refusal(models, (GPU, HOST), pins or [{} for _ in models], least)
    return str(error).split("; ")


def test_sums_are_those_of_all_models():
    first, second = said(model(3000, 100), model(500, 0))[:2]
    assert first == "nothing fits: the weights take 3.42 KiB, the caches 100 B, together 3.52 KiB"
    assert second == "the devices have 2.44 KiB beside their reserves of 500 B"
    assert "the arenas 400 B, together 3.91 KiB" in said(model(3000, 100), model(500, 0), on_host=1600, arenas=400)[0]


@pytest.mark.parametrize(("size", "is_named"), [(990, False), (991, True)])
def test_pins_that_exceed_a_device_are_named(size, is_named):
    lines = said(model(size, 5000), pins=[{"w": 0}])
    assert any("pinned to GPU" in line for line in lines) is is_named
    assert any("takes 1001 B of its 1000 B" in line for line in lines) is is_named
    assert not any("pinned to CPU" in line for line in lines)


@pytest.mark.parametrize(("cache", "n_ctx", "tokens"), [(1000, 4096, 3686), (101, 4096, 40), (100, 4096, None),
                                                        (50, 4096, None), (1000, None, None), (1000, 0, None)])
def test_a_smaller_context_is_named_where_caches_are_more_than_what_is_missing(cache, n_ctx, tokens):
    lines = said(model(3000, cache, n_ctx), on_host=1600)       # of 1500
    assert any("(100 bytes) more on CPU would suffice" in line for line in lines)
    context = [line for line in lines if "context" in line]
    assert len(context) == (tokens is not None)
    if tokens is not None:
        assert f"a context of about {tokens} tokens instead of 4096" in context[0]


def test_contexts_that_are_no_numbers_or_too_large_for_a_float_do_not_matter():
    for other in ("x", None, 1.5, [1]):
        lines = said(model(3000, 500), model(0, 500, other), on_host=1600)
        assert lines[-1] == "so would a context of about 3686 tokens instead of 4096"
    assert f"{9 * 10**399} tokens instead of {10**400}" in said(model(3000, 1000, 10**400), on_host=1600)[-1]
    assert "context" not in said(model(3000, 1000, -4096), on_host=1600)[-1]


def test_the_reserve_may_exceed_the_memory():
    host = HOST.replace(reserve=2600)
    error = refusal([model(3000, 0)], (GPU, host), [{}], Least(300, 0))
    assert "(900 bytes) more on CPU would suffice" in str(error)
