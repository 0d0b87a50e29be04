"""Measuring: the numbers of a device whose clock follows a roofline are found; real backends and files work."""

import json
import pickle
from dataclasses import replace

import pytest

import ggml_sched as gs
from ggml_sched.placement.facts import facts
from ggml_sched.placement.measure import measure_links
from ggml_sched.placement.measured import default_path, load_devices, measured_devices, save_devices

MODEL = gs.Device("fast", 1 << 30, bandwidth=5e11, flops=3e13, launch=4e-6,
                  bandwidths={"f16": 5e11, "q4_0": 4e11, "q8_0": 4.5e11, "attention": 1e11,
                              "attention of prompts": 1e11},
                  flops_of={"f16": 6e13, "q8_0": 4e13, "attention": 2e11, "attention of prompts": 1e13})
LINK = gs.Link(2e10, 7e-6)


class Modelled(gs.CpuBackend):
    """Computes nothing; its clock advances as a roofline says, and as a link says for copies."""

    def __init__(self, model, memory=64 << 20, refuses=(), link=LINK):
        super().__init__(1, name=model.name, memory=memory)
        self.model, self.refuses, self.link, self.now, self.freed = model, refuses, link, 0.0, 0

    def clock(self):
        return self.now

    def supports_op(self, node):
        return str(node.src[0].type) not in self.refuses and node.op not in self.refuses

    def graph_plan_create(self, graph):
        found = facts(gs.Graph(*graph.nodes))
        if graph.nodes[0].op == "FLASH_ATTN_EXT":       # its caches are in memory that holds weights, too
            many = graph.nodes[0].ne[2] > 1
            found = replace(found, kinds=("attention of prompts" if many else "attention",) * len(found.kinds))
        return found.seconds(self.model).sum()

    def graph_plan_compute(self, plan):
        self.now += plan

    def graph_plan_free(self, plan):
        self.freed += 1

    def cpy_tensor_from(self, src, dst):
        self.now += self.link.latency + src.nbytes / self.link.bandwidth
        return True


@pytest.fixture
def fast():
    with Modelled(MODEL) as backend:
        yield backend


class Unprepared(Modelled):
    """Computes without graph plans."""

    def graph_plan_create(self, graph):
        return None

    def graph_compute(self, graph):
        self.now += Modelled.graph_plan_create(self, graph)


def test_a_backend_that_prepares_nothing_is_measured_too():
    with Unprepared(MODEL) as backend:
        found = gs.measure(backend, clock=backend.clock)
        assert found.launch == pytest.approx(4e-6, rel=.02) and backend.freed == 0


def test_a_roofline_is_found(fast):
    found = gs.measure(fast, clock=fast.clock)
    assert found.launch == pytest.approx(4e-6, rel=.02)
    assert found.bandwidth == found.bandwidths["f16"] and found.flops == found.flops_of["f16"]
    for kind in ("f16", "q4_0", "q8_0", "attention", "attention of prompts"):
        bandwidth, flops = MODEL.rates(kind)
        assert found.bandwidths[kind] == pytest.approx(bandwidth, rel=.02)
        assert found.flops_of[kind] == pytest.approx(flops, rel=.02)
    assert found.backend is fast and found.memory == 64 << 20 and found.host
    assert found.measured == {"memory", "bandwidth", "flops", "launch", "bandwidths", "flops_of"}
    assert fast.used == 0 and fast.freed > 0, "all memory is given back"


def test_a_slow_device_takes_about_the_time_given():
    slow = MODEL.replace(bandwidth=5e8, bandwidths={}, flops=5e9, flops_of={})
    with Modelled(slow) as backend:
        found = gs.measure(backend, seconds=.5, clock=backend.clock)
        assert found.bandwidth == pytest.approx(5e8, rel=.02) and found.flops == pytest.approx(5e9, rel=.02)
        assert backend.now < 2


def test_types_that_a_backend_refuses_are_left_out():
    with Modelled(MODEL, refuses={"q4_0", "f16", "FLASH_ATTN_EXT"}) as backend:
        assert set(gs.measure(backend, clock=backend.clock).bandwidths) == {"q8_0"}
        with pytest.raises(gs.BackendError, match="'fast' supports products of none of the types q4_0, f16"):
            gs.measure(backend, ["q4_0", "f16"])
        assert backend.used == 0


