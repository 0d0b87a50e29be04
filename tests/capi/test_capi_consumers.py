"""Code compiled against the package works: the C of docs/c-api.md, C++ without Python.h, Cython.

Each is built by the compiler itself, with all warnings as errors, and runs in a process of its own; those in C and C++
once more with the address and undefined-behaviour sanitizers.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from processes import run_python

import ggml_sched as gs
from ggml_sched.cli import main

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = gs.get_include()
HEADERS = sorted(path.name for path in Path(INCLUDE, "ggml_sched").glob("*.h"))
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
LANGUAGES = {"c": ["gcc", "-x", "c", "-std=c99"], "c++": ["g++", "-x", "c++", "-std=c++17"]}
SANITIZE = ["-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
PYTHON = f"-isystem{sysconfig.get_path('include')}"

for tool in ("gcc", "g++"):
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}", allow_module_level=True)


def build(folder: Path, source: str, output: str, *options: str, language: str = "c") -> Path:
    done = subprocess.run([*LANGUAGES[language], *STRICT, f"-I{INCLUDE}", PYTHON, "-shared", "-fPIC", *options, source,
                           "-x", "none", "-o", output], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / output


def run(folder: Path, code: str, sanitized: bool = False, expected: int = 0) -> subprocess.CompletedProcess:
    """Python with a folder on its path."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path}
    if sanitized:
        libraries = [subprocess.run(["gcc", f"-print-file-name=lib{name}.so"], capture_output=True, text=True,
                                    check=True).stdout.strip() for name in ("asan", "ubsan")]
        if not all(map(os.path.isabs, libraries)):
            pytest.skip("this GCC has no sanitizers")
        environment |= {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    return run_python("-c", code, cwd=folder, status=expected, **environment)


RENAMED = {"gs_read": {"place": "location"}, "gs_step": {"place": "location", "keeps": "if_changed"},
           "gs_program": {"turns": "copy_slots", "places": "locations"}, "gs_api": {"size_place": "size_location"}}
"""{struct: {former name of a field: its name}}."""


@pytest.mark.parametrize("language", LANGUAGES)
def test_fields_have_their_former_names(language):
    source = '#include "ggml_sched/api.h"\nextern gs_place *former; gs_location *former;\n' + "\n".join(
        f"int {struct}_{old}[offsetof({struct}, {old}) == offsetof({struct}, {new})"
        f" && sizeof((({struct} *)0)->{old}) == sizeof((({struct} *)0)->{new}) ? 1 : -1];"
        for struct, names in RENAMED.items() for old, new in names.items())
    done = subprocess.run([*LANGUAGES[language], *STRICT, f"-I{INCLUDE}", "-fsyntax-only", "-"], input=source,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_header_compiles_alone(tmp_path, language):
    for name in HEADERS:
        # Twice: once is all that counts.
        source = f'#include "ggml_sched/{name}"\n#include "ggml_sched/{name}"\nint main(void) {{ return 0; }}\n'
        done = subprocess.run([*LANGUAGES[language], *STRICT, f"-I{INCLUDE}", "-fsyntax-only", "-"], input=source,
                              capture_output=True, text=True)
        assert done.returncode == 0, f"{name}: {done.stderr}"


# -- C: the example of the documentation ------------------------------------------------------------------------


@pytest.fixture
def documented(tmp_path) -> Path:
    """A folder with the files of docs/c-api.md."""
    page = ROOT / "docs" / "c-api.md"
    if not page.exists():
        pytest.skip("needs the source tree")
    blocks = re.findall(r"^`(\w+\.c)` .*?^```c\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    assert [name for name, _ in blocks] == ["planning.c", "module.c", "running.c", "embed.c"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    return tmp_path


def small_plan() -> gs.Plan:
    """The problem of that page in Python."""
    device, host = gs.DryBackend("device", 256), gs.DryBackend("host", 64)
    home, ctx = gs.Context(), gs.Context()
    w, x = home.tensor("f32", (64, 64)), ctx.tensor("f32", (64, 8))
    device.alloc_tensors(home, "weights")
    ctx.set_input(x)
    z = ctx.relu(ctx.mul_mat(w, x))
    ctx.set_output(z)
    with gs.Scheduler([device, host]) as scheduler:
        return scheduler.plan(gs.Graph(z))


@pytest.mark.parametrize("sanitized", [False, True])
def test_the_documented_example_plans_as_python_does(documented, sanitized):
    plan = small_plan()
    z = plan.graph.id_of(plan.graph.nodes[-1])
    expected = (plan.buffer_sizes, plan.data.backend_index(z), plan.data.offset(z))
    build(documented, "module.c", "planned.so", *(SANITIZE if sanitized else ["-O2"]))
    done = run(documented, "import planned; print(planned.example())", sanitized)
    assert done.stdout == f"{expected}\n"


RUNNING = """
import ctypes
import numpy as np
from ggml_sched import _capi
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
w = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 13 - 6
x = np.arange(8 * 64, dtype=np.float32).reshape(8, 64) % 7 - 3
z, error = np.zeros((8, 64), np.float32), (ctypes.c_char * 512)()
run = ctypes.CDLL("./running.so").run_example
run.argtypes = [ctypes.c_void_p] * 5
status = run(pointer(_capi.api, b"ggml_sched._capi.api"), w.ctypes.data, x.ctypes.data, z.ctypes.data, error)
print(status, np.array_equal(z, np.maximum(x @ w.T, 0)))
"""


@pytest.mark.parametrize("sanitized", [False, True])
def test_the_documented_example_runs_a_plan_on_tables_of_functions(documented, sanitized):
    options = ["-D_POSIX_C_SOURCE=200809L", *(SANITIZE if sanitized else ["-O2"])]
    build(documented, "running.c", "running.so", *options)
    assert run(documented, RUNNING, sanitized).stdout == "0 True\n"


def test_a_program_without_python_starts_it_once(documented):
    config = Path(sysconfig.get_config_var("BINDIR"), f"python{sysconfig.get_python_version()}-config")
    if not config.exists():
        pytest.skip("needs python-config")
    flags = subprocess.run([str(config), "--embed", "--ldflags"], capture_output=True, text=True, check=True).stdout
    folder = sysconfig.get_config_var("LIBDIR")
    done = subprocess.run([*LANGUAGES["c"], *STRICT, "-D_POSIX_C_SOURCE=200809L", "-D_DEFAULT_SOURCE", f"-I{INCLUDE}",
                           PYTHON, "-I.", "embed.c", "-x", "none", "-o", "embed", *flags.split(),
                           f"-Wl,-rpath,{folder}"], cwd=documented, capture_output=True, text=True)
    if "cannot find -lpython" in done.stderr or "recompile with -fPIE" in done.stderr:
        pytest.skip("needs libpython")
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(Path(gs.__file__).parents[1]), *sys.path[1:]])
    ran = subprocess.run(["./embed"], cwd=documented, capture_output=True, text=True,
                         env=os.environ | {"PYTHONPATH": path, "PYTHONHOME": sys.base_prefix})
    assert (ran.returncode, ran.stdout) == (0, "ok 6\n"), ran.stderr


@pytest.mark.parametrize("option", ["--cflags", "--include", "--cython", "--pkgconfig", "--cmake"])
def test_the_command_says_where_headers_are(option, capsys):
    assert main(["config", option]) == 0
    said = capsys.readouterr().out.rstrip("\n")
    if option in ("--cflags", "--include"):
        assert said.removeprefix("-I") == INCLUDE and said.startswith("-I") == (option == "--cflags")
    elif option == "--cython":
        assert Path(said, "ggml_sched", "_c.pxd").exists()
    elif option == "--cmake":
        text = Path(said, "ggml-sched-config.cmake").read_text()
        assert "${CMAKE_CURRENT_LIST_DIR}/.." in text and Path(said).parent == Path(INCLUDE)
    elif shutil.which("pkg-config"):
        found = subprocess.run(["pkg-config", "--cflags", "ggml-sched"], capture_output=True, text=True,
                               env=os.environ | {"PKG_CONFIG_PATH": said})
        assert Path(found.stdout.strip().removeprefix("-I")).resolve() == Path(INCLUDE).resolve(), found.stderr
    else:
        text = Path(said, "ggml-sched.pc").read_text()
        assert "includedir=${pcfiledir}/.." in text and f"Version: {gs.__version__}\n" in text


def test_an_older_or_newer_package_is_an_import_error_that_says_both_versions(documented):
    header = documented / "ggml_sched"
    shutil.copytree(Path(INCLUDE, "ggml_sched"), header)
    text = (header / "api.h").read_text()
    for old, new in (("GS_API_MAJOR 2", "GS_API_MAJOR 3"), ("GS_API_MINOR 2", "GS_API_MINOR 7"),
                     ("char message[256]", "char message[512]")):
        changed = header / ("status.h" if "message" in old else "api.h")
        before = changed.read_text()
        assert old in before
        changed.write_text(before.replace(old, new))
        # The folder itself comes first.
        build(documented, "module.c", "planned.so", "-I.", "-iquote.")
        changed.write_text(before)
        done = run(documented, """
import planned
try:
    planned.example()
except ImportError as error:
    print(error)
""")
        assert "the C API of ggml_sched is 2.2, compiled against " in done.stdout
    assert text == (header / "api.h").read_text()


# -- C++: handed the functions, without Python.h -----------------------------------------------------------------

THREADS = r"""
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>
#include "ggml_sched/api.h"

#ifdef Py_PYTHON_H
#error "no Python here"
#endif

namespace {

struct Graph {
    const gs_api *api;
    gs_api_graph *handle = nullptr;
    gs_graph_arrays to{};

    explicit Graph(const gs_api *functions) : api(functions) {}
    ~Graph() { api->graph_free(handle); }

    // A chain: leaf 0, and node i = relu(i - 1); every third one a view of the one before.
    int fill(int n, gs_error *error) {
        const gs_graph_size size = {n, n - 1, 1, n - 1, 0, 0};
        const int status = handle == nullptr ? api->graph_new(&size, &to, &handle, error)
                                             : api->graph_refill(handle, &size, &to, error);
        if (status != GS_OK) return status;
        for (int i = 0; i < n; i++) {
            const bool view = i > 1 && i % 3 == 0;
            to.layout[i] = gs_layout{{16, 4, 1, 1}, {4, 64, 256, 256}, 0, GS_TYPE_F32,
                                     i == 0 ? GS_OP_NONE : view ? GS_OP_VIEW : api->op_of_name("UNARY:RELU")};
            to.view_src[i] = view ? i - 1 : -1;
            to.view_offs[i] = 0;
            to.flags[i] = 0;
            to.src_begin[i] = i == 0 ? 0 : i - 1;
            to.param_begin[i] = 0;
            if (i > 0) to.src[i - 1] = i - 1, to.slot[i - 1] = 0, to.node[i - 1] = i;
        }
        to.src_begin[n] = n - 1;
        to.param_begin[n] = 0;
        to.leaf[0] = 0;
        return api->graph_finish(handle, error);
    }
};

int64_t arena_of(const gs_api *api, const Graph &graph, gs_error *error) {
    gs_backend_info backend{};
    gs_problem problem{};
    gs_api_plan *plan = nullptr;
    gs_plan view{};
    backend.alignment = 64;
    api->policy_default(&problem.policy);
    problem.n_backends = 1;
    problem.backends = &backend;
    if (api->plan_new(graph.handle, &problem, &plan, error) != GS_OK) return -1;
    api->plan_view(plan, &view);
    const int64_t found = view.arena[0].nbytes;
    api->plan_free(plan);
    return found;
}

}  // namespace

/* Plan from several threads at once, one shared graph and one of each thread's own; how many went wrong. */
extern "C" int work(const gs_api *api, int n_threads, int n_times) {
    gs_error error;
    if (gs_api_check(api, &error) != GS_OK || gs_api_check(nullptr, &error) == GS_OK) return -1;
    Graph shared(api);
    if (shared.fill(200, &error) != GS_OK) return -2;
    const int64_t expected = arena_of(api, shared, &error);
    if (expected != 256) return -3;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; t++) {
        threads.emplace_back([&, t] {
            gs_error mine;
            Graph own(api);
            for (int k = 0; k < n_times; k++) {
                if (arena_of(api, shared, &mine) != expected) wrong++;
                if (own.fill(2 + (t + k) % 60, &mine) != GS_OK || arena_of(api, own, &mine) != expected) wrong++;
                if (api->graph_equal(own.handle, shared.handle)) wrong++;
                /* An error of its own, in the midst. */
                own.fill(5, &mine);
                const int status = api->graph_finish(own.handle, &mine);
                if (status != GS_BAD_ARGUMENT || std::string(mine.message).empty()) wrong++;
            }
        });
    }
    for (auto &thread : threads) thread.join();
    return wrong;
}
"""
DRIVER = """
import ctypes
from ggml_sched import _capi
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
work = ctypes.CDLL("./threads.so").work
work.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
print(work(pointer(_capi.api, b"ggml_sched._capi.api"), 4, 30))
"""


@pytest.mark.parametrize("sanitized", [pytest.param(False, marks=pytest.mark.soak), True])
def test_cpp_plans_from_threads_that_python_does_not_know(tmp_path, sanitized):
    (tmp_path / "threads.cpp").write_text(THREADS)
    options = [*(SANITIZE if sanitized else ["-O2"]), "-Wno-missing-field-initializers", "-pthread"]
    build(tmp_path, "threads.cpp", "threads.so", *options, language="c++")
    assert run(tmp_path, DRIVER, sanitized).stdout == "0\n"


@pytest.mark.soak
def test_the_sanitizers_see_a_graph_written_outside_of_its_arrays(tmp_path):
    """So that the sanitized runs above mean something."""
    inside = "to.leaf[0] = 0;"
    assert inside in THREADS
    (tmp_path / "threads.cpp").write_text(THREADS.replace(inside, f"{inside} to.layout[-1].op = 0;"))
    options = [*SANITIZE, "-Wno-missing-field-initializers", "-pthread"]
    build(tmp_path, "threads.cpp", "threads.so", *options, language="c++")
    assert "heap-buffer-overflow" in run(tmp_path, DRIVER, sanitized=True, expected=1).stderr


# -- Cython -----------------------------------------------------------------------------------------------------

CYTHON = """
# cython: language_level=3
from libc.stdint cimport int64_t
from ggml_sched._c cimport GS_OK, GS_PACK_DEFAULT_BUDGET, GS_PACK_NO_CAPACITY, gs_api, gs_error, gs_import_api
from ggml_sched._c cimport gs_pack_result

cdef const gs_api *api = gs_import_api()


def packed(list rows):
    cdef int64_t[64] lower, upper, size, offsets
    cdef gs_pack_result result
    cdef gs_error error
    cdef int n = len(rows), i, status
    for i in range(n):
        lower[i], upper[i], size[i] = rows[i]
    with nogil:
        status = api.pack(n, lower, upper, size, GS_PACK_NO_CAPACITY, GS_PACK_DEFAULT_BUDGET, offsets, &result, &error)
    if status != GS_OK:
        raise ValueError(error.message.decode())
    found = []
    for i in range(n):
        found.append(offsets[i])
    return found, result.arena
"""


def test_cython_takes_the_declarations_from_the_package(tmp_path):
    pytest.importorskip("Cython")
    (tmp_path / "packs.pyx").write_text(CYTHON)
    assert "warning" not in run_python("-m", "cython", "-3", "packs.pyx", cwd=tmp_path).stderr
    options = ["-std=gnu11", "-O1", "-Wno-pedantic", "-Wno-cast-function-type", "-Wno-missing-field-initializers"]
    build(tmp_path, "packs.c", "packs.so", *options)
    rows = [(0, 4, 100), (2, 9, 60), (4, 9, 100), (5, 6, 1)]
    want = gs.pack(*zip(*rows, strict=True))
    code = f"""
import packs
print(packs.packed({rows}))
try:
    packs.packed([(1, 0, 1)])
except ValueError as error:
    print(error)
"""
    assert run(tmp_path, code).stdout.splitlines() == [
        str((want.offsets.tolist(), int(want.arena))), "a buffer ends before it begins, or has a negative size"]


FAST = """
# cython: language_level=3
from ggml_sched cimport (
    BackendBase, Graph, Tensor, GS_BACKEND_FAILED, GS_NOT_DONE, GS_OK, gs_error, gs_node, gs_op_name, gs_run_nodes,
)
from libc.string cimport memcpy, strcpy


cdef class Fast(BackendBase):
    cdef public int n_runs, n_copies, fails
    cdef public bint python

    cdef int c_compute(self, const gs_run_nodes *run, gs_error *error) noexcept nogil:
        cdef const gs_node *node
        cdef int i, k
        if self.fails:
            strcpy(error.message, b"broken on purpose")
            return GS_BACKEND_FAILED
        if self.python:
            return GS_NOT_DONE
        for i in range(run.n_nodes):
            node = run.nodes[i]
            for k in range(node.layout.nbytes // 4):
                (<float *>node.data)[k] = (<float *>node.src[0].data)[k] + (<float *>node.src[1].data)[k]
        self.n_runs += 1
        return GS_OK

    cdef int c_copy(self, const gs_node *src, const gs_node *dst, BackendBase other, gs_error *error) noexcept nogil:
        memcpy(dst.data, src.data, src.layout.nbytes)
        self.n_copies += 1
        return GS_OK


def bytes_of(Graph graph, Tensor t):
    return graph.flat.n_nodes, t.layout.nbytes
"""
FAST_DRIVER = """
import sys
import numpy as np
import ggml_sched as gs
import fast

class Fast(fast.Fast, gs.CpuBackend):
    def supports_buffer(self, buffer):
        return buffer.backend is self
    def graph_compute(self, graph):
        calls.append("python computes")
        return gs.CpuBackend.graph_compute(self, graph)
    graph_plan_create = lambda self, graph: None

calls = []
one, two = Fast(name="one"), Fast(name="two")
ctx = gs.Context()
x, y = ctx.tensor("f32", 8, "x", input=True), ctx.tensor("f32", 8, "y", input=True)
a = ctx.add(x, y)
b = ctx.add(a, y)
ctx.set_output(b)
graph = gs.Graph(b)
scheduler = gs.Scheduler([one, two])
scheduler.set_tensor_backend(a, one)
scheduler.set_tensor_backend(b, two)
scheduler.alloc(graph)
print(*fast.bytes_of(graph, b))
x.set(np.arange(8, dtype=np.float32)), y.set(np.ones(8, np.float32))
scheduler.compute(graph)
found = []
def profile(frame, event, what):
    if event == "call":
        found.append((frame.f_code.co_filename.rpartition("/")[2], frame.f_code.co_name))
sys.setprofile(profile)
scheduler.compute(graph)
sys.setprofile(None)
outside = ("scheduler.py", "allocation.py", "allocation_cache.py", "pipeline.py", "planner.py")
inside = [call for call in found if call[0] not in outside]
print(("allocation.py", "run") in found, inside, calls, one.n_runs, two.n_runs, one.n_copies + two.n_copies)
print(b.numpy().tolist())
one.fails = 1
try:
    scheduler.compute(graph)
except gs.BackendError as error:
    print(error, *error.__notes__)
one.fails, one.python = 0, True
scheduler.compute(graph)
print(calls, b.numpy().tolist())
"""


def test_a_backend_compiled_with_cython_is_called_without_python(tmp_path):
    pytest.importorskip("Cython")
    (tmp_path / "fast.pyx").write_text(FAST)
    done = run_python("-m", "cython", "-3", "-I", gs.get_cython_path(), "fast.pyx", cwd=tmp_path)
    assert "warning" not in done.stderr
    options = ["-std=gnu11", "-O1", "-Wno-pedantic", "-Wno-cast-function-type", "-Wno-missing-field-initializers",
               "-Wno-unused-parameter"]
    build(tmp_path, "fast.c", "fast.so", *options)
    said = run(tmp_path, FAST_DRIVER).stdout.splitlines()
    sums = [k + 2.0 for k in range(8)]
    assert said[0] == "2 32"
    assert said[1] == "True [] [] 2 2 2"
    assert said[2] == str(sums)
    assert said[3].startswith("backend 'one' failed while computing 1 nodes: broken on purpose backend 'one' was ")
    assert said[4] == f"['python computes'] {sums}"


QUEUED = """
# cython: language_level=3
from ggml_sched cimport BackendBase, GS_NOT_DONE, GS_OK, gs_error, gs_node


cdef class Queued(BackendBase):
    cdef public int n_copies
    cdef public bint from_others, to_others

    cdef int c_copy(self, const gs_node *src, const gs_node *dst, BackendBase other, gs_error *error) noexcept nogil:
        with gil:
            if not (self.from_others if self.holds(<size_t>dst.data) else self.to_others):
                return GS_NOT_DONE
            self.queue_copy(<size_t>dst.data, <size_t>src.data, src.layout.nbytes)
            self.n_copies += 1
        return GS_OK
"""
QUEUED_DRIVER = """
import ctypes
import numpy as np
import ggml_sched as gs
import queued
from ggml_sched.testing.deferred import DeferredBackend, DeferredQueues

class Device(queued.Queued, DeferredBackend):
    def holds(self, address):
        return any(b.base <= address < b.base + b.size for b in self.buffers)
    def alloc_buffer(self, size):
        buffer = DeferredBackend.alloc_buffer(self, size)
        self.buffers.append(buffer)
        return buffer
    def queue_copy(self, to, source, nbytes):
        self.queue.append(lambda: ctypes.memmove(to, source, nbytes))

def sums(seed, copies, from_others, to_others, concurrent):
    queues = DeferredQueues(seed)
    one, two = Device("one", queues, copies=False), Device("two", queues, copies=False)
    for device in (one, two):
        device.buffers, device.from_others, device.to_others = [], from_others, to_others
        device.concurrent_copies = concurrent
    home = gs.Context()
    w = home.tensor("f32", 64, "w")
    one.alloc_tensors(home)
    w.set(np.full(64, 100, np.float32))
    ctx = gs.Context()
    x = ctx.tensor("f32", 64, "x", input=True)
    a = ctx.add(x, x)
    b = ctx.add(a, w)
    c = ctx.set_output(ctx.add(ctx.add(b, b), a))
    found = []
    with gs.Scheduler([one, two], copies=copies) as scheduler:
        for node, device in ((a, one), (b, two), (c, one)):
            scheduler.set_tensor_backend(node, device)
        graph = gs.Graph(c)
        scheduler.alloc(graph)
        for k in range(5):
            x.set(np.full(64, k, np.float32))
            scheduler.compute_async(graph)
            if k % 3 == 2:
                scheduler.synchronize()
                found.append(c.numpy()[0])
        # No step waits for another: the weight's copy is ordered by its queue alone.
        y = gs.Context()
        z = y.tensor("f32", 64, "z", input=True)
        alone = y.set_output(y.add(z, w))
        scheduler.set_tensor_backend(alone, two)
        graph = gs.Graph(alone)
        scheduler.alloc(graph)
        z.set(np.full(64, 7, np.float32))
        scheduler.compute(graph)
        found.append(alone.numpy()[0])
    n = one.n_copies + two.n_copies
    return found, n

for concurrent in (False, True):
    for copies in (1, 2):
        for directions in ((True, False), (False, True), (True, True)):
            for seed in range(6):
                found, n = sums(seed, copies, *directions, concurrent)
                if found != [212, 107] or n < 10:
                    print("wrong", seed, copies, directions, concurrent, found, n)
print("done")
"""


def test_a_compiled_copy_is_work_of_one_queue_which_the_other_waits_for(tmp_path):
    pytest.importorskip("Cython")
    (tmp_path / "queued.pyx").write_text(QUEUED)
    run_python("-m", "cython", "-3", "-I", gs.get_cython_path(), "queued.pyx", cwd=tmp_path)
    options = ["-std=gnu11", "-O1", "-Wno-pedantic", "-Wno-cast-function-type", "-Wno-missing-field-initializers",
               "-Wno-unused-parameter"]
    build(tmp_path, "queued.c", "queued.so", *options)
    assert run(tmp_path, QUEUED_DRIVER).stdout == "done\n"
