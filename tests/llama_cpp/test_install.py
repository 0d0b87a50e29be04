"""The hook is installed before llama.cpp is loaded, raises when it is too late, and changes no token of llama.cpp."""

import importlib.util
import os
import platform
from pathlib import Path

import pytest
from processes import run_python

from ggml_sched.llama.synthetic import random_model

ROOT = Path(__file__).resolve().parents[2]
needs_ggml = pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="needs ggml-python")
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")


def run(code: str, *arguments: str, **environment: str) -> str:
    return run_python(*arguments, *(["-c", code] if code else []), timeout=300, **environment).stdout


def test_importing_installs_the_allocator():
    assert run("import ggml_sched.llama_cpp as h; print(h.installed(), h.plans(), h.last_error())") == "alloc () None\n"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_systems_whose_linker_lets_no_library_stand_before_another_are_refused(system):
    code = f"import sys; sys.platform = {system!r}; import ggml_sched.llama_cpp"
    done = run_python("-c", code, status=1)
    assert f"HookError: llama.cpp on this planner needs the dynamic linker of Linux; this is {system}" in done.stderr


def test_hooking_loads_no_more_of_the_core_than_the_planner():
    """Each module of the core takes a process some 50 kB of memory."""
    code = "import ggml_sched.llama_cpp, sys; print(sorted(m for m in sys.modules if m.startswith('ggml_sched')))"
    not_needed = ("context", "tensor", "graph.graph'", "allocators", "plan_data", "request", "_core'", "backend")
    loaded = run(code)
    assert "ggml_sched.core.plan.make" in loaded and [name for name in not_needed if name in loaded] == []
    assert "False" in run("import ggml_sched.llama_cpp, sys; print('importlib.resources' in sys.modules)")


@needs_llama_cpp
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of glibc")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizers have a malloc of their own")
def test_checking_leaves_malloc_s_threshold_for_mappings():
    """glibc raises the threshold to the largest mapping that was freed; ggml's scheduler then takes heap pages."""
    code = """if True:
        import ctypes, sys
        if sys.argv[1] == "hooked":
            import ggml_sched.llama_cpp
        import llama_cpp

        class Counts(ctypes.Structure):
            _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

        libc = ctypes.CDLL(None)
        libc.mallinfo.restype, libc.malloc.restype = Counts, ctypes.c_void_p
        def is_mapped(nbytes):
            before = libc.mallinfo().hblks
            libc.malloc(ctypes.c_size_t(nbytes))
            return libc.mallinfo().hblks > before
        print(next(kib for kib in range(64, 4096, 16) if is_mapped(kib << 10)))
    """
    assert int(run("", "-c", code, "hooked")) <= max(int(run("", "-c", code, "stock")), 256)


def test_off_leaves_everything_alone_until_it_is_asked_for():
    code = ("import ggml_sched.llama_cpp as h, sys; print(h.installed(), h.counters(), h.served(), h.last_error(), "
            "'ggml_sched.llama_cpp._hook' in sys.modules, h.install('alloc'), h.install('alloc'))")
    assert run(code, GGML_SCHED="off") == "off {} {} None False alloc alloc\n"


def test_nothing_installed_says_what_to_do():
    code = "import ggml_sched.llama_cpp as h\ntry:\n    h.plans()\nexcept h.HookError as e:\n    print(e)"
    assert "install(level=" in run(code, GGML_SCHED="off")


@pytest.mark.parametrize("environment", [{"GGML_SCHED": "everything"}, {"GGML_SCHED": "Alloc"}])
def test_an_unknown_level_is_an_error_that_names_it(environment):
    code = "try:\n    import ggml_sched.llama_cpp\nexcept ValueError as e:\n    print(e)"
    assert f"GGML_SCHED='{environment['GGML_SCHED']}'" in run(code, **environment)


def test_a_level_stays():
    code = ("import ggml_sched.llama_cpp as h\ntry:\n    h.install('off')\nexcept h.HookError as e:\n    print(e)\n"
            "print(h.installed())")
    assert "stays" in run(code) and run(code).endswith("alloc\n")


