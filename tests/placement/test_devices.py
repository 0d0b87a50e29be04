"""Devices and links are values: checked where they are made, compared by their numbers, and picklable."""

import math
import pickle

import numpy as np
import pytest

import ggml_sched as gs
from ggml_sched.placement.devices import DEFAULT_LINK, Links

GPU = gs.Device("GPU0", memory=24 << 30, bandwidth=1e12, flops=80e12)
CPU = gs.Device("CPU", memory=64 << 30, bandwidth=60e9, flops=1e12, host=True)


def test_prices_that_are_not_given_depend_on_whether_the_device_is_the_host():
    assert (GPU.launch, GPU.split) == (2.5e-6, 10e-6)
    assert (CPU.launch, CPU.split) == (4e-6, 5e-6)
    assert gs.Device("A", 1, 1, 1, launch=0, split=0).launch == 0


def test_a_device_is_a_value():
    other = gs.Device("GPU0", 24 << 30, 1e12, 80e12, bandwidths={"q4_0": 9e11, "f16": 1e12})
    assert other != GPU and other.replace(bandwidths={}) == GPU
    assert other == gs.Device("GPU0", 24 << 30, 1e12, 80e12, bandwidths={"f16": 1e12, "q4_0": 9e11})
    assert len({other, GPU, other.replace(bandwidths={}), CPU}) == 3
    with pytest.raises(AttributeError):
        GPU.memory = 1


def test_a_pickle_and_a_dict_have_the_numbers_and_not_the_backend():
    given = GPU.replace(bandwidths={"q4_0": 9e11}, measured=frozenset({"flops"}), reserve=7)
    real = given.on(gs.DryBackend("mine"))
    for copied in (pickle.loads(pickle.dumps(real)), gs.Device.from_dict(real.to_dict())):
        assert copied == real
        assert isinstance(copied.backend, gs.DryBackend)
    with pytest.raises(ValueError, match=r"device 'x': unknown fields \['speed'\], missing fields \['flops'\]"):
        gs.Device.from_dict({"name": "x", "memory": 1, "bandwidth": 1, "speed": 3})


def test_without_a_backend_a_device_has_a_dry_one_of_its_budget():
    device = GPU.replace(reserve=1 << 30, alignment=256)
    backend = device.backend
    assert backend is device.backend
    assert (backend.name, backend.alignment, backend.memory_available()) == ("GPU0", 256, 23 << 30)
    assert not backend.has_memory and not backend.is_host and CPU.backend.is_host
    with pytest.raises(gs.OutOfMemory, match="GPU0"):
        backend.alloc_buffer((23 << 30) + 1)


def test_a_real_backend_stays_with_its_device():
    with gs.CpuBackend(1, name="mine") as backend:
        device = CPU.on(backend)
        assert device.backend is backend and device.alignment == backend.alignment
        assert device.replace(memory=1).backend is backend
        assert device.replace(alignment=CPU.alignment) == CPU, "a backend is not compared"


def test_a_reserve_larger_than_the_memory_leaves_no_budget():
    assert GPU.replace(reserve=1 << 30).budget == 23 << 30
    assert GPU.replace(reserve=25 << 30).budget == 0


def test_rates_of_a_type_replace_the_rates_of_the_device():
    device = GPU.replace(bandwidths={"q4_0": 9e11}, flops_of={"f16": 1e14})
    assert device.rates("q4_0") == (9e11, 80e12)
    assert device.rates("f16") == (1e12, 1e14)
    assert device.rates(None) == device.rates("q8_0") == (1e12, 80e12)


