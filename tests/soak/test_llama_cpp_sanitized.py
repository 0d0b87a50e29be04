"""The load of test_llama_cpp.py with our side of it under the sanitizers: llama.cpp's own libraries are as installed.

The sanitizer allocates all memory, so that it detects our accesses out of bounds, our uses of memory that ggml freed,
and our memory that is unreachable when the process ends.
"""

import importlib.util
import subprocess
import sys

import pytest
from llama_cpp_cases import CASES, LEVELS, Runner
from sanitizers import leaks, sanitized, sanitizing

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python"),
]
HOW = {"leaks": True, "runtimes": ("asan", "ubsan", "stdc++")}
"""C++ exceptions are the sanitizer's business too: it looks for theirs when it starts."""
OURS = ("ggml_sched/", "_hook.", "_capi.", "_core.", "_graph.", "_locks.", "_steps.")
"""In reports of leaks: our files."""
ACTS = [["generated", {"count": 2000, "sizes": [256, 512]}], ["opened", {"count": 60}], ["in_threads", {"count": 200}],
        ["restored", {"rounds": 6}], ["switched", {"rounds": 6}], ["interrupted", {"rounds": 10}],
        ["wandered", {"seeds": 12}]]
CANARY = """
#include <stdlib.h>
void *kept(size_t n) { return malloc(n); }
"""


@pytest.fixture(scope="module")
def runner(sanitized_tree, tmp_path_factory) -> Runner:
    return Runner(tmp_path_factory.mktemp("llama_cpp_sanitized"), sanitized_tree, **sanitizing(**HOW))


def test_a_leak_would_be_seen(sanitized_tree):
    source, library = sanitized_tree / "kept.c", sanitized_tree / "kept.so"
    source.write_text(CANARY)
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-fsanitize=address", "-o", str(library), str(source)], check=True,
                   capture_output=True)
    done = sanitized([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(library)!r}).kept(777)"], sanitized_tree,
                     **HOW)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(leaks(done.stderr, "kept.")) == 1 and "777 byte" in leaks(done.stderr, "kept.")[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_load_touches_nothing_that_it_should_not_and_leaks_nothing(runner, case, level):
    refusing = [["refused", {"most": 8}]] if case.devices else []
    runner.compare(level, case, [*ACTS, *refusing])
    # Whatever is found beside leaks ends a process at once, so that an act would be missing, too.
    assert "ERROR: AddressSanitizer" not in runner.stderr and "runtime error" not in runner.stderr
    assert leaks(runner.stderr, *OURS) == []
