"""The C++ of docs/embedding.md and the Cython of docs/cython-api.md compile and do what the pages say."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from processes import run_python

import ggml_sched as gs

DOCS = Path(__file__).resolve().parents[2] / "docs"
if not DOCS.exists():
    pytest.skip("the working tree is needed", allow_module_level=True)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)


def compile_shared(folder: Path, compiler: str, *arguments: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    done = subprocess.run([compiler, "-shared", "-fPIC", f"-I{gs.get_include()}", *arguments], cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_planner_in_cpp_plans_as_python_does(tmp_path):
    (tmp_path / "planner.cpp").write_text(*blocks("embedding.md", "cpp"))
    strict = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    compile_shared(tmp_path, "g++", *strict, "planner.cpp", "-o", "planner.so")
    (caller,) = (code for code in blocks("embedding.md", "py") if "plan_block" in code)
    said = run_python("-c", caller, cwd=tmp_path).stdout

    device, host = gs.DryBackend("device", 64), gs.DryBackend("host", 64)
    weights, ctx = gs.Context(), gs.Context()
    up, down = weights.tensor("q4_0", (64, 256)), weights.tensor("q4_0", (256, 64))
    device.alloc_tensors(weights)
    x = ctx.tensor("f32", (64, 8), input=True)
    y = ctx.set_output(ctx.add(ctx.mul_mat(down, ctx.silu(ctx.mul_mat(up, x))), x))
    with gs.Scheduler([device, host]) as scheduler:
        plan = scheduler.plan(gs.Graph(y))
    index = plan.backends.index(plan.backend_of(y))
    assert said == f"0 {list(plan.buffer_sizes)} {index} {plan.offset_of(y)}\n"


USE = '''
import answers, counter
import ggml_sched as gs

ctx = gs.Context()
x = ctx.tensor("f32", 64)
y = ctx.relu(ctx.add(x, x))
assert counter.bytes_of(gs.Graph(y)) == 512


class MyBackend(answers.Answers, gs.DryBackend):
    """That of the page."""


with gs.Scheduler([MyBackend("mine"), gs.DryBackend("host")]) as scheduler:
    plan = scheduler.plan(gs.Graph(y))
    print([plan.backend_of(node).name for node in plan.graph.nodes])
'''


def test_the_cython_of_the_page_compiles_against_the_package(tmp_path):
    pytest.importorskip("Cython")
    for name, code in zip(("counter", "answers"), blocks("cython-api.md", "cython"), strict=True):
        (tmp_path / f"{name}.pyx").write_text(code)
        run_python("-m", "cython", f"{name}.pyx", cwd=tmp_path)
        python = f"-isystem{sysconfig.get_path('include')}"
        compile_shared(tmp_path, "gcc", "-O0", python, f"{name}.c", "-o", f"{name}.so")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    assert run_python("-c", USE, PYTHONPATH=path).stdout == "['mine', 'host']\n"