def test_links_are_found(fast):
    with Modelled(MODEL.replace(name="other"), link=gs.Link(1e10, 3e-6)) as other:
        links = measure_links([fast, other], clock=lambda: fast.now + other.now)
        assert set(links) == {("fast", "other"), ("other", "fast")}
        there, back = links["fast", "other"], links["other", "fast"]
        assert (there.bandwidth, there.latency) == (pytest.approx(1e10, rel=.02), pytest.approx(3e-6, rel=.02))
        assert (back.bandwidth, back.latency) == (pytest.approx(2e10, rel=.02), pytest.approx(7e-6, rel=.02))
        assert fast.used == other.used == 0


class Far(Modelled):
    """Of another process: an order takes a round trip, and a compute something beside."""

    worker = "w0"
    is_host = False
    trip, split = 8e-4, 3e-4

    def round_trip(self):
        return self.trip

    def graph_plan_compute(self, plan):
        self.now += plan + self.trip + self.split

    def set_tensor_async(self, tensor, data, offset=0):
        self.now += self.trip + len(data) / 1e9

    def get_tensor_async(self, tensor, out, offset=0):
        self.now += self.trip + len(out) / 2e9


def test_a_round_trip_is_no_part_of_what_a_backend_of_another_process_takes():
    with Far(MODEL) as backend:
        found = gs.measure(backend, clock=backend.clock)
        assert found.split == pytest.approx(3e-4, rel=.1) and "split" in found.measured
        for kind in ("f16", "q4_0", "q8_0", "attention"):
            assert found.bandwidths[kind] == pytest.approx(MODEL.rates(kind)[0], rel=.1)


def test_this_process_is_an_end_of_links_where_all_backends_are_of_others():
    with Far(MODEL) as far:
        links = measure_links([far], clock=far.clock)
        assert set(links) == {("driver", "fast"), ("fast", "driver")}
        for link, rate in ((links["driver", "fast"], 1e9), (links["fast", "driver"], 2e9)):
            assert (link.bandwidth, link.latency) == (pytest.approx(rate, rel=.02), pytest.approx(4e-4, rel=.05))
        assert far.used == 0
        with Modelled(MODEL.replace(name="host")) as host:
            assert set(measure_links([far, host])) == {("fast", "host"), ("host", "fast")}


def test_links_that_are_known_or_stated_are_not_measured(fast):
    class Stating(Modelled):
        def link_to(self, name):
            return (3e9, 2e-5) if name == "fast" else None

        def link_from(self, name):
            return (4e9, 1e-5)

        def cpy_tensor_from(self, src, dst):
            raise AssertionError("measured")

    with Stating(MODEL.replace(name="other")) as other, Modelled(MODEL.replace(name="third")) as third:
        links = measure_links([fast, other])
        assert links == {("other", "fast"): gs.Link(3e9, 2e-5), ("fast", "other"): gs.Link(4e9, 1e-5)}
        known = {("third", "fast"): gs.Link(1, 1), ("fast", "third"): gs.Link(2, 2)}
        assert measure_links([fast, third], known=known) == known
        with pytest.raises(AssertionError, match="measured"):
            measure_links([fast, other], anew=True)


def test_backends_of_other_processes_are_measured_each_time(tmp_path, monkeypatch, fast):
    path, measured = tmp_path / "devices.json", []
    monkeypatch.setattr("ggml_sched.placement.measured.measure",
                        lambda backend, types: measured.append(backend.name) or MODEL.replace(name=backend.name))
    with Far(MODEL.replace(name="w0:CPU")) as far, Modelled(MODEL.replace(name="third")) as third:
        for _ in range(2):
            devices, links = measured_devices([far, fast, third], path)
            assert [device.name for device in devices] == ["w0:CPU", "fast", "third"]
            assert len(links) == 6
        assert measured == ["w0:CPU", "fast", "third", "w0:CPU"]
        kept, links = load_devices(path)
        assert [device.name for device in kept] == ["fast", "third"]
        assert set(links) == {("fast", "third"), ("third", "fast")}
        path.unlink()
        assert set(measured_devices([far], path)[1]) == {("driver", "w0:CPU"), ("w0:CPU", "driver")}
        assert not path.exists()