@pytest.mark.parametrize(("fields", "error", "match"), [
    ({"bandwidth": 0}, ValueError, "device 'A': bandwidth is 0 a second"),
    ({"bandwidth": -1.0}, ValueError, "bandwidth"),
    ({"flops": math.inf}, ValueError, "device 'A': flops is inf"),
    ({"flops": 10**400}, ValueError, "device 'A': flops is inf"),
    ({"bandwidth": 1e-320}, ValueError, "device 'A': bandwidth is .* at least 1"),
    ({"bandwidth": 1e31}, ValueError, "device 'A': bandwidth is 1e[+]31 .* at most 1e[+]30"),
    ({"launch": 1e7}, ValueError, "device 'A': launch is 1e[+]07 seconds"),
    ({"measured": "abc"}, ValueError, r"device 'A': measured names \['a', 'b', 'c'\]"),
    ({"flops": math.nan}, ValueError, "device 'A': flops is nan"),
    ({"bandwidth": "fast"}, TypeError, "device 'A': bandwidth is a number, not 'fast'"),
    ({"memory": -1}, ValueError, "device 'A': memory of -1 bytes"),
    ({"memory": 1 << 63}, ValueError, "too large"),
    ({"memory": 1e9}, TypeError, "device 'A': memory is a whole number of bytes"),
    ({"reserve": -1}, ValueError, "device 'A': reserve"),
    ({"launch": -1e-9}, ValueError, "device 'A': launch"),
    ({"split": math.inf}, ValueError, "device 'A': split"),
    ({"alignment": 48}, ValueError, "device 'A': an alignment of 48 bytes"),
    ({"alignment": 0}, ValueError, "device 'A': an alignment of 0 bytes"),
    ({"bandwidths": {"q4_0": 0}}, ValueError, "device 'A': bandwidths of q4_0 is 0"),
    ({"flops_of": {"q4": 1}}, ValueError, "device 'A': flops_of names the type 'q4'; types are"),
    ({"name": ""}, TypeError, "the name of a device"),
    ({"name": 3}, TypeError, "the name of a device"),
    ({"name": "A\udc80"}, ValueError, r"device 'A\\udc80': the name has the lone surrogate U\+DC80"),
    ({"backend": "CPU"}, TypeError, "device 'A': backend is a Backend"),
])
def test_numbers_that_no_device_has_are_errors(fields, error, match):
    with pytest.raises(error, match=match):
        gs.Device(**{"name": "A", "memory": 1, "bandwidth": 1, "flops": 1, **fields})


def test_a_link_is_checked():
    assert gs.Link(25e9, 8e-6) == gs.Link(25e9, 8e-6) != gs.Link(25e9)
    for wrong in ((0,), (-1,), (math.inf,), (1, -1), (1, math.nan)):
        with pytest.raises(ValueError, match="a link: "):
            gs.Link(*wrong)


def test_devices_without_a_link_of_their_own_exchange_data_through_the_host():
    other = GPU.replace(name="GPU1")
    links = Links([GPU, other, CPU], gs.Link(10, 1))
    assert np.array_equal(links.latency, [[0, 2, 1], [2, 0, 1], [1, 1, 0]])
    assert np.allclose(links.per_byte, [[0, .2, .1], [.2, 0, .1], [.1, .1, 0]])
    given = {("GPU0", "CPU"): gs.Link(10, 1), ("CPU", "GPU0"): gs.Link(5, 2), ("GPU1", "CPU"): gs.Link(2, 3)}
    links = Links([GPU, other, CPU], given)
    assert np.array_equal(links.latency, [[0, 4, 1], [5, 0, 3], [2, 3, 0]])
    assert np.allclose(links.per_byte, [[0, .6, .1], [.7, 0, .5], [.2, .5, 0]])
    links = Links([GPU, other, CPU], {("GPU0", "GPU1"): gs.Link(100, 7), ("*", "*"): gs.Link(4, 5)})
    assert np.array_equal(links.latency, [[0, 7, 5], [7, 0, 5], [5, 5, 0]])


def test_where_no_link_is_given_the_default_is_assumed():
    links = Links([GPU, CPU])
    assert links.latency[0, 1] == links.latency[1, 0] == DEFAULT_LINK.latency
    assert links.per_byte[0, 1] == 1 / DEFAULT_LINK.bandwidth
    assert Links([GPU, GPU.replace(name="GPU1")]).latency[0, 1] == 2 * DEFAULT_LINK.latency, "no host"


@pytest.mark.parametrize(("link", "error", "match"), [
    (3, TypeError, "link is a Link"), ({"GPU0": gs.Link(1)}, TypeError, "'GPU0'"),
    ({("GPU0", "GPU0"): gs.Link(1)}, ValueError, "from a device to itself"),
    ({("GPU0", "CPU"): 3}, TypeError, "pair of names"),
    ({("GPU0", "TPU"): gs.Link(1)}, ValueError, "no device has the name 'TPU'; names are GPU0, CPU"),
    ({("*", "CPU"): gs.Link(1)}, ValueError, "no device has the name '[*]'"),
])
def test_links_that_cannot_be_read_are_errors(link, error, match):
    with pytest.raises(error, match=match):
        Links([GPU, CPU], link)


def test_two_devices_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="two devices have the name 'GPU0'"):
        Links([GPU, CPU, GPU])
