"""Files that are replaced whole: what is there before the last byte, after an error, and between several writers; and
streams whose calls move few bytes."""

import errno
import io
import os
import subprocess
import sys
import threading

import pytest

from ggml_sched._files import check_writable, read_up_to, replace_file, write_all, write_text


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


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_a_file_that_is_replaced_keeps_its_mode_and_is_never_readable_by_more(tmp_path, mode):
    path = tmp_path / "ours"
    path.write_text("old")
    path.chmod(mode)

    def parts():
        (unfinished,) = {*os.listdir(tmp_path)} - {"ours"}
        assert (tmp_path / unfinished).stat().st_mode & 0o777 == mode
        yield b"new"

    (tmp_path / "link").symlink_to(path)
    write_text(tmp_path / "link", "newer")
    assert path.stat().st_mode & 0o777 == mode and path.read_text() == "newer"
    (tmp_path / "link").unlink()
    replace_file(path, parts())
    assert path.stat().st_mode & 0o777 == mode and path.read_text() == "new"


def test_a_path_may_be_bytes(tmp_path):
    for name in (b"plan.json", b"\xff.json"):
        path = os.path.join(os.fsencode(tmp_path), name)
        try:
            open(path, "wb").close()
        except OSError:
            continue        # a file system of names in UTF-8 alone
        for text in ("old", "new"):
            write_text(path, text)
        with open(path, "rb") as file:
            assert file.read() == b"new"
        os.unlink(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["y" * 255, "\N{GRINNING FACE}" * 63 + "y"], ids=["ascii", "wide"])
def test_a_name_may_be_as_long_as_the_file_system_permits(tmp_path, name):
    try:
        (tmp_path / name).touch()
    except OSError:
        pytest.skip("shorter names alone")
    write_text(tmp_path / name, "text")
    assert (tmp_path / name).read_text() == "text" and os.listdir(tmp_path) == [name]


def test_an_error_names_the_path_that_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, name in (("missing/plan.json", "missing/plan.json"), (tmp_path / "no" / "plan", f"{tmp_path}/no/plan"),
                        (b"missing/plan", b"missing/plan")):
        with pytest.raises(FileNotFoundError) as caught:
            write_text(given, "")
        assert (caught.value.filename, caught.value.filename2) == (name, None)
        assert "unfinished" not in str(caught.value)
    with pytest.raises(OSError) as caught:
        write_text("y" * 300, "")
    assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, "y" * 300)
    assert os.listdir(tmp_path) == []


def test_an_error_of_the_parts_stays_as_it_is(tmp_path):
    def parts():
        yield b"a"
        raise FileNotFoundError(errno.ENOENT, "gone", "other")

    with pytest.raises(FileNotFoundError, match="gone: 'other'"):
        replace_file(tmp_path / "plan.json", parts())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_an_error_with_the_path(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError) as caught:
            write_text(tmp_path / "plan.json", "")
        assert caught.value.filename == str(tmp_path / "plan.json")
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("call", ["_files._open_private", "os.replace"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY, errno.EROFS])
def test_a_writable_file_that_cannot_be_replaced_is_written_to(tmp_path, monkeypatch, call, number):
    """A folder that is not writable, or a file with a mount of its own."""
    path = tmp_path / "plan.json"
    path.write_text("a longer text")

    def refuse(path, *arguments):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(f"ggml_sched.{call}" if call.startswith("_") else call, refuse)
    write_text(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["plan.json"]
    if call == "os.replace":
        with pytest.raises(OSError) as caught:
            write_text(tmp_path / "other.json", "new")
        assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "other.json"))
        assert os.listdir(tmp_path) == ["plan.json"]


def test_whether_a_file_can_be_written_is_known_before_and_changes_nothing(tmp_path):
    (tmp_path / "old").write_text("old")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name in ("old", "new", "pipe", "link", "y" * 255):
        check_writable(tmp_path / name)
    check_writable("/dev/stdout")
    for path, number in ((tmp_path, errno.EISDIR), (tmp_path / "no" / "t", errno.ENOENT),
                         (tmp_path / ("y" * 256), errno.ENAMETOOLONG)):
        with pytest.raises(OSError) as caught:
            check_writable(path)
        assert (caught.value.errno, caught.value.filename) == (number, path)
    assert {*os.listdir(tmp_path)} == {"old", "pipe", "link"} and (tmp_path / "old").read_text() == "old"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    (tmp_path / "link").symlink_to(path)
    for name in ("pipe", "link"):
        thread = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
        thread.start()
        write_text(tmp_path / name, name)
        thread.join(60)
    assert read == ["pipe", "link"]
    assert path.is_fifo() and (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "LINK"])