def test_an_interrupt_of_installing_leaves_it_undone_or_done():
    """Nothing stays taken, the loader's flags are the former ones, and the next call installs."""
    code = """if True:
        import sys
        sys.path.insert(0, sys.argv[1])
        import ggml_sched.llama_cpp as h
        from interrupting import interrupted
        i, flags, at, levels = sys.modules["ggml_sched.llama_cpp.install"], sys.getdlopenflags(), 1, []

        def check():
            n_watches = sum(isinstance(finder, i._Watch) for finder in sys.meta_path)
            assert not i._lock.locked and sys.getdlopenflags() == flags, where
            assert n_watches == 1 or (n_watches, h.installed()) == (0, "off"), where

        while where := interrupted(lambda: h.install("alloc"), at, "llama_cpp/install.py"):
            check()
            if h.installed() != "off":
                break
            at += 1
        assert at > 60 and h.install("alloc") == "alloc" == h.installed(), at
        i.hook().schedule, at = levels.append, 1        # a function in C, in which no signal handler runs
        while where := interrupted(lambda: h.install("sched" if h.installed() == "alloc" else "alloc"), at,
                                   "llama_cpp/install.py"):
            check()
            assert (levels or [False])[-1] == (h.installed() == "sched"), where
            at += 1
        assert at > 20 and len(levels) > 1
    """
    run("", "-c", code, str(ROOT / "tests" / "support"), GGML_SCHED="off")


@needs_ggml
def test_too_late_is_an_import_error_that_names_the_library():
    code = "import ggml\ntry:\n    import ggml_sched.llama_cpp\nexcept ImportError as e:\n    print(e)"
    assert "libggml-base" in run(code) and "loaded already" in run(code)


@needs_ggml
def test_only_ggml_s_names_are_exported():
    code = ("import ggml_sched.llama_cpp, ctypes\nfrom ggml_sched.llama_cpp.install import hook\n"
            "mine = ctypes.CDLL(hook().__file__)\nprint([hasattr(mine, n) for n in "
            "('ggml_gallocr_new', 'gh_read', 'gh_ggml_find', 'gh_known_new')])")
    assert run(code) == "[True, False, False, False]\n"


@needs_ggml
def test_calls_of_a_library_loaded_later_arrive():
    code = ("import ggml_sched.llama_cpp as h\nimport ggml\nprint(h.served()['allocators'])\nh.check()\n"
            "print(h.served()['allocators'])")
    first, second = map(int, run(code, "-W", "error").split())
    assert first >= 1 and second == first + 1, "once when ggml was imported, once more now"


def test_a_check_before_ggml_is_loaded_is_an_error():
    code = "import ggml_sched.llama_cpp as h\ntry:\n    h.check()\nexcept h.HookError as e:\n    print(e)"
    assert "no ggml is loaded yet, so nothing was checked: import llama_cpp" in run(code)


@needs_ggml
def test_calls_that_do_not_arrive_are_an_error_that_says_why():
    """As where a library was linked so that its calls stay inside: here they were bound before we came."""
    code = ("import ggml, ggml_sched.llama_cpp, sys\ni = sys.modules['ggml_sched.llama_cpp.install']\n"
            "bases = i.loaded_bases\ni.loaded_bases = lambda: []\ni.install('alloc')\ni.loaded_bases = bases\n"
            "try:\n    i.check()\nexcept i.HookError as e:\n    print(e)")
    assert "does not call us" in run(code, GGML_SCHED="off")


@needs_ggml
def test_a_library_whose_file_was_replaced_since_is_not_asked(tmp_path):
    code = ("import ctypes, os, shutil, sys\nimport ggml_sched.llama_cpp as h\nfrom importlib.util import find_spec\n"
            "there = find_spec('ggml').submodule_search_locations[0] + '/lib/'\n"
            "for name in ('libggml-base.so', 'libggml-cpu.so'):\n    shutil.copy(there + name, sys.argv[1])\n"
            "    ctypes.CDLL(os.path.join(sys.argv[1], name), mode=os.RTLD_LOCAL | os.RTLD_NOW)\n"
            "h.check()\nbefore = h.served()['allocators']\nshutil.rmtree(sys.argv[1])\nh.check()\n"
            "print(before, h.served()['allocators'])")
    assert run_python("-c", code, str(tmp_path)).stdout == "1 1\n"


