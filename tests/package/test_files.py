"""Files that are replaced whole: what is there before the last byte, after an error, and between several writers."""

import os
import threading

import pytest

from ggml_sched._files import replace_file, write_text


def test_a_file_is_replaced_when_its_last_part_is_written(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def parts():
        yield b"new "
        assert path.read_bytes() == b"old"
        yield b"bytes"

    replace_file(path, parts())
    assert path.read_bytes() == b"new bytes"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_error_while_writing_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def parts():
        yield b"new"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, parts())
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_new_file_has_the_permissions_of_any_file(tmp_path):
    write_text(tmp_path / "ours", "")
    (tmp_path / "any").write_text("")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_threads_that_write_one_path_leave_the_whole_file_of_one_of_them(tmp_path):
    path, meet = tmp_path / "plan.json", threading.Barrier(2)

    def parts(byte):
        yield byte * 1000
        meet.wait(30)
        yield byte * 1000

    threads = [threading.Thread(target=replace_file, args=(path, parts(byte))) for byte in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert path.read_bytes() in (b"a" * 2000, b"b" * 2000)
    assert os.listdir(tmp_path) == ["plan.json"]
