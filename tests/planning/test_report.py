"""Reports of a plan: the table, the explanation of a tensor, the drawing."""

import re
from dataclasses import replace
from random import Random

import pytest
from devices import resident_tensor
from random_problems import plan_of, random_case
from small_graphs import dry_device, two_layers

import ggml_sched as gs
from ggml_sched.planning import report

TABLE = """\
Plan of 6 nodes, policy seed: 3 splits, 2 copies of 256 bytes

backend  buffer bytes  live bytes  nodes
-------  ------------  ----------  -----
GPU               256         256      4
CPU               256         256      1

split  backend  nodes  input bytes  inputs
-----  -------  -----  -----------  ------
    0  GPU       0..1
    1  CPU          2          128  a1 128
    2  GPU       3..5          128  h2 128

step
----
   0  GPU: load x to x at 0 of GPU
   1  GPU: run nodes 0 .. 1
   2  CPU: copy a1 to CPU#a1 at 0 of CPU, after 1
   3  CPU: run node 2
   4  GPU: copy h2 to GPU#h2 at 0 of GPU, after 3
   5  GPU: run nodes 3 .. 5"""

A1 = """\
'a1' (UNARY:SILU f32 8x4): computed on GPU, in split 0 as node 1, because {reason}
  memory: GPU at offset 128, 128 bytes
  the memory is taken from position 0 until position 5, of 8
  written in place over 'h1', which no later node reads, as the kernel on GPU allows
  not supported by: CPU
  copied to CPU at offset 0: 128 bytes before split 1, read there"""


def explained(plan, t):
    """What `explain` says, without the ids of tensors that have names."""
    return re.sub(r"\btensor \d+ (?=')", "", plan.explain(t))


@pytest.fixture
def plan():
    gpu, cpu = gs.DryBackend("GPU"), gs.DryBackend("CPU", supports_op=lambda t: t.op != "UNARY:SILU")
    graph, ctx = two_layers(gpu, cpu)
    return gs.Scheduler([gpu, cpu], policy="seed").plan(graph)


def tensor(plan, name):
    return next(t for t in plan.graph.tensors if t.name == name)


def test_print_shows_backends_and_splits(plan):
    assert str(plan) == TABLE


def test_repr_stays_one_line(plan):
    assert repr(plan) == "<Plan of 6 nodes: 3 splits, 2 copies, bytes GPU 256, CPU 256>"


def test_the_table_counts_inputs_that_it_does_not_name():
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    total = ctx.tensor("f32", (4,), "x0")
    for k in range(1, 8):
        total = ctx.add(total, ctx.tensor("f32", (4,), f"x{k}"))
    graph = gs.Graph(total)
    scheduler = gs.Scheduler([a, b], policy="seed")
    for t in graph.tensors:
        scheduler.set_tensor_backend(t, a if t.op == "NONE" else b)
    assert re.search(r"128  x\d 16, x\d 16, x\d 16, x\d 16, and 4 more$", str(scheduler.plan(graph)), re.M)


def test_the_table_counts_steps_that_it_does_not_name():
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    t = ctx.tensor("f32", (4,), "x")
    scheduler = gs.Scheduler([a, b])
    for k in range(20):
        t = ctx.sqr(t)
        scheduler.set_tensor_backend(t, (a, b)[k % 2])
    plan = scheduler.plan(gs.Graph(t))
    n = len(plan.program)
    assert str(plan).endswith(f"and {n - 24} more") and len(report.program(plan).splitlines()) == n == 40


def test_explain_names_rule_memory_sharing_refusals_and_copies(plan):
    t = tensor(plan, "a1")
    reason = plan.data.reason(plan.index_of(t))
    assert explained(plan, t) == A1.format(reason=f"{reason}: 'h1'")


def test_explain_tells_residents_views_and_heirs(plan):
    assert "256 bytes of its own on CPU, outside the plan" in explained(plan, tensor(plan, "w2"))
    assert "a view of 'a2' (ADD f32 8x4), from byte 0" in explained(plan, tensor(plan, "flat"))
    assert "written in place over the copy of 'h2' on GPU" in explained(plan, tensor(plan, "a2"))
    assert "viewed by: 'flat'" in explained(plan, tensor(plan, "a2"))
    assert "reused in place by: 'a1'" in explained(plan, tensor(plan, "h1"))


def lines(plan, t):
    return [line.strip() for line in explained(plan, t).splitlines()]