@needs_ggml
@needs_llama_cpp
@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_two_ggmls_are_each_understood(level):
    """Which of two a scheduler is of, its backends say: the number of an op is another's in the other."""
    code = """
import ctypes as c, os
from importlib.util import find_spec
import ggml_sched.llama_cpp as h
from ggml_sched.llama_cpp.install import hook
P, S, B, I = c.c_void_p, c.c_size_t, c.c_bool, c.c_int
class Init(c.Structure):
    _fields_ = [("size", S), ("memory", P), ("no_alloc", B)]
ours = c.CDLL(hook().__file__)
for package, end in (("llama_cpp", ".so.0"), ("ggml", ".so")):
    at = find_spec(package).submodule_search_locations[0] + "/lib/libggml-"
    base, cpu = (c.CDLL(at + name + end, mode=os.RTLD_LOCAL | os.RTLD_NOW) for name in ("base", "cpu"))
    def call(library, name, result, types, *values):
        function = getattr(library, "ggml_" + name)
        return c.CFUNCTYPE(result, *types)(c.cast(function, P).value)(*values)
    backend = call(cpu, "backend_cpu_init", P, [])
    made = call(ours, "backend_sched_new", P, [P, P, I, S, B, B], (P * 1)(backend), None, 1, 64, False, False)
    ctx = call(base, "init", P, [Init], Init(1 << 20, None, True))
    graph = call(base, "new_graph_custom", P, [P, S, B], ctx, 64, False)
    x = call(base, "new_tensor_2d", P, [P, I, c.c_int64, c.c_int64], ctx, 0, 16, 16)
    y = call(base, "gelu", P, [P, P], ctx, call(base, "scale", P, [P, P, c.c_float], ctx, x, 2.0))
    call(base, "build_forward_expand", None, [P, P], graph, y)
    assert call(ours, "backend_sched_reserve", B, [P, P], made, graph)
    print([t.op for t in h.plans()[-1].graph.nodes])
"""
    assert run(code, GGML_SCHED=level) == "['SCALE', 'UNARY:GELU']\n" * 2


def test_a_script_runs_hooked_with_its_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom ggml_sched import llama_cpp\n"
                      "print(__name__, llama_cpp.installed(), sys.argv[1:], sys.path[0])\n")
    assert run("", "-m", "ggml_sched.llama_cpp", str(script), "a", "b") == f"__main__ alloc ['a', 'b'] {tmp_path}\n"


def test_a_script_stays_the_main_module_until_the_process_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import atexit, pickle, sys
class Value:
    pass
atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Value()))), __spec__))
print(sys.modules["__main__"].Value is Value, __file__)
if len(sys.argv) > 1:
    sys.exit(3)
""")
    expected = f"True {script}\n<class '__main__.Value'> None\n"
    assert run("", "-m", "ggml_sched.llama_cpp", str(script)) == expected
    assert run_python("-m", "ggml_sched.llama_cpp", str(script), "ends", status=3).stdout == expected


@needs_llama_cpp
@pytest.mark.parametrize("model", sorted((ROOT / "tests/data/models").glob("*.gguf")), ids=lambda path: path.stem)
def test_llama_cpp_gives_the_same_tokens_hooked_in_less_memory(model):
    code = f"""
import ggml_sched.llama_cpp as h
import llama_cpp, itertools
log = []
keep = llama_cpp.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
model = llama_cpp.Llama({str(model)!r}, n_ctx=128, n_batch=32, verbose=False, n_threads=1)
llama_cpp.llama_log_set(keep, None)
print(list(itertools.islice(model.generate(list(range(1, 50)), top_k=1, temp=0.0), 12)))
for plan in h.plans() if h.installed() != "off" else ():
    plan.verify()
model.close()
print(next(line for line in log if "compute buffer" in line).split("is ")[1].split(" MiB")[0])
"""
    stock, hooked = (run(code, GGML_SCHED=level).splitlines() for level in ("off", "alloc"))
    assert stock[0] == hooked[0] and float(hooked[1]) < float(stock[1])


@needs_llama_cpp
@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_memory_is_the_sum_of_the_buffers_of_open_contexts(level):
    run("""
