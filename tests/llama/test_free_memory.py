"""The free memory heeds the limits of control groups, in both of their versions."""

import subprocess
import sys
from pathlib import Path

import pytest

from ggml_sched import _host

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A machine with 64 GiB of available memory, whose control groups the test writes."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
    monkeypatch.setattr(_host, "MEMINFO", str(meminfo))
    monkeypatch.setattr(_host, "GROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(_host, "GROUP_ROOT", str(tmp_path / "root"))

    def write(lines: str, **files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(lines)
        for folder, contents in files.items():
            place = tmp_path / "root" / folder.replace("__", "/")
            place.mkdir(parents=True, exist_ok=True)
            for name, text in contents.items():
                (place / name).write_text(text)

    return write


def unified(limit, current, files=0) -> dict[str, str]:
    return {"memory.max": f"{limit}\n", "memory.current": f"{current}\n",
            "memory.stat": f"anon 5\nfile {files + 7}\nactive_file {files // 2}\ninactive_file {files // 2}\n"}


def first_version(limit, usage, files=0) -> dict[str, str]:
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n",
            "memory.stat": f"cache 9\ntotal_active_file {files // 2}\ntotal_inactive_file {files // 2}\n"}


def test_free_memory_is_what_the_limits_of_control_groups_leave(groups):
    groups("0::/\n")
    assert _host.host_memory() == 64 << 30
    groups("0::/a/b\n", a__b=unified("max", 100))
    assert _host.host_memory() == 64 << 30
    groups("0::/a/b\n", a__b=unified(8 << 30, 3 << 30, 1 << 30))
    assert _host.host_memory() == 6 << 30
    groups("0::/a/b\n", a=unified(5 << 30, 1 << 30))
    assert _host.host_memory() == 4 << 30
    groups("0::/a/b\n", a=unified(1 << 30, 2 << 30))
    assert _host.host_memory() == 0


def test_a_container_sees_its_limit_at_the_root(groups):
    groups("0::/of/the/machine\n", **{".": unified(4 << 30, 1 << 30, 1 << 30)})
    assert _host.host_memory() == 4 << 30


def test_a_group_outside_of_the_container_and_a_line_of_another_form_hide_no_limit(groups):
    groups("odd\n0::/../a:b\n", **{".": unified(4 << 30, 1 << 30)})
    assert _host.host_memory() == 3 << 30
    groups("odd\n0::/a:b\n", **{"a:b": unified(2 << 30, 1 << 30)})
    assert _host.host_memory() == 1 << 30
    groups("odd\n", **{".": unified("max", 0)})
    assert _host.host_memory() == 64 << 30


def test_a_system_without_control_groups_has_no_limits(groups):
    groups("")
    Path(_host.GROUPS).unlink()
    assert _host.host_memory() == 64 << 30


def test_pages_of_files_beyond_the_use_add_nothing_to_a_limit(groups):
    groups("0::/a\n", a=unified(2 << 30, 1 << 20, 1 << 21))
    assert _host.host_memory() == 2 << 30
    groups("0::/a\n", a=unified(2 << 30, 1 << 30) | {"memory.stat": "anon 5\n"})
    assert _host.host_memory() == 1 << 30


def test_limits_of_the_first_version_of_control_groups_count(groups):
    groups("4:cpu,cpuacct:/a\n3:memory:/a\n0::/\n", memory__a=first_version(2 << 30, 1 << 30, 1 << 29),
           memory=first_version(0x7FFFFFFFFFFFF000, 9 << 30))
    assert _host.host_memory() == 3 << 29
    groups("3:memory:/other\n")
    assert _host.host_memory() == 64 << 30


def test_a_real_control_group_bounds_the_free_memory():
    """Run where this process may make a group, as root in most containers."""
    code = (f"import sys; sys.path[:0] = [{str(BENCH)!r}]\n"
            "from memory_group import join, memory_group\n"
            "from ggml_sched._host import host_memory\n"
            "with memory_group(256 << 20) as group:\n"
            "    if group is None: print('none'); sys.exit()\n"
            "    import os\n"
            "    if (child := os.fork()) == 0:\n"
            "        join(group)\n"
            "        print(host_memory(), flush=True)\n"
            "        os._exit(0)\n"
            "    os.waitpid(child, 0)\n")
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    if seen == "none":
        pytest.skip("this process may not make a control group")
    assert 200 << 20 < int(seen) <= 256 << 20