def test_explain_tells_that_the_caller_decided():
    a, b, c, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.DryBackend("C"), gs.Context()
    out = ctx.scale(ctx.tensor("f32", (4,), "x", input=True), 2.0)
    scheduler = gs.Scheduler([a, b, c])
    scheduler.set_tensor_backend(out, b)
    plan = scheduler.plan(gs.Graph(out))
    assert plan.backend_of(out) is b
    assert "A supports it, but the caller assigned the node to B" in lines(plan, out)
    assert "C supports" not in explained(plan, out)        # a worse one was not refused


@pytest.mark.parametrize("assigned_by", [None, "the placement"])
@pytest.mark.parametrize("policy", ["default", "seed"])
def test_explain_tells_that_the_backend_which_the_caller_chose_does_not_support_the_op(policy, assigned_by):
    a, b, ctx = gs.DryBackend("A", supports_op=lambda t: t.op != "SCALE"), gs.DryBackend("B"), gs.Context()
    out = ctx.scale(ctx.tensor("f32", (4,), "x", input=True), 2.0)
    scheduler = gs.Scheduler([a, b], policy=policy)
    scheduler.set_tensor_backend(out, a)
    plan = replace(scheduler.plan(gs.Graph(out)), assigned_by=assigned_by)
    assert plan.backend_of(out) is b and scheduler.get_tensor_backend(out) is a
    by = f"{assigned_by} assigned it" if assigned_by else "the caller assigned it (set_tensor_backend)"
    assert (f"because {by} to a backend that does not support the op; this is the best that does\n"
            in explained(plan, out))
    assert "not supported by: A" in lines(plan, out)
    assert plan.data.rule(plan.index_of(out)) == "user unsupported"


@pytest.mark.parametrize("usage, kind", [("weights", "weight "), ("any", "")])
def test_explain_names_the_sources_that_a_better_backend_cannot_read(usage, kind):
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    w = resident_tensor(b, (4, 4), "w", usage=usage)
    x = ctx.set_name(ctx.scale(ctx.tensor("f32", (4, 2), "input", input=True), 2.0), "x")
    out = ctx.mul_mat(w, x)
    scheduler = gs.Scheduler([a, b])
    scheduler.set_tensor_backend(x, b)
    plan = scheduler.plan(gs.Graph(out))
    assert plan.backend_of(out) is b
    assert f"A supports it, but cannot read without a copy: {kind}'w' on B, 'x' on B" in lines(plan, out)


def test_explain_counts_the_sources_that_it_does_not_name():
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    q, k, v = (resident_tensor(b, (4, 2, 2), name, usage="any") for name in "qkv")
    mask = resident_tensor(b, (2, 2), "mask", type="f16", usage="any")
    sinks = resident_tensor(b, (2,), "sinks", usage="any")
    out = ctx.flash_attn_ext(q, k, v, mask, sinks=sinks)
    plan = gs.Scheduler([a, b]).plan(gs.Graph(out))
    assert "'q' on B, 'k' on B, 'v' on B, 'mask' on B, and 1 more" in explained(plan, out)


def test_explain_asks_backends_what_they_read():
    b, ctx = gs.DryBackend("B"), gs.Context()
    a, near = gs.DryBackend("A"), dry_device("near", reads=("B",))
    w, other = resident_tensor(b, (4, 4), "w"), resident_tensor(b, (4, 2), "other", usage="any")
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    product = ctx.set_name(ctx.mul_mat(w, ctx.add(x, other)), "product")
    scheduler = gs.Scheduler([a, near, b], policy="seed")
    plan = scheduler.plan(gs.Graph(product))
    assert plan.backend_of(product) is b
    found = lines(plan, product)
    assert any(line.startswith("A supports it, but cannot read without a copy: weight 'w' on B") for line in found)
    assert ("near supports it, too, and reads what it reads; the rule that placed the node does not compare backends"
            in found)


def test_explain_tells_whose_memory_a_write_needs():
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    kv = resident_tensor(b, (4, 4), "kv", usage="any")
    x = ctx.tensor("f32", (4, 2), "x", input=True)
    write = ctx.set_rows(kv, x, ctx.tensor("i64", (2,), "rows", input=True))
    plan = gs.Scheduler([a, b]).plan(gs.Graph(write))
    assert plan.backend_of(write) is b
    assert ("A supports it, but cannot reach the memory of 'kv' on B, which the node writes to and cannot read "
            "without a copy: 'x' on B, 'rows' on B") in lines(plan, write)


