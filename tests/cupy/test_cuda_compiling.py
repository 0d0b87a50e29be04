"""What is said while kernels are compiled: to a log, and by `ggml-sched run` at a terminal; by default nothing."""

import io
import logging

import pytest

from ggml_sched.backends.cupy import compiled
from ggml_sched.cli.run_progress import Compiling


class Nvrtc:
    """NVRTC's calls; `broken`: what is compiled does not compile."""

    class NVRTCError(Exception):
        pass

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def getVersion(self):
        return 13, 0

    def createProgram(self, text, name, headers, names):
        return text

    def compileProgram(self, program, options):
        if self.broken:
            raise self.NVRTCError

    def getProgramLog(self, program):
        return "no good"

    def getCUBIN(self, program):
        return b"code"

    def destroyProgram(self, program):
        pass


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))


def compile(**options) -> bytes:
    return compiled.machine_code(Nvrtc(**options), "norm", "text", "sm_90")


def test_the_log_says_what_is_compiled_once(caplog):
    caplog.set_level(logging.INFO, "ggml_sched.cupy")
    assert compile() == compile() == b"code"            # the second is read from the folder
    assert [record.msg for record in caplog.records] == [compiled.COMPILING, compiled.COMPILED]
    assert caplog.messages[0] == "compiling norm.cu for sm_90"


def test_nothing_is_printed_by_default(capfd):
    with Compiling():                                   # standard error is no terminal
        compile()
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_what_is_compiled_until_it_is(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with Compiling():
        compiled.LOG.info(compiled.COMPILING, "rope", "sm_90")
        assert compile()
        compiled.LOG.info(compiled.COMPILED, "rope", "sm_90", 1.0)
    shown = terminal.getvalue().split("\r\x1b[K")
    assert shown == ["", "ggml-sched: compiling kernels: rope", "ggml-sched: compiling kernels: rope and 1 more",
                     "ggml-sched: compiling kernels: rope", ""]
    compiled.LOG.info(compiled.COMPILING, "rope", "sm_90")
    assert terminal.getvalue().endswith("\r\x1b[K") and not compiled.LOG.handlers


def test_a_line_does_not_outlive_an_error(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    with pytest.raises(compiled.CompileError, match="no good"), Compiling():
        compile(broken=True)
    assert terminal.getvalue().endswith("\r\x1b[K")
