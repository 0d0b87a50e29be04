"""A compiled module that cannot be imported is reported as what it is: its name, this Python, and the reason."""

import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from processes import run_python

import ggml_sched as gs

PACKAGE = Path(gs.__file__).parent
TYPES = "core/graph/types"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
CATCH = """
try:
    {code}
except ImportError as error:
    print(type(error).__name__, error.name, error, sep="|")
else:
    print("no error")
"""


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of the package without what is compiled, and without sources of that."""
    kinds = shutil.ignore_patterns("*.so", "*.pyd", "*.pyx", "*.pxi", "*.c", "__pycache__", "*.gguf", "*.cu*")
    shutil.copytree(PACKAGE, tmp_path / "ggml_sched", ignore=kinds)
    return tmp_path / "ggml_sched"


def compile_all(package: Path, without: str = "") -> None:
    """Links to the compiled modules."""
    for path in PACKAGE.rglob(f"*{SUFFIX}"):
        if path.name != f"{without}{SUFFIX}":
            (package / path.relative_to(PACKAGE)).symlink_to(path)


def error_of(package: Path, code: str = "import ggml_sched") -> tuple[str, str, str]:
    """The class, the name and the message of the ImportError that a line of Python raises."""
    done = run_python("-c", CATCH.format(code=code), PYTHONPATH=str(package.parent), cwd=package.parent)
    kind, name, message = done.stdout.rstrip("\n").split("|", 2)
    return kind, name, message


def test_a_source_tree_that_is_not_compiled(package):
    (package / f"{TYPES}.pyx").touch()
    kind, name, message = error_of(package)
    assert (kind, name) == ("BuildError", "ggml_sched.core.graph.types")
    assert "it is not compiled" in message and "pip install ." in message


def test_an_extension_of_another_python(package):
    (package / f"{TYPES}.cpython-39-x86_64-linux-gnu.so").touch()
    kind, name, message = error_of(package)
    assert (kind, name) == ("BuildError", "ggml_sched.core.graph.types")
    assert "it is built for cpython-39-x86_64-linux-gnu" in message and "--force-reinstall" in message
    assert f"Python {sys.version.split()[0]} ({sysconfig.get_config_var('SOABI')})" in message


def test_a_file_that_is_missing_from_an_installation(package):
    kind, name, message = error_of(package)
    assert (kind, name) == ("BuildError", "ggml_sched.core.graph.types")
    assert "its file is missing from the installation" in message


def test_a_file_that_the_loader_refuses(package):
    broken = package / f"{TYPES}{SUFFIX}"
    broken.write_bytes(b"no library")
    kind, name, message = error_of(package)
    assert (kind, name) == ("BuildError", "ggml_sched.core.graph.types")
    assert f"{broken} cannot be loaded: " in message


def test_an_extension_that_is_compiled_from_older_sources(package):
    """What a pull leaves in a working tree: the module loads, and lacks a name that another one imports."""
    compile_all(package)
    (package / "llama/_strings.pyx").touch()
    with open(package / "llama/gguf_reader.py", "a", encoding="utf-8") as file:
        file.write("\nfrom ggml_sched.llama._strings import added_name\n")
    kind, name, message = error_of(package, "from ggml_sched import llama")
    assert (kind, name) == ("BuildError", "ggml_sched.llama._strings")
    assert "is compiled from other sources: cannot import name 'added_name'" in message
    assert "setup.py build_ext --inplace" in message


@pytest.mark.parametrize("without, room, code", [
    ("_kernels", "backends.cpu", "import ggml_sched; ggml_sched.CpuBackend"),
    ("_dlpack", "graph", "import ggml_sched; ggml_sched.Scheduler"),
    ("_cells", "llama", "from ggml_sched import llama"),
])
def test_a_module_that_is_loaded_when_its_name_is_first_used(package, without, room, code):
    compile_all(package, without)
    assert error_of(package, code)[:2] == ("BuildError", f"ggml_sched.{room}.{without}")


def test_a_requirement_that_is_missing_is_another_error(package):
    compile_all(package)
    code = "import sys; sys.modules['numpy'] = None; import ggml_sched; ggml_sched.Scheduler"
    kind, name, _ = error_of(package, code)
    assert (kind, name) == ("ModuleNotFoundError", "numpy")