def test_explain_leaves_out_what_the_chosen_backend_cannot_read_either():
    backends, ctx = [gs.DryBackend(name) for name in "ABC"], gs.Context()
    here, near, there = (resident_tensor(backends[k], (4,), name, usage="any")
                         for k, name in ((1, "here"), (1, "near"), (2, "there")))
    inner = ctx.set_name(ctx.add(here, near), "inner")
    out = ctx.add(inner, there)
    plan = gs.Scheduler(backends).plan(gs.Graph(out))
    assert plan.backend_of(out) is backends[1]
    assert lines(plan, out)[-1] == "A supports it, but cannot read without a copy: 'inner' on B"


def test_a_leaf_that_came_along_is_no_reason():
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    x = ctx.tensor("f32", (4,), "x")
    first = ctx.set_name(ctx.scale(resident_tensor(b, (4,), "state"), 2.0), "first")
    out = ctx.add(first, x)
    plan = gs.Scheduler([a, b]).plan(gs.Graph(out))
    assert plan.backend_of(out) is plan.backend_of(x) is b
    assert "A supports it, but cannot read without a copy: 'first' on B" in lines(plan, out)


def test_explain_of_the_best_backend_speaks_of_no_other(plan):
    assert [t.name for t in plan.graph.nodes if "supports it" in explained(plan, t)] == ["h2"]


def test_explain_tells_of_writes_that_go_back():
    a, b, ctx = gs.DryBackend("A"), gs.DryBackend("B"), gs.Context()
    kv = resident_tensor(a, (8, 4), "kv", usage="any")
    write = ctx.set_name(ctx.cpy(ctx.tensor("f32", (8, 4), "x"), kv), "write")
    scheduler = gs.Scheduler([a, b], policy="seed")
    scheduler.set_tensor_backend(write, b)
    assert "written to there and copied back" in scheduler.plan(gs.Graph(write)).explain(write)


def test_explain_of_an_unused_leaf(ctx):
    x = ctx.tensor("f32", (4,), "x")
    plan = gs.Scheduler([gs.DryBackend("A")], policy="seed").plan(gs.Graph(x))
    assert explained(plan, x) == "'x' (NONE f32 4): no node of the graph uses it, so it has no memory"
    assert str(plan).startswith("Plan of 0 nodes")


def test_explain_refuses_a_stranger(plan):
    with pytest.raises(gs.GraphError, match="stranger"):
        explained(plan, gs.Context().tensor("f32", (4,), "stranger"))


@pytest.mark.parametrize("seed", range(20))
def test_every_copy_is_explained_at_its_own_offset(seed):
    plan = plan_of(random_case(Random(seed)))
    for k, (i, b) in enumerate(plan.data.copies):
        offset = plan.data.offset(plan.data.n_tensors + k)
        where = f"copied to {plan.backends[b].name} at offset {offset:,}: "
        assert where in explained(plan, plan.graph.tensors[i]), (k, where)


def test_dot_has_clusters_colours_and_dashed_copies(plan):
    dot = plan.to_dot()
    assert dot.startswith("digraph plan {") and dot.endswith("}\n")
    assert dot.count("subgraph cluster_") == len(plan.splits) == 3
    assert dot.count("style=dashed") == 2
    assert len(set(re.findall(r'fillcolor="(#\w+)"', dot))) == 2
    assert dot.count("{") == dot.count("}")


def test_dot_escapes_names(ctx):
    out = ctx.set_name(ctx.scale(ctx.tensor("f32", (4,), 'say "hi"\\'), 2.0), "two\nlines")
    dot = gs.Scheduler([gs.DryBackend('"A"')], policy="seed").plan(gs.Graph(out)).to_dot()
    assert r'label="say \"hi\"\\\nNONE f32 4"' in dot
    assert r'label="two\nlines\nSCALE f32 4"' in dot
    assert r'label="split 0: \"A\""' in dot


def test_dot_has_no_control_characters(ctx):
    out = ctx.set_name(ctx.scale(ctx.tensor("f32", (4,), "a\0b\tc"), 2.0), "\x1b[2J\rd\x85")
    dot = gs.Scheduler([gs.DryBackend("A\0")]).plan(gs.Graph(out)).to_dot()
    assert dot.replace("\n", "").isprintable()
    assert r'label="a\\x00b\\tc\nNONE' in dot and r'label="\\x1b[2J d\\x85\nSCALE' in dot
    assert r'label="split 0: A\\x00"' in dot


