"""Graphs of a growing text: those that were worked out are those that would have been built, and compute the same."""

from __future__ import annotations

import arch_cases as cases
import pytest
from arch_runner import Runner

from ggml_sched.llama.builder import Shape, build_graph
from ggml_sched.llama.graphmaker import KEPT_KINDS, GraphMaker


@pytest.mark.parametrize("flash", [False, True], ids=["softmax", "flash"])
@pytest.mark.parametrize("name", cases.CASES)
def test_graphs_that_were_worked_out_equal_those_that_were_built(name, flash):
    with Runner(cases.model(name), 100, flash=flash) as r:
        maker = GraphMaker(r.arch, r.hparams, r.weights, r.cache)
        for n_tokens, n_outputs, embeddings in ((1, 1, False), (5, 1, False), (4, 4, True), (3, 0, False)):
            for n_kv in (32, 64, 96, 100, 7, 1, 32):
                shape = Shape(n_tokens, n_kv, n_outputs, embeddings)
                made = maker.build(shape)
                built = build_graph(r.arch, r.hparams, r.weights, r.cache, shape, flash)
                assert made.graph.fingerprint == built.graph.fingerprint, shape
                assert made.graph.meta == built.graph.meta and made.shape == shape
                assert [t.name for t in made.graph.tensors] == [t.name for t in built.graph.tensors]
                assert (made.output is None) == (built.output is None) == (n_outputs == 0)
                if made.output is not None:
                    assert made.graph.id_of(made.output) == built.graph.id_of(built.output)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "deepseek2-absorbed", "mamba"])
@pytest.mark.parametrize("flash", [False, True], ids=["softmax", "flash"])
def test_texts_that_grow_on_made_graphs_give_the_same_bits(name, flash):
    results = []
    for made in (False, True):
        with Runner(cases.model(name), 100, flash=flash) as r:
            if made:
                r.graph = GraphMaker(r.arch, r.hparams, r.weights, r.cache).build
            bits = [r.run(cases.tokens()[:3]).tobytes()]
            bits += [r.run([i % 50]).tobytes() for i in range(97)]
        results.append(bits)
    assert results[0] == results[1]


def test_a_maker_keeps_few_kinds_of_graphs():
    with Runner(cases.model("llama")) as r:
        maker = GraphMaker(r.arch, r.hparams, r.weights, r.cache)
        for _ in range(2):
            for n_tokens in range(1, 10):
                for n_kv in (32, 64):
                    maker.build(Shape(n_tokens, n_kv, 1))
        assert len(maker._first) == KEPT_KINDS and set(maker._families) <= set(maker._first)
        maker.clear()
        assert maker.build(Shape(1, 32, 1)).shape.n_kv == 32
