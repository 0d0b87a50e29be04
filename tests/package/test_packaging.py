"""What is installed is complete: metadata, types, headers, and a core that others can compile against.

The soak tests build: a source distribution, a wheel from it, and a consumer of the C view.
"""

import ast
import enum
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from out_of_tree import suite_in_new_environment
from processes import run_python

import ggml_sched as gs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(gs.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CORE = sorted(path.relative_to(ROOT / "ggml_sched").with_suffix("").as_posix()
              for path in (ROOT / "ggml_sched" / "core").glob("*/*.pyx"))
EXTENSIONS = {name: importlib.import_module(f"ggml_sched.{name.replace('/', '.')}")
              for name in (*CORE, "_core", "_capi", "threads/_locks", "execution/_steps")}
DECLARATIONS = [f"{name}.{kind}" for name in EXTENSIONS for kind in ("pyi", "pxd")
                if kind == "pxd" or (ROOT / "ggml_sched" / f"{name}.pyi").exists()]
"""Each extension's files for Cython, and for type checkers if it has Python names."""
KERNELS = ("graph/_dlpack", "planning/_c_program", "backends/cpu/_kernels", "backends/ggml/_ggml", "llama/_cells",
           "llama/_strings", "llama_cpp/_hook", "placement/solve/_chain", "placement/solve/_exchange")
"""Extensions without headers for other extensions."""
HEADERS = sorted(path.name for path in (ROOT / "include" / "ggml_sched").glob("*.h"))
SOURCES = sorted(path.relative_to(ROOT / "ggml_sched") for path in (ROOT / "ggml_sched").rglob("*.py"))


def test_versions_agree():
    assert PROJECT["project"]["version"] == gs.__version__
    assert f"## {gs.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_folder_is_a_declared_package():
    folders = {".".join(("ggml_sched", *path.parent.parts)) for path in SOURCES if path.name == "__init__.py"}
    headers = {f"ggml_sched.include.{name}" for name in ("ggml_sched", "pkgconfig", "cmake")}
    assert folders | headers == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_module_is_there():
    assert [path for path in SOURCES if not (PACKAGE / path).is_file()] == []


@pytest.mark.parametrize("name", ["py.typed", "_c.pxd", "__init__.pxd", "_graph.pxd", *DECLARATIONS])
def test_types_are_there(name):
    assert (PACKAGE / name).is_file()


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_stub_names_everything_public(extension):
    """A quick check by names; the soak test runs mypy."""
    module = EXTENSIONS[extension]
    stub = PACKAGE / f"{extension}.pyi"
    known = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body if stub.exists() else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            known[node.name] = {getattr(n, "name", None) or n.target.id for n in getattr(node, "body", ())
                                if isinstance(n, ast.FunctionDef | ast.AnnAssign)}
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        assert name in known
        if isinstance(value, type) and not issubclass(value, enum.Enum):
            assert {n for n in vars(value) if not n.startswith("_")} - known[name] == set(), name


def test_headers_are_where_get_include_says():
    assert sorted(path.name for path in Path(gs.get_include(), "ggml_sched").glob("*.h")) == HEADERS


def test_the_classifiers_are_the_pythons_that_wheels_are_built_for():
    classifiers = PROJECT["project"]["classifiers"]
    named = set(re.findall(r"^Programming Language :: Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE))
    built = {f"3.{name[3:-2]}" for name in PROJECT["tool"]["cibuildwheel"]["build"]}
    assert named == built and f">={min(built)}" == PROJECT["project"]["requires-python"]


def test_the_installed_metadata():
    if PACKAGE == ROOT / "ggml_sched":
        pytest.skip("compiled in place, not installed")
    found = importlib.metadata.metadata("ggml-sched")
    assert found["Version"] == gs.__version__
    assert found["License-Expression"] == "MIT"
    needed = [r for r in importlib.metadata.requires("ggml-sched") if "extra ==" not in r]
    assert needed == ["numpy>=2.0"]


def test_importing_loads_nothing_optional():
    code = ("import sys, ggml_sched; print(sorted({m.partition('.')[0] for m in sys.modules if m[0] != '_'}"
            " - set(sys.stdlib_module_names)), [m for m in sys.modules if 'llama' in m or '.cpu' in m])")
    done = run_python("-c", code)
    said = done.stdout.split("] [")
    # Some distributions of Python import a sitecustomize of their own.
    assert set(re.findall(r"\w+", said[0])) <= {"cython_runtime", "ggml_sched", "numpy", "sitecustomize"}
    assert said[1].strip() == "]"


def test_importing_the_runner_loads_no_slow_module_beyond_numpy_s():
    code = ("import sys, numpy; before = set(sys.modules); import ggml_sched.llama; "
            "print(*(set(sys.modules) - before) & {'difflib', 'hashlib', 'importlib.resources', 'numpy.typing', "
            "'pathlib', 'shutil', 'tempfile'})")
    assert run_python("-c", code).stdout.split() == []


def test_importing_the_runner_loads_no_planner():
    code = ("import sys, ggml_sched.llama; "
            "print(*(m for m in sys.modules if m.startswith(('ggml_sched.planning', 'ggml_sched.core.plan'))))")
    assert run_python("-c", code).stdout.split() == []


def test_running_a_model_loads_no_module_that_prints_saves_or_checks_plans():
    code = ("import sys; from ggml_sched import llama; model = llama.load(llama.small_model()); model.eval([1]); "
            "print([m for m in sys.modules if m.startswith(('ggml_sched.planning.verify', 'ggml_sched.planning.report',"
            " 'ggml_sched.planning.planfile', 'html'))])")
    assert run_python("-c", code).stdout.strip() == "[]"


def test_running_a_model_loads_no_module_that_writes_files_limits_memory_or_counts_without_memory():
    code = ("import sys; from ggml_sched import llama; model = llama.load(sys.argv[1]); model.generate([1], 1).read(); "
            "print([m for m in sys.modules if m.startswith(('ggml_sched.llama.gguf_write', 'ggml_sched.llama.limited', "
            "'ggml_sched.llama.residency', 'ggml_sched.llama.synthetic', 'ggml_sched.llama.unloaded', "
            "'ggml_sched.llama.small', 'ggml_sched.backends.dry', 'ggml_sched.testing'))])")
    assert run_python("-c", code, str(PACKAGE / "llama" / "data" / "small.gguf")).stdout.strip() == "[]"


def test_public_names_of_the_runner_that_load_late_are_those_of_their_modules():
    code = ("import importlib; from ggml_sched import llama; "
            "print([name for name, home in llama._HOMES.items()"
            " if getattr(llama, name) is not getattr(importlib.import_module(home), name)],"
            " sorted({*llama._HOMES} - {*llama.__all__}), callable(llama.load), hasattr(llama, 'random_lama'))")
    assert run_python("-c", code).stdout.split() == ["[]", "[]", "True", "False"]


def test_ci_runs_the_test_command_of_the_readme():
    """In an environment of its own, but for that the same."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    _, *steps = re.search(r"^(python3 -m venv .*\[test\].*)$", readme, re.M)[1].split(" && ")
    plain = script.replace('"$venv/', ".venv/").replace('"', "").replace("--quiet ", "").splitlines()
    assert [step for step in steps if step not in plain] == []


OPTIONAL = re.compile(r"""(?:importorskip|find_spec)\(["'](\w+)|"""
                      r"""(ggml_here|find_nvrtc|op_results\.compute|op_results import \(?[\w\s,]*\bcompute)\b""")
"""Optional requirements of tests that may be missing: modules, or the devices and tools that they stand for."""


def test_ci_runs_again_what_asks_for_an_extra():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace("\\\n", " ")
    again = [ROOT / word for line in script.partition("[test,")[2].splitlines() for word in line.split()
             if word.startswith("tests/")]
    assert again and all(path.exists() for path in again)
    asking = {path for path in (ROOT / "tests").rglob("test_*.py")
              for module, other in OPTIONAL.findall(path.read_text(encoding="utf-8"))
              if other or not module.startswith("_") and module not in sys.stdlib_module_names}
    left_out = {path.relative_to(ROOT).as_posix() for path in asking if not {path, *path.parents} & {*again}}
    # Computes the ops of the CPU with the kernels of CUDA, which nothing that can be installed is compared with.
    assert left_out - {"tests/cupy/test_cuda_ops_of_the_cpu.py"} == set()
    assert {path.parent.name for path in asking} >= {"backends", "llama", "llama_cpp", "package"}


# -- building -----------------------------------------------------------------------------------------


def build(tmp_path: Path, what: str) -> Path:
    """Build as pip does, isolated."""
    if what == "sdist":
        code = ("import sys; from setuptools import build_meta;"
                "print(build_meta.build_sdist(sys.argv[1]))")
        run_python("-c", code, str(tmp_path), cwd=ROOT, timeout=900)
    else:
        run_python("-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), what, cwd=ROOT, timeout=900)
    return max(tmp_path.glob("*.tar.gz" if what == "sdist" else "*.whl"))


def wanted_in_sdist() -> set[str]:
    """The files that git knows, without those for git and this project's own machinery."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.splitlines() if name != ".gitignore"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools")
    pytest.importorskip("Cython")
    return build(tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), str(sdist))


def test_metadata_and_a_source_distribution_need_no_translation_to_c(tmp_path):
    """pip reads the metadata first: nothing long may happen there, and a source distribution has no C of Cython's."""
    pytest.importorskip("Cython")
    tree = tmp_path / "tree"
    for name in wanted_in_sdist():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
    for call in ("get_requires_for_build_wheel()", "prepare_metadata_for_build_wheel(sys.argv[1])",
                 "build_sdist(sys.argv[1])"):
        run_python("-c", f"import sys; from setuptools import build_meta; print(build_meta.{call})", str(tmp_path),
                   cwd=tree, timeout=300)
    assert [path.name for path in tree.rglob("*.pyx") if path.with_suffix(".c").exists()] == []
    with tarfile.open(max(tmp_path.glob("*.tar.gz"))) as tar:
        names = {member.name.partition("/")[2] for member in tar.getmembers()}
    assert {path.relative_to(tree).as_posix() for path in tree.rglob("*.pyx")} <= names


def test_processes_that_translate_import_setup_py_without_building_anything():
    """From CPython 3.14 on they are started anew, not forked, where `python setup.py` is the main program."""
    pytest.importorskip("Cython")
    run_python("-c", "import runpy; runpy.run_path('setup.py', run_name='__mp_main__')", cwd=ROOT)


@pytest.mark.soak
def test_the_source_distribution_is_what_git_has(sdist):
    with tarfile.open(sdist) as tar:
        names = {m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()}
    generated = {n for n in names if n in ("PKG-INFO", "setup.cfg") or ".egg-info/" in n}
    assert names - generated == wanted_in_sdist()


@pytest.mark.soak
def test_the_wheel_has_what_users_and_compilers_need(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"ggml_sched/{path.as_posix()}" for path in SOURCES}
    expected |= {f"ggml_sched/include/ggml_sched/{name}" for name in HEADERS} | {"_ggml_sched_pytest.py"}
    expected |= {f"ggml_sched/include/{name}" for name in (
        "cmake/ggml-sched-config.cmake", "cmake/ggml-sched-config-version.cmake", "pkgconfig/ggml-sched.pc")}
    expected |= {f"ggml_sched/{name}" for name in ("py.typed", "_c.pxd", "__init__.pxd", "llama/data/small.gguf",
                                                   "placement/known_devices.json")}
    expected |= {f"ggml_sched/{name}" for name in ("_graph.pxd", *DECLARATIONS)}
    expected |= {f"ggml_sched/{path.relative_to(PACKAGE).as_posix()}" for path in PACKAGE.glob("core/**/__init__.pxd")}
    expected |= {f"ggml_sched/{name}.pyi" for name in KERNELS}
    cupy = PACKAGE / "backends" / "cupy"
    expected |= {f"ggml_sched/{path.relative_to(PACKAGE).as_posix()}"
                 for path in cupy.glob("kernels/*.cu*")}
    expected |= {f"ggml_sched/view/{path.name}" for kind in ("html", "css", "js")
                 for path in (ROOT / "ggml_sched" / "view").glob(f"*.{kind}")}
    compiled = {name for name in names if name.endswith((".so", ".pyd"))}
    assert names - compiled == expected
    assert {name.partition(".")[0] for name in compiled} == {f"ggml_sched/{name}" for name in (*EXTENSIONS, *KERNELS)}
    with zipfile.ZipFile(wheel) as archive:
        for name in compiled:
            binary = archive.read(name)
            # Stripped, and without the counters of debug builds.
            assert [word for word in (b".symtab", b".debug_info", b"gs_blocks_taken") if word in binary] == [], name


CONSUMER = '''
from libc.stdint cimport int64_t
from ggml_sched._c cimport GS_OP_UNARY
from ggml_sched._c cimport gs_node
from ggml_sched._core cimport BackendBase, Graph, Tensor, gs_checked_add, gs_graph
from ggml_sched._graph cimport NodeTable
from ggml_sched._graph import op_numbers
from ggml_sched.backend import Backend

cdef int OP_SQR = op_numbers()["SQR"], OP_SCALE = op_numbers()["SCALE"], OP_MUL_MAT = op_numbers()["MUL_MAT"]
cdef int SUB_OP_RELU = op_numbers()["UNARY:RELU"] - GS_OP_UNARY


cdef class Counter:
    """Walks the planner's flat arrays without a Python object in sight."""
    cdef readonly int64_t total

    def __init__(self, Graph graph not None):
        cdef gs_graph *g = &graph.flat
        cdef int i
        with nogil:
            for i in range(g.n_nodes):
                if gs_checked_add(self.total, g.layout[g.node[i]].nbytes, &self.total) != 0:
                    break


cdef class Device(BackendBase):
    """A backend's C part, subclassed in C."""
    cdef readonly int touched

    cpdef void touch(self) noexcept:
        self.touched += 1


def name_of(Tensor t not None):
    return t.name


cdef class Compiled(BackendBase):
    """Answers in C what it can: no op of more than two sources, MUL_MAT offloaded, nothing of less than 256 bytes.

    About SQR and what is scaled by 0 it has Python asked.
    """
    cdef public int asked
    cdef public int64_t shrinks

    cdef int c_supports_op(self, const gs_node *node) noexcept nogil:
        self.asked += 1
        if node.op == OP_SQR or node.op == OP_SCALE and node.params[0] == 0:
            return -1
        if node.op == GS_OP_UNARY:
            return node.sub_op == SUB_OP_RELU and node.src[0].layout.ne[0] == node.layout.ne[0]
        return node.n_src <= 2

    cdef int c_offload_op(self, const gs_node *node) noexcept nogil:
        return -1 if node.op == OP_SQR else node.op == OP_MUL_MAT

    cdef int64_t c_alloc_size(self, const gs_node *tensor) noexcept nogil:
        if tensor.op == OP_SQR:
            return -1
        return max(tensor.layout.nbytes, 256) - self.shrinks


def product(nodes):
    """What a kernel does with a table: the product of the first floats of the last node's sources."""
    cdef NodeTable table = NodeTable(nodes)
    cdef const gs_node *node = table.node(len(table) - 1)
    cdef float found = 1
    cdef int k
    for k in range(node.n_src):
        found *= (<float *>node.src[k].data)[0]
    return found
'''
SETUP = '''
import ggml_sched
from Cython.Build import cythonize
from setuptools import Extension, setup

ext = Extension("consumer", ["consumer.pyx"], include_dirs=[ggml_sched.get_include()])
setup(name="consumer", ext_modules=cythonize([ext], language_level=3))
'''
USE = '''
import consumer, ggml_sched as gs
ctx = gs.Context()
a = ctx.tensor("f32", 4, "a")
assert consumer.Counter(gs.Graph(ctx.add(a, a))).total == 16
assert consumer.name_of(a) == "a"


class Both(consumer.Device, gs.Backend):
    pass


device = Both("both", 32)
device.touch()
assert (device.name, device.alignment, device.touched) == ("both", 32, 1)
with gs.Scheduler([device]) as scheduler:
    assert scheduler.plan(gs.Graph(ctx.add(a, a))).splits[0].backend is device
try:
    consumer.name_of(None)
except TypeError:
    print("done")
'''
USE_ANSWERS = '''
import consumer, ggml_sched as gs, numpy as np
from ggml_sched._core import Devices, Policy, Request, make_plan

class Plain(consumer.Compiled, gs.DryBackend):
    """A compiled core under a Python backend."""

class Strict(Plain):
    """On top of the core: what it says replaces what that says."""
    def supports_op(self, node):
        return node.op != "ADD" and super().supports_op(node)

ctx = gs.Context()
x = ctx.tensor("f32", 8, "x")
nodes = [ctx.add(x, x), ctx.relu(x), ctx.silu(x), ctx.sqr(x), ctx.scale(x, 0.0), ctx.scale(x, 2.0),
         ctx.mul_mat(x, x), ctx.restore("ADD_ID", "f32", x.ne, x.nb, (x, x, x))]
graph = gs.Graph(*nodes)
host = gs.DryBackend("host")

def supported(backend):
    with gs.Scheduler([backend, host], plan_cache=0) as scheduler:
        plans = [scheduler.plan(graph) for _ in range(2)]
        assert plans[0].backend_of(nodes[0]) is plans[1].backend_of(nodes[0])
        for t in nodes:
            assert (plans[1].backend_of(t) is backend) == bool(backend.supports_op(t)), t
        return [plans[1].backend_of(t) is backend for t in nodes]

plain = Plain("plain")
expected = [True, True, False, True, True, True, True, False]
assert supported(plain) == expected, supported(plain)

# Each once, and no more when it is planned again.
devices = Devices((plain, host))
plain.asked = 0
for _ in range(3):
    make_plan(Request(graph, devices, None), Policy())
assert plain.asked == len(graph), plain.asked
plain.answers_version += 1
make_plan(Request(graph, devices, None), Policy())
assert plain.asked == 2 * len(graph)
plain.answers_version = None
assert supported(plain) == expected

# Python is asked where C says -1, and nowhere else.
asked = []
class Base(gs.DryBackend):
    def supports_op(self, node):
        asked.append(node.op)
        return node.op == "SQR"
    def offload_op(self, node):
        asked.append("offload " + node.op)
        return True
    def alloc_size(self, tensor):
        asked.append("size " + tensor.op)
        return 1024

class Rest(consumer.Compiled, Base):
    pass

rest = Rest("rest")
made = make_plan(Request(graph, Devices((rest, host)), None), Policy())
assert sorted(asked) == ["SCALE", "SQR", "offload SQR", "size SQR"], asked
assert [made.backend_index(graph.id_of(t)) for t in nodes] == [0, 0, 1, 0, 1, 0, 0, 1]
assert made.size(graph.id_of(nodes[3])) == 1024 and made.size(graph.id_of(nodes[0])) == 256

# What a Python class says on top of the core, or an instance, holds.
assert supported(Strict("strict")) == [False, True, False, True, True, True, True, False]
one = Plain("one")
one.supports_op = lambda node: node.op == "ADD"
assert supported(one) == [True] + [False] * 7

# The methods in Python say what the core says.
assert plain.offload_op(nodes[6]) and not plain.offload_op(nodes[0]) and not plain.offload_op(nodes[3])
assert (plain.alloc_size(x), plain.alloc_size(nodes[3])) == (256, 32)

# Offloaded in C: the product goes to the device, though its weight is the host's.
home = gs.Context()
w = home.tensor("f32", (8, 8), "w")
host.alloc_tensors(home)
y, z = ctx.mul_mat(w, x), ctx.mul(w, x)
with gs.Scheduler([Plain("device"), host]) as scheduler:
    plan = scheduler.plan(gs.Graph(y, z))
    assert (plan.backend_of(y).name, plan.backend_of(z).name) == ("device", "host")

# A size that makes no sense raises, and nothing is remembered.
wrong = Plain("wrong")
wrong.shrinks = 1000
devices = Devices((wrong,))
for _ in range(2):
    try:
        make_plan(Request(gs.Graph(nodes[0]), devices, None), Policy())
        raise SystemExit("no error")
    except gs.PlacementError as error:
        assert "'wrong'" in str(error) and devices.n_cached == 0
wrong.shrinks = 0
make_plan(Request(gs.Graph(nodes[0]), devices, None), Policy())

# Kernels: nodes at their addresses.
both = gs.Context()
a, b = both.tensor("f32", 4), both.tensor("f32", 4)
c = both.mul(a, b)
with gs.CpuBackend(1) as cpu:
    cpu.alloc_tensors(both)
    a.set(np.full(4, 3.0))
    b.set(np.full(4, 5.0))
    assert consumer.product([a, c]) == 15.0
print("done")
'''


@pytest.mark.soak
def test_others_compile_against_the_package(tmp_path):
    pytest.importorskip("Cython")
    (tmp_path / "consumer.pyx").write_text(CONSUMER)
    (tmp_path / "setup.py").write_text(SETUP)
    run_python("setup.py", "build_ext", "--inplace", cwd=tmp_path, timeout=600)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    for code in (USE, USE_ANSWERS):
        used = run_python("-c", code, PYTHONPATH=path)
        assert (used.stderr, used.stdout) == ("", "done\n")


@pytest.mark.soak
def test_c_consumers_build_and_run_against_the_wheel(wheel, tmp_path):
    """The tests of every day take the package that is there; here it is the wheel, and no source tree around it."""
    installed, tests = tmp_path / "site", tmp_path / "tree"
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed), str(wheel))
    for name in ("tests/conftest.py", "tests/support", "tests/capi", "docs/c-api.md",
                 "pyproject.toml"):
        (tests / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tests / name)
    # pytest warns of a package with a plugin that was imported before it.
    code = ("import sys, pytest, importlib.util as u; here = u.find_spec('ggml_sched').origin;"
            "assert here.startswith(sys.argv[1]), here;"
            "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[2:]]))")
    files = [f"tests/capi/test_capi_{name}.py" for name in ("consumers", "arenas", "misuse")]
    done = run_python("-c", code, str(installed), *files, cwd=tests, PYTHONPATH=str(installed), timeout=600)
    assert "skipped" not in done.stdout, done.stdout
    if importlib.util.find_spec("cmake") or shutil.which("cmake"):
        run_python("-c", code, str(installed), "tests/capi/test_capi_cmake.py", cwd=tests, PYTHONPATH=str(installed))


@pytest.mark.soak
def test_a_backend_of_another_package_is_tested_against_the_wheel(wheel, tmp_path):
    """By one command in an environment that has no source tree: `pytest`, with the options of its pyproject.toml."""
    printed = suite_in_new_environment(tmp_path, wheel)
    assert "backend: <FusedBackend 'arrays'>" in printed and " passed" in printed


@pytest.mark.soak
def test_headers_compile_as_c_and_as_cpp(tmp_path):
    """Each alone, without Python.h."""
    text = "".join(f'#include "ggml_sched/{name}"\n' for name in HEADERS) + "int main(void) { return 0; }\n"
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC")).split()
    for suffix in ("c", "cpp"):
        source = tmp_path / f"headers.{suffix}"
        source.write_text(text)
        subprocess.run([*compiler, "-Wall", "-Wextra", "-Werror", f"-I{gs.get_include()}", "-fsyntax-only",
                        str(source)], check=True)


@pytest.mark.soak
def test_the_stub_is_the_module():
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy")
    stubs = [name.removesuffix(".pyi") for name in DECLARATIONS if name.endswith(".pyi")]
    modules = [f"ggml_sched.{name.replace('/', '.')}" for name in stubs]
    run_python("-m", "mypy.stubtest", *modules, "--mypy-config-file", "pyproject.toml", cwd=ROOT, timeout=600)