@pytest.mark.parametrize("seed", range(60))
def test_every_tensor_is_drawn_and_explained_once(seed):
    plan = plan_of(random_case(Random(seed)))
    dot = plan.to_dot()
    for i, t in enumerate(plan.graph.tensors):
        assert len(re.findall(rf"^ *t{i} \[", dot, re.MULTILINE)) == 1
        assert plan.explain(t).startswith(f"tensor {i} {t.name!r}" if t.name else f"tensor {i} (")
    rows = str(plan).split("\n\n")[2].splitlines()[2:] if plan.splits else []
    assert len(rows) == len(plan.splits)


def test_explain_has_an_id_with_each_name_and_names_the_neighbours_of_a_reason(ctx):
    gpu, cpu = gs.DryBackend("GPU"), gs.DryBackend("CPU")
    weights = gs.Context()
    w = weights.tensor("f32", (4, 4), "same")
    gpu.alloc_tensors(weights).usage = "weights"
    x = ctx.tensor("f32", (4, 2), "same", input=True)
    first = ctx.mul_mat(w, x)
    second = ctx.set_name(ctx.silu(first), "same")
    graph = gs.Graph(second)
    with gs.Scheduler([gpu, cpu]) as scheduler:
        plan = scheduler.plan(graph)
        ids = [graph.id_of(t) for t in (w, x, first, second)]
        assert plan.explain(first).startswith(f"tensor {ids[2]} (MUL_MAT f32 4x2): computed on GPU")
        assert f"(a weight or cache) is there: tensor {ids[0]} 'same'\n" in plan.explain(first)
        assert f"already placed is there: tensor {ids[2]}\n" in plan.explain(second)
        assert plan.explain(second).startswith(f"tensor {ids[3]} 'same' (UNARY:SILU")
        scheduler.set_tensor_backend(second, cpu)
        plan = scheduler.plan(graph)
        assert "because the caller assigned it (set_tensor_backend)\n" in plan.explain(second)
        assert "because ggml's scheduler assigned it\n" in replace(plan, assigned_by="ggml's scheduler").explain(second)
        assert "GPU supports it, but ggml's scheduler assigned the node to CPU" in replace(
            plan, assigned_by="ggml's scheduler").explain(second)


def test_tables_and_drawings_have_an_id_where_a_name_repeats(ctx):
    gpu, cpu = gs.DryBackend("GPU"), gs.DryBackend("CPU")
    on_gpu, on_cpu = gs.Context(), gs.Context()
    u, v = on_gpu.tensor("f32", (8, 8), "w"), on_cpu.tensor("f32", (8, 8), "w")
    gpu.alloc_tensors(on_gpu)
    cpu.alloc_tensors(on_cpu)
    x = ctx.tensor("f32", (8, 2), "x", input=True)
    first = ctx.set_name(ctx.mul_mat(u, x), "same")
    second = ctx.set_name(ctx.mul_mat(v, first), "same")
    graph = gs.Graph(ctx.set_output(ctx.mul_mat(u, second)))
    with gs.Scheduler([gpu, cpu]) as scheduler:
        plan = scheduler.plan(graph)
    for t in (first, second):
        called = f"same (tensor {graph.id_of(t)})"
        assert re.search(rf"copy {re.escape(called)} to [CG]PU#{re.escape(called)} at ", str(plan))
        assert f"{called} 64\n" in str(plan)
        assert f'label="{called}\\n' in plan.to_dot()
    assert "load x to GPU#x at " in str(plan), "a name of one tensor alone stands for it"


def test_notebooks_show_graphs_plans_and_programs_as_escaped_text(ctx):
    x = ctx.tensor("f32", (4, 2), "<x>", input=True)
    graph = gs.Graph(ctx.silu(ctx.set_name(ctx.sqr(x), "a & b")))
    with gs.Scheduler([gs.DryBackend("D")]) as scheduler:
        plan = scheduler.plan(graph)
    for value, part in ((graph, "UNARY:SILU f32 [4, 2, 1, 1]"), (plan, "buffer bytes"), (plan.program, "run nodes")):
        shown = value._repr_html_()
        text = shown[shown.index("<pre"):].removesuffix("</details>")
        assert text.endswith("</pre>") and part in text and "<x>" not in shown
    assert plan._repr_html_().startswith("<svg"), "the drawing is in front of the text"
    assert "&lt;x&gt;" in graph._repr_html_() and "a &amp; b" in graph._repr_html_()
    t = x
    for _ in range(60):
        t = ctx.silu(t)
    assert "and 20 more</pre>" in gs.Graph(t)._repr_html_()