def test_the_cpu_is_measured():
    with gs.CpuBackend(1, memory=64 << 20) as backend:
        device = gs.measure(backend, ["f16", "q4_0"], seconds=.05)
        assert device.bandwidth > 0 and device.flops > 0 and set(device.bandwidths) == {
            "f16", "q4_0", "attention", "attention of prompts"}
        assert device.host and device.backend is backend and backend.used == 0
        assert pickle.loads(pickle.dumps(device)) == device
    with gs.CpuBackend(1) as backend:
        assert gs.measure(backend, ["f16"], memory=1 << 24, seconds=.01).memory == 1 << 24


def test_what_cannot_be_measured_is_an_error(fast):
    with pytest.raises(ValueError, match="'D' has no memory: there is nothing to measure"):
        gs.measure(gs.DryBackend("D"))
    with pytest.raises(ValueError, match="'D' has no memory"):
        measure_links([fast, gs.DryBackend("D")])
    with pytest.raises(TypeError, match="takes a Backend, not 'CPU'"):
        gs.measure("CPU")
    with pytest.raises(ValueError, match="no types"):
        gs.measure(fast, [])
    for memory in (2048, 3 << 20, 8 << 20):
        with Modelled(MODEL, memory=memory) as full:
            with pytest.raises(gs.OutOfMemory, match="'fast'"):
                gs.measure(full)
            assert full.used == 0
    fast.max_buffer_size = 1 << 20
    with pytest.raises(gs.OutOfMemory, match="takes a buffer of 4194304 bytes, 1048576 are the most"):
        gs.measure(fast)
    assert fast.used == 0
    fast.max_buffer_size = None
    fast.is_host = False
    fast.memory = None
    with pytest.raises(ValueError, match="'fast' does not say how much memory it has: give memory="):
        gs.measure(fast)


def test_a_file_keeps_devices_and_links(tmp_path, fast):
    path, links = tmp_path / "a" / "devices.json", {("fast", "H"): gs.Link(1e9, 2e-6)}
    host = gs.Device("H", 1 << 40, 1e11, 1e12, host=True)
    save_devices(path, [MODEL, host], links)
    assert load_devices(path) == ((MODEL, host), links)
    assert [file.name for file in path.parent.iterdir()] == ["devices.json"]
    data = json.loads(path.read_text())
    data["devices"][0] = {"name": "fast", "memory": 5, "bandwidth": 7, "flops": 8}
    path.write_text(json.dumps(data))
    assert load_devices(path)[0][0] == gs.Device("fast", 5, 7, 8), "what is not given is assumed"


def test_of_a_symbolic_link_the_file_that_it_names_is_replaced(tmp_path):
    for name, folder in (("there", tmp_path), ("missing", tmp_path / "folder")):
        path, target = tmp_path / f"{name}.link", folder / f"{name}.json"
        if name == "there":
            target.write_text("{}")
        path.symlink_to(target)
        save_devices(path, [MODEL])
        assert path.is_symlink() and not target.is_symlink()
        assert load_devices(target) == load_devices(path) == ((MODEL,), {})
        assert [file.name for file in folder.iterdir() if "unfinished" in file.name] == []


@pytest.mark.parametrize("is_file", [True, False])
def test_what_cannot_be_kept_is_returned_with_a_warning(tmp_path, monkeypatch, fast, is_file):
    """A file in place of a folder, and a folder in place of the file: a process of the superuser can do all else."""
    monkeypatch.setattr("ggml_sched.placement.measured.measure",
                        lambda backend, types: gs.measure(backend, types, clock=backend.clock))
    place = tmp_path / "config"
    if is_file:
        place.write_text("mine")
        path, message = place / "ggml-sched" / "devices.json", "cannot be written: "
    else:
        place.mkdir()
        path, message = place, "cannot be read: Is a directory"
    with pytest.warns(RuntimeWarning, match=f"{path} {message}.*what (was|is) measured is not kept") as raised:
        (found,), links = measured_devices([fast], path)
    assert len(raised) == 1 and raised[0].filename == __file__
    assert found.backend is fast and "bandwidth" in found.measured and links == {}
    assert [file.name for file in tmp_path.iterdir()] == ["config"]
    assert place.read_text() == "mine" if is_file else not [*place.iterdir()]