def test_an_open_file_is_written_to_where_it_is(tmp_path, name):
    """As by `ggml-sched plan --svg /dev/stdout >> FILE`."""
    if not os.path.exists(name.replace("LINK", "/dev/stdout")):
        pytest.skip(f"no {name}")
    path, link = tmp_path / "log", tmp_path / "link"
    path.write_text("before\n")
    link.symlink_to("/dev/stdout")
    program = ("import sys; from ggml_sched._files import write_text; print('one'); "
               "write_text(sys.argv[1], 'two\\n'); print('three')")
    with path.open("a") as log:
        subprocess.run([sys.executable, "-c", program, str(link) if name == "LINK" else name], stdout=log, check=True)
    assert path.read_text() == "before\none\ntwo\nthree\n"
    assert sorted(os.listdir(tmp_path)) == ["link", "log"] and link.is_symlink()


def test_an_open_folder_is_refused_and_no_descriptor_is_left(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            write_text(f"/dev/fd/{folder}", "text")
        following = os.dup(folder)
        os.close(following)
        with pytest.raises(IsADirectoryError):
            write_text(f"/dev/fd/{folder}", "text")
        again = os.dup(folder)
        os.close(again)
        assert following == again
    finally:
        os.close(folder)


def test_a_symbolic_link_stays_and_what_it_names_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    for text in ("new", "newer"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "folder" / "file").read_text() == text and (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_symbolic_links_that_name_each_other_are_an_error(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(other)
    with pytest.raises(OSError, match="symbolic links: .*/a'") as caught:
        write_text(tmp_path / "a", "text")
    assert caught.value.errno == errno.ELOOP
    assert sorted(os.listdir(tmp_path)) == ["a", "b"] and (tmp_path / "a").is_symlink()


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


class Slow(io.RawIOBase):
    """A raw file that moves `step` bytes a call; None a call if `step` is None."""

    def __init__(self, data=b"", step=3):
        self.data, self.step, self.at = bytearray(data), step, 0

    def readable(self):
        return True

    def writable(self):
        return True

    def readinto(self, room):
        if self.step is None:
            return None
        part = self.data[self.at : self.at + min(self.step, len(room))]
        room[: len(part)] = part
        self.at += len(part)
        return len(part)

    def write(self, data):
        if self.step is None:
            return None
        self.data += bytes(data[: self.step])
        return min(self.step, len(data))


def test_streams_that_move_few_bytes_a_call_move_all():
    file = Slow()
    write_all(file, b"0123456789")
    write_all(file, b"")
    assert file.data == b"0123456789"
    assert read_up_to(file, 4) == b"0123" and read_up_to(file, 100) == b"456789" and read_up_to(file, 1) == b""
    blocked = Slow(step=None)
    with pytest.raises(BlockingIOError, match="10 bytes are left"):
        write_all(blocked, b"0123456789")
    with pytest.raises(BlockingIOError, match="5 bytes are left"):
        read_up_to(blocked, 5)


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_text_file_is_refused_whatever_its_encoding(tmp_path, encoding):
    path = tmp_path / "file"
    path.write_bytes(b"\x97\xff")
    with path.open(encoding=encoding) as file, pytest.raises(TypeError, match="a binary file is needed, not a text"):
        read_up_to(file, 2)
    with pytest.raises(TypeError, match="a binary file is needed"):
        read_up_to(io.StringIO(""), 2)


def test_a_file_of_the_caller_s_own_may_return_nothing_from_write():
    class Kept:
        def __init__(self):
            self.data = b""

        def write(self, data):
            self.data += data

    file = Kept()
    write_all(file, b"0123456789")
    assert file.data == b"0123456789"
