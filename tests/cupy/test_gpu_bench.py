"""bench/gpu.py works without a GPU: it runs all parts on the emulated device, detects wrong results, and continues
after a part fails."""

import cupy_devices
import gpu
import gpu_right
import gpu_speed
import pytest

import ggml_sched as gs
from ggml_sched.backends.cupy import real
from ggml_sched.backends.cupy.ops import OPS, norm

pytestmark = pytest.mark.skipif(not cupy_devices.HAS_COMPILER, reason="needs a C++ compiler")


def rows(page: str) -> dict[str, list[str]]:
    """The cells of every table, by the first one."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}


@pytest.fixture
def without_speed(monkeypatch):
    monkeypatch.setattr(gpu.Run, "speed", lambda self: None)


def only(monkeypatch, *names: str) -> None:
    made = gpu_right.checks
    monkeypatch.setattr(gpu_right, "checks", lambda *args: (check for check in made(*args) if check.name in names))


def test_a_device_that_cannot_overlap_launches_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cupy_devices.EmulatedDevice, "can_overlap", False)
    assert gpu.main(["--emulate", "--overlap"]) == 1
    assert "cannot overlap launches" in capsys.readouterr().err


@pytest.mark.soak
def test_all_of_it_runs_on_the_fake_device(capsys):
    assert gpu.main(["--emulate"]) == 0
    page, progress = capsys.readouterr()
    found = rows(page)
    for name, (target, stretch) in gpu.TARGETS.items():
        assert found[name][:2] == [target, stretch]
        # What the clock says of the emulated device is nothing to go by; it has no library for products of f16.
        if name.startswith("captures"):
            assert found[name][2] == ("0" if "steady" in name else "1")
        else:
            assert found[name][2] == ("not measured" if name.startswith("prompt") else gpu.UNTIMED), name
    assert "no cuBLAS" in page and "Nothing was wrong." in page
    assert {"copies", "norms", "flash attention", "llama on GPU + CPU"} <= found.keys()
    assert "decode without graphs" in progress


def test_every_op_has_a_case():
    covered = {node.op for make, _ in gpu_right.FAMILIES.values() for node in gs.Graph(*make(gpu_right.Case())).nodes}
    assert OPS.keys() <= covered


def test_a_kernel_that_computes_something_else_is_found(monkeypatch, capsys, without_speed):
    only(monkeypatch, "norms", "rope")
    monkeypatch.setitem(norm.MODES, "RMS_NORM", norm.MODES["NORM"])
    assert gpu.main(["--emulate"]) == 1
    found = rows(capsys.readouterr().out)
    assert found["norms"][2] == "WRONG" and found["rope"][2] == ""


def test_parts_that_fail_are_reported_and_the_others_go_on(monkeypatch, capsys):
    only(monkeypatch, "rope")

    def broken(*args):
        raise gs.BackendError("an illegal address")

    def too_large(*args, **options):
        raise gs.OutOfMemory("no room", "CUDA0", 2, 1)

    monkeypatch.setattr(gpu_speed.Meter, "copy_rate", broken)
    monkeypatch.setattr(gpu_speed.Meter, "model", too_large)
    assert gpu.main(["--emulate"]) == 1
    page = capsys.readouterr().out
    assert "* copies on the device: BackendError: an illegal address" in page
    assert "* a model without: no room" in page
    assert rows(page)["mat-vec 4096 x 4096 / C"][2] == "not measured"
    assert rows(page)["copies from pinned memory"] == [gpu.UNTIMED]


def test_nothing_is_measured_when_time_is_up_but_right_or_wrong(monkeypatch, capsys):
    only(monkeypatch, "rope")
    assert gpu.main(["--emulate", "--minutes", "0"]) == 0
    page = capsys.readouterr().out
    assert rows(page)["rope"][2] == "" and "0 minutes are over" in page
    assert all(rows(page)[name][2] == "not measured" for name in gpu.TARGETS)


def test_without_a_device_it_says_what_is_missing(monkeypatch, capsys):
    def none(number):
        raise gs.BackendError(f"no CUDA device {number}")

    monkeypatch.setattr(real, "open_device", none)
    assert gpu.main(["--device", "3"]) == 1
    assert "no CUDA device 3" in capsys.readouterr().err
