"""The result of alloc_buffer is checked before use: a BackendError names the backend and the wrong property."""

import pytest
from devices import device

import ggml_sched as gs


def liar(lie) -> gs.DryBackend:
    """A backend whose alloc_buffer returns `lie(buffer)`."""
    made = device(gs.DryBackend, "liar", answers={"alloc_buffer": lambda inherited, size: lie(made, inherited(size))})
    return made


def closed(backend, buffer):
    buffer.close()
    return buffer


def smaller(backend, buffer):
    buffer.close()
    return gs.DryBackend.alloc_buffer(backend, buffer.size - 1)


KEPT = {}


def again(backend, buffer):
    """The same buffer for every call."""
    return KEPT.setdefault(backend, buffer)


LIES = {
    "nothing": (lambda backend, buffer: None, "returned None, not a Buffer"),
    "a number": (lambda backend, buffer: 7, "returned 7, not a Buffer"),
    "bytes": (lambda backend, buffer: bytearray(buffer.size), "returned bytearray.*, not a Buffer"),
    "a backend": (lambda backend, buffer: backend, "not a Buffer"),
    "a closed buffer": (closed, "closed"),
    "a smaller buffer": (smaller, "255 bytes"),
    "another's buffer": (lambda backend, buffer: gs.DryBackend("honest").alloc_buffer(buffer.size), "'honest'"),
}


def alloc_tensors(backend, ctx):
    return backend.alloc_tensors(ctx)


def tensor_allocator(backend, ctx):
    return gs.TensorAllocator.from_backend(backend, 256)


def allocator(backend, ctx):
    return gs.Allocator.from_backend(backend, 256)


def scheduler(backend, ctx):
    found = gs.Scheduler([backend])
    found.alloc(gs.Graph(ctx.scale(ctx.tensors[0], 2.0)))
    return found


USERS = (alloc_tensors, tensor_allocator, allocator, scheduler)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_result_of_alloc_buffer_is_an_error(lie, user):
    make, message = LIES[lie]
    backend, ctx = liar(make), gs.Context()
    t = ctx.tensor("f32", 64, "t")
    with pytest.raises(gs.BackendError, match=f"'liar'.*256.*{message}"):
        user(backend, ctx)
    assert t.buffer is None
    if lie == "a smaller buffer":
        assert backend.used == 0, "what is too small is given back"
    backend.answers.clear()
    assert user(backend, ctx) is not None


@pytest.mark.parametrize("user", USERS)
def test_a_buffer_is_given_once(user):
    backend = liar(again)
    first, second = gs.Context(), gs.Context()
    first.tensor("f32", 64, "a")
    t = second.tensor("f32", 64, "b")
    held = user(backend, first)
    with pytest.raises(gs.BackendError, match="'liar'.*returned before"):
        user(backend, second)
    assert t.buffer is None
    held.close()


def test_an_allocator_that_cannot_be_made_gives_its_buffer_back():
    backend = gs.DryBackend("dry")

    class Picky(gs.TensorAllocator):
        def __init__(self, *args, **kwargs):
            raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        Picky.from_backend(backend, 256)
    assert backend.used == 0
    for wrong in (1.5, "256", None):
        with pytest.raises(TypeError):
            gs.TensorAllocator.from_backend(backend, wrong)
    assert backend.used == 0


# -- fields and results of wrong types -------------------------------------------------------------------


def rubbish(what, given) -> gs.DryBackend:
    """A backend with `given` for a field, or as the result of a method."""
    if what == "max_buffer_size":
        return device(gs.DryBackend, "rubbish", attributes={what: given})
    return device(gs.DryBackend, "rubbish", answers={what: lambda inherited, *asked: given})


@pytest.mark.parametrize("given", ["all", 1.5, [1], b"1"], ids=repr)
@pytest.mark.parametrize("what", ["inplace_sources", "max_buffer_size", "alloc_size"])
def test_an_answer_of_the_wrong_type_names_the_backend(what, given):
    ctx = gs.Context()
    graph = gs.Graph(ctx.scale(ctx.tensor("f32", 4, "x", input=True), 2.0))
    with pytest.raises(TypeError, match="'rubbish'"), gs.Scheduler([rubbish(what, given)]) as scheduler:
        scheduler.plan(graph)
    if what == "inplace_sources":
        with gs.TensorAllocator.measure_from_backend(rubbish(what, given)) as measuring, \
                pytest.raises(TypeError, match="'rubbish'.*SCALE"):
            gs.GraphAllocator().alloc_graph(measuring, graph)
