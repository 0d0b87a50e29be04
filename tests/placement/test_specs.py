"""Devices and links as texts: every form, well-known names, and texts that cannot be read."""

import re

import pytest

import ggml_sched as gs
from ggml_sched.placement.known import known_device, known_devices
from ggml_sched.placement.specs import read_bytes, read_device, read_devices, read_link, read_links, with_host

GPU0 = gs.Device("GPU0", 24 << 30, 1e12, 80e12)


@pytest.mark.parametrize(("text", "device"), [
    ("GPU0:24GiB:1000GB/s:80TF", GPU0),
    ("GPU0:1TB/s:80TFLOPS:24GiB", GPU0),
    (" GPU0 : 24 GiB : 1e12B/s : 80 Tflop/s ", GPU0),
    ("GPU0:25769803776B:1000GB/s:80TF", GPU0),
    ("GPU0:24576MiB:1000GB/s:80TF:reserve=300MiB:launch=1us:split=0.5ms",
     GPU0.replace(reserve=300 << 20, launch=1e-6, split=5e-4)),
    ("CPU:64GiB:60GB/s:1TF", gs.Device("CPU", 64 << 30, 60e9, 1e12, host=True)),
    ("host0:64GB:60GB/s:1TF", gs.Device("host0", 64 * 10**9, 60e9, 1e12, host=True)),
    ("box:1GiB:1GiB/s:1GF:host", gs.Device("box", 1 << 30, 1 << 30, 1e9, host=True)),
    ("4090", known_device("RTX 4090").device("4090")),
    ("GPU0=4090:20GiB", known_device("4090").device("GPU0", 20 << 30)),
    ("GPU0=NVIDIA GeForce RTX 4090", known_device("4090").device("GPU0")),
    ("A=h100:1TB/s:launch=9us", known_device("H100").device("A").replace(bandwidth=1e12, launch=9e-6)),
    ("m3-max:64GiB", known_device("M3 Max").device("m3-max", 64 << 30)),
])
def test_a_device_is_read(text, device):
    assert read_device(text) == device


@pytest.mark.parametrize(("text", "match"), [
    ("", "device '' has no name"), ("=4090", "has no name"), (":1GiB:1GB/s:1TF", "has no name"),
    ("4095", "device '4095': no well-known device is called '4095'; like it are .*RTX 4090"),
    ("A=nothing", "device 'A=nothing': no well-known device is called 'nothing'"),
    ("GPU0:24GiB", "device 'GPU0:24GiB': bandwidth, flops are missing, and no well-known device is called 'GPU0'"),
    ("GPU0:24GiB:80TF", "bandwidth is missing"),
    ("GPU0:24GiB:1000GB/s:80", "'80' is none of a memory"),
    ("GPU0:24GiB:20GiB:1000GB/s:80TF", "'20GiB' is a second memory"),
    ("GPU0:24GiB:0GB/s:80TF", "device 'GPU0': bandwidth is 0 a second"),
    ("GPU0:24GiB:1e99GB/s:80TF", "'1e99GB/s' is out of range"),
    ("GPU0:24GiB:1e30GiB:80TF", "'1e30GiB' is a second memory"),
    ("GPU0:1e39PiB:1GB/s:80TF", "device 'GPU0': memory of .* too large"),
    ("GPU0:24GiB:1000GB/s:80TF:launch=fast", "launch 'fast' is no time such as 2.5us"),
    ("GPU0:24GiB:1000GB/s:80TF:reserve=much", "reserve 'much' is no size"),
    ("GPU0:-1GiB:1000GB/s:80TF", "'-1GiB' is none of"),
])
def test_a_text_that_is_no_device_is_an_error(text, match):
    with pytest.raises(ValueError, match=match):
        read_device(text)


def test_sizes():
    assert [read_bytes(text) for text in ("1024", "1KiB", "1.5GiB", "24GB", "2 MiB", ".5kB")] == [
        1024, 1024, 3 << 29, 24 * 10**9, 2 << 20, 500]
    with pytest.raises(ValueError, match="context '4 apples' is no size"):
        read_bytes("4 apples", "context")


def test_the_same_well_known_device_twice_is_two_devices():
    names = [device.name for device in read_devices(["4090", "CPU:1GiB:1GB/s:1TF", "4090:20GiB", "B=4090"])]
    assert names == ["4090.0", "CPU", "4090.1", "B"]
    with pytest.raises(ValueError, match="two devices have the name 'A': give them names"):
        read_devices(["A=4090", "A=3090"])
    with pytest.raises(ValueError, match="two devices have the name 'X'"):
        read_devices(["X:1GiB:1GB/s:1TF"] * 2)


def test_devices_without_a_host_get_that_of_a_desktop():
    gpu, host = with_host(read_devices(["4090"]))
    assert gpu.name == "4090" and (host.name, host.host) == ("CPU", True)
    assert with_host([host, gpu]) == (host, gpu)
    odd = gpu.replace(name="CPU")
    assert [device.name for device in with_host([odd])] == ["CPU", "host"]


def test_links_are_read():
    assert read_link("25GB/s:8us") == gs.Link(25e9, 8e-6) == read_link("8us:25GB/s")
    assert read_link("64GB/s") == gs.Link(64e9)
    assert read_links([]) is None
    assert read_links(["25GB/s:8us"]) == gs.Link(25e9, 8e-6)
    assert read_links(["25GB/s", "GPU0, GPU1=50GB/s:5us"]) == {
        ("*", "*"): gs.Link(25e9), ("GPU0", "GPU1"): gs.Link(50e9, 5e-6)}