import os
import ggml_sched.llama_cpp as hooked
from llama_cpp import Llama
assert hooked.compute_buffers() == {}
first = Llama(os.environ["MODEL"], n_ctx=256, n_batch=64, verbose=False)
held = hooked.compute_buffers()
assert len(held) == 1 and sum(held.values()) == sum(hooked.plans()[0].buffer_sizes) > 0, held
second = Llama(os.environ["MODEL"], n_ctx=256, n_batch=64, verbose=False)
assert hooked.compute_buffers() == {name: 2 * nbytes for name, nbytes in held.items()}
first.close()
assert hooked.compute_buffers() == held
second.close()
assert hooked.compute_buffers() == {}
""", GGML_SCHED=level, MODEL=str(ROOT / "tests/data/models/tiny-llama-q4_0.gguf"))


@needs_llama_cpp
@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_memory_and_what_is_saved_are_together_stock_s_buffers(level):
    code = """
import os
import ggml_sched.llama_cpp as hooked
import llama_cpp
log = []
keep = llama_cpp.llama_log_callback(lambda level, text, data: log.append(text.decode(errors="replace")))
llama_cpp.llama_log_set(keep, None)
if hooked.installed() != "off":
    hooked.compare()
model = llama_cpp.Llama(os.environ["MODEL"], n_ctx=256, n_batch=64, verbose=False)
if hooked.installed() != "off":
    (name, held), (same, saved) = *hooked.compute_buffers().items(), *hooked.saved().items()
    assert name == same and saved > 0
    print(f"{(held + saved) / 2**20:.4f}")
llama_cpp.llama_log_set(keep, None)
model.close()
print(next(line for line in log if "compute buffer" in line and "matches" in line).split("is ")[1].split(" MiB")[0])
"""
    model = str(ROOT / "tests/data/models/tiny-llama-q4_0.gguf")
    (stock,) = run(code, GGML_SCHED="off", MODEL=model).split()
    total, _ = run(code, GGML_SCHED=level, MODEL=model).split()
    assert total == stock


@needs_llama_cpp
@pytest.mark.parametrize("level", ["alloc", "sched"])
@pytest.mark.parametrize("collects", [True, False])
def test_a_context_that_is_garbage_may_be_freed_while_plans_are_read(level, collects):
    run(f"""
import faulthandler, gc, os
faulthandler.dump_traceback_later(20, exit=True)
import ggml_sched.llama_cpp as hooked
from llama_cpp import Llama
class Owner:
    pass
def garbage():
    model = Llama(os.environ["MODEL"], n_ctx=64, n_batch=32, verbose=False)
    hooked.plans()
    gc.collect()
    owner = Owner()
    owner.itself, owner.model = owner, model
gc.disable()
garbage()
gc.set_threshold(50, 1000, 1000)
if {collects}:
    gc.enable()
assert len(hooked.plans()) == 1
assert gc.isenabled() == {collects}
gc.enable()
gc.collect()
assert hooked.plans() == () and hooked.compute_buffers() == {{}}
""", GGML_SCHED=level, MODEL=str(ROOT / "tests/data/models/tiny-llama-q4_0.gguf"))


@needs_llama_cpp
@pytest.mark.parametrize("level", ["alloc", "sched"])
def test_the_reason_of_a_refusal_is_logged(level, tmp_path):
    """Heads of 80 elements, which are no whole number of blocks of 32."""
    path = tmp_path / "heads.gguf"
    path.write_bytes(random_model("phi2", metadata={"embedding_length": 160, "attention.head_count": 2,
                                                    "attention.head_count_kv": 2, "rope.dimension_count": 32}))
    printed = run("""
import os
import ggml_sched.llama_cpp as hooked
import llama_cpp
log = []
keep = llama_cpp.llama_log_callback(lambda level, text, data: log.append((level, text.decode(errors="replace"))))
llama_cpp.llama_log_set(keep, None)
model = llama_cpp.llama_model_load_from_file(os.environ["MODEL"].encode(), llama_cpp.llama_model_default_params())
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.type_k, params.flash_attn_type = 64, llama_cpp.GGML_TYPE_Q8_0, 0
assert not llama_cpp.llama_init_from_model(model, params)
assert (4, f"ggml_sched: {hooked.last_error()}\\n") in log, log
print(hooked.last_error())
llama_cpp.llama_model_free(model)
""", GGML_SCHED=level, MODEL=str(path))
    assert "(VIEW): layout.ne[0] = 80 is no whole number of blocks" in printed
