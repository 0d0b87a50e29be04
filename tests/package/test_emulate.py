"""The initial file system that tools/emulate.py boots, as cpio unpacks it."""

import os
import shutil
import subprocess

import emulate
import pytest


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")
def test_files_keep_their_places_links_times_and_modes(tmp_path):
    real = tmp_path / "real/deep"
    real.mkdir(parents=True)
    (real / "tool").write_bytes(b"12345")
    (real / "tool").chmod(0o755)
    os.utime(real / "tool", (7e8, 7e8))
    (tmp_path / "short").symlink_to("real")
    (real / "again").symlink_to("../deep/tool")
    with (tmp_path / "initrd").open("wb") as stream:
        archive = emulate.Archive(stream)
        archive.file(tmp_path / "short/deep/again")
        archive.file(tmp_path / "real/deep/tool")
        archive.entry("TRAILER!!!", 0)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["cpio", "-idmu", "--quiet"], cwd=unpacked, input=(tmp_path / "initrd").read_bytes(), check=True)
    there = unpacked / str(tmp_path).lstrip("/")
    assert os.readlink(there / "short") == "real"
    for way in ("short/deep/again", "real/deep/tool"):
        assert (there / way).read_bytes() == b"12345"
    assert os.access(there / "real/deep/tool", os.X_OK)
    assert (there / "real/deep/tool").stat().st_mtime == 7e8


def test_the_libraries_of_a_program_are_found():
    if shutil.which("ldd") is None:
        pytest.skip("ldd is not installed")
    assert any("libc" in path.name for path in emulate.libraries_of([emulate.Path(shutil.which("sh"))]))


@pytest.mark.parametrize(("console", "status"), [
    (b"1 passed\r\npytest: exit status 0\r\n", b"0"), (b"pytest: exit status -4\r\n", b"-4"),
    (b"pytest: exit sta", False), (b"pytest: exit status 1", False), (b"[ 2.7] Kernel panic - no init", None)])
def test_the_status_is_read_when_its_line_is_whole(console, status):
    found = emulate.LAST_LINE.search(console)
    assert (found is not None and found[1]) == status