@pytest.mark.parametrize(("texts", "match"), [
    (["8us"], "link '8us' has no bandwidth"), (["25GB"], "'25GB' is neither a bandwidth"),
    (["25GB/s:8us:9us"], "'9us' is neither"), (["A=25GB/s"], "'A' is not a pair of names"),
    (["A,B,C=25GB/s"], "is not a pair"), (["25GB/s", "26GB/s"], "a second link of all"),
    (["A,B=25GB/s", "A, B=26GB/s"], "a second link of A, B"), (["A,B=0GB/s"], "bandwidth is 0 "),
])
def test_a_text_that_is_no_link_is_an_error(texts, match):
    with pytest.raises(ValueError, match=match):
        read_links(texts)


def test_every_well_known_device_is_a_device():
    names = [name for known in known_devices() for name in (known.name, *known.also)]
    assert len(set(names)) == len(names) > 60
    for known in known_devices():
        device = known.device()
        assert known_device(known.name) is known
        assert 0 < device.budget <= device.memory and device.measured == frozenset()


@pytest.mark.parametrize("known", known_devices(), ids=lambda known: known.name)
def test_the_figures_of_a_well_known_device_have_an_address_and_are_plausible(known):
    addresses = re.findall(r"https://[\w.-]+\.[a-z]+/[^\s;,]+", known.source)
    assert addresses and known.source.count("https://") == len(addresses)
    assert known.source.startswith(("https://", "computed from "))
    assert 4 << 30 <= known.memory <= 1 << 40
    assert 3e10 < known.bandwidth < 1e13 and 5e11 <= known.flops < 1e16
    # Reading all the memory once takes 10 ms to 2 s; a byte read allows 8 to 500 operations.
    assert 0.01 < known.memory / known.bandwidth < 2
    assert 8 < known.flops / known.bandwidth < 500


@pytest.mark.parametrize("known", [known for known in known_devices() if " cores x " in known.source],
                         ids=lambda known: known.name)
def test_operations_computed_from_cores_and_clock_are_those_of_the_formula(known):
    factors = re.search(r"(?:(\d+) x )?([\d,]+) cores x (?:(\d+) x )?(?:the )?([\d.]+) GHz", known.source)
    a_core, cores, each, clock = factors.groups()
    computed = int(a_core or each) * int(cores.replace(",", "")) * float(clock) * 1e9
    assert known.flops == pytest.approx(computed, rel=5e-3)


@pytest.mark.parametrize("name", ["RTX 3060", "5090", "A100", "h100", "H200", "L4", "MI300X", "Apple M1", "m4 max",
                                  "4070 Ti SUPER", "rtx-4070-ti-super", "Strix Halo", "desktop DDR4", "CPU"])
def test_well_known_names_are_read_in_any_spelling(name):
    assert known_device(name).memory > 0


@pytest.mark.parametrize(("name", "found", "gib"), [
    ("3060 12GB", "RTX 3060", 12), ("3060-12g", "RTX 3060", 12), ("4060ti 16g", "RTX 4060 Ti", 16),
    ("a100-80g", "A100", 80), ("A100 80 GB", "A100", 80), ("a100-40g", "A100 40GB", 40),
    ("NVIDIA A100 80GB PCIe", "A100", 80), ("NVIDIA A100-SXM4-80GB", "A100 SXM", 80),
    ("NVIDIA A100-SXM4-40GB", "A100 40GB", 40), ("NVIDIA H100 80GB HBM3", "H100", 80),
    ("Tesla V100-SXM2-32GB", "V100", 32), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 48),
    ("4080s", "RTX 4080 SUPER", 16), ("7900xtx", "RX 7900 XTX", 24), ("m2 max", "M2 Max", 96),
    ("M1 Max 32GB", "M1 Max", 32), ("m4-max 64g", "M4 Max", 64), ("mi300x", "MI300X", 192), ("t4 16gb", "T4", 16),
    ("ai max 395", "Ryzen AI Max+ 395", 128), ("rtx_3090", "RTX 3090", 24)])
def test_names_as_tools_print_and_users_type_them(name, found, gib):
    known = known_device(name)
    assert (known.name, known.memory) == (found, gib << 30)
    assert read_device(name).memory == gib << 30


@pytest.mark.parametrize(("name", "said"), [
    ("3080 12GB", "'3080 12GB': RTX 3080 has 10 GiB here, and 3080:12GiB would be its speeds with 12;"),
    ("v100 16gb", "V100 has 32 GiB here"), ("m1 max 512gb", "M1 Max has 64 GiB here"), ("m1 0gb", "M1 has 16 GiB"),
    ("2x3090", "'2x3090': give RTX 3090 2 times"), ("3090 x4", "give RTX 3090 4 times"),
    ("mi300", "like it are MI300X"), ("h20", "like it are H200"), ("4090 laptop", "RTX 4090"),
    ("1080 ti", "RTX 3080 Ti"), ("4o90", "like it are RTX 4090"), ("a10g", "like it are A10,"),
    ("titan v", "'titan v';"), ("2x titan v", "'2x titan v';")])
def test_names_that_no_device_has_are_refused_with_what_else_to_give(name, said):
    with pytest.raises(ValueError, match=f"^no well-known device is called .*{re.escape(said)}.*24GiB"):
        known_device(name)


def test_no_two_devices_have_one_name_however_it_is_written():
    owners = {}
    for known in known_devices():
        for name in (known.name, *known.also):
            assert owners.setdefault(re.sub("[^a-z0-9+]", "", name.lower()), known) is known
            assert known_device(name) is known


def test_what_the_system_keeps_grows_with_the_memory():
    known = known_device("M4 Max")
    assert known.device().reserve == known.memory // 4
    assert known.device(memory=36 << 30).budget == 27 << 30
    assert known_device("4090").device(memory=1 << 20).budget == 0