def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path, monkeypatch, fast):
    path = tmp_path / "devices.json"
    path.write_text("what its user has written")
    monkeypatch.setattr("ggml_sched.placement.measured.measure",
                        lambda backend, types: gs.measure(backend, types, clock=backend.clock))

    def refuses(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ggml_sched.placement.measured.load_devices", refuses)
    with pytest.warns(RuntimeWarning, match="cannot be read: Permission denied"):
        (found,), _ = measured_devices([fast], path)
    assert "bandwidth" in found.measured
    assert path.read_text() == "what its user has written"


def test_a_device_is_measured_once_and_its_memory_is_that_of_now(tmp_path, monkeypatch, fast):
    path = tmp_path / "devices.json"
    monkeypatch.setattr("ggml_sched.placement.measured.measure",
                        lambda backend, types: gs.measure(backend, types, clock=backend.clock))
    (first,), _ = measured_devices([fast], path)
    before = fast.now
    data = json.loads(path.read_text())
    data["devices"][0]["bandwidth"] = 12.5
    path.write_text(json.dumps(data))
    fast.memory = 32 << 20
    (again,), links = measured_devices([fast], path)
    assert fast.now == before and links == {}
    assert again == first.replace(bandwidth=12.5, memory=32 << 20) and again.backend is fast
    (anew,), _ = measured_devices([fast], path, again=True)
    assert fast.now > before and anew.bandwidth == first.bandwidth
    assert load_devices(path)[0] == (anew,)


def test_links_of_devices_that_were_measured_one_by_one_are_kept_too(tmp_path, monkeypatch):
    path, link = tmp_path / "devices.json", gs.Link(1e9, 1e-6)
    save_devices(path, [MODEL.replace(name=name) for name in ("one", "two")])
    calls = []
    monkeypatch.setattr("ggml_sched.placement.measured.measure_links", lambda backends: calls.append(backends) or {
        (a.name, b.name): link for a in backends for b in backends if a is not b})
    with Modelled(MODEL.replace(name="one")) as one, Modelled(MODEL.replace(name="two")) as two:
        for _ in range(2):
            _, links = measured_devices([one, two], path)
            assert links == load_devices(path)[1] == {("one", "two"): link, ("two", "one"): link}
    assert len(calls) == 1


def test_the_file_is_in_the_folder_for_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_path() == tmp_path / "ggml-sched" / "devices.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path() == tmp_path / ".config" / "ggml-sched" / "devices.json"


GOOD = {"format": "ggml-sched devices", "version": 1, "devices": [MODEL.to_dict()], "links": []}


@pytest.mark.parametrize(("change", "match"), [
    ("{", "not JSON"), ("[" * 100000, "not JSON"), ("[]", "not a file of 'ggml-sched devices', version 1"),
    ({"version": 2}, "not a file"), ({"devices": {}}, "devices is not a list"), ({"devices": [3]}, "device 0 is not"),
    ({"devices": [{"name": "A"}]}, r"device 0: device 'A': .* missing fields \['bandwidth', 'flops', 'memory'\]"),
    ({"devices": [{**MODEL.to_dict(), "flops": 0}]}, "device 0: device 'fast': flops is 0"),
    ({"devices": [{**MODEL.to_dict(), "bandwidths": [1]}]}, "device 0: "),
    ({"devices": [{**MODEL.to_dict(), "measured": 3}]}, "device 0: "),
    ({"devices": [MODEL.to_dict()] * 2}, "two devices have one name"),
    ({"links": [{"from": "fast", "to": "B", "bandwidth": 1}]}, "link 0: no device has the name 'B'"),
    ({"links": [{"from": "fast", "to": [], "bandwidth": 1}]}, "link 0: no device has the name"),
    ({"links": [{"from": "fast", "bandwidth": 1}]}, "link 0: KeyError"), ({"links": [7]}, "link 0: "),
    ({"links": [{"from": "fast", "to": "fast", "bandwidth": 0}]}, "link 0: .*bandwidth is 0"),
])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, change, match):
    path = tmp_path / "devices.json"
    path.write_text(change if isinstance(change, str) else json.dumps({**GOOD, **change}))
    with pytest.raises(gs.FileFormatError, match=f"devices.json: .*{match}"):
        load_devices(path)


def test_a_file_that_is_too_large_is_an_error(tmp_path):
    path = tmp_path / "devices.json"
    path.write_text(" " * ((1 << 20) + 1))
    with pytest.raises(gs.FileFormatError, match="more than 1048576 bytes"):
        load_devices(path)
