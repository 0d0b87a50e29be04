"""Compiles the extensions of setup.py, and recompiles an object only if its sources, headers or command changed.

setuptools compiles all sources of an extension when one of them, or one of its headers, is newer than the extension.
Here the compiler lists each object's headers in a .d file beside it, and the command is stored, and a digest of what
was read: a file that is newer and has the same content compiles nothing.  Cython translates a module again in each new
environment, whose files are newer, to the same C.  Objects of an editable installation are kept where `build_ext
--inplace` finds them: setuptools has a folder for them that it removes.

setuptools compiles several extensions at once, and the objects of each one after another; here as many objects at once,
of whatever extension, so that a build does not wait for the largest extension alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext


class IncrementalBuild(build_ext):
    """build_ext for compilers that write dependency files (-MMD), with a line for each extension that is done."""

    flags_of: Mapping[str, Sequence[str]] = {}
    """{C source: flags after those of its extension}."""

    @staticmethod
    def translate(extensions: list[Extension]) -> list[Extension]:
        """The extensions with C sources in place of Cython's; setup.py has its own."""
        return extensions

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:
            base = self.get_finalized_command("build").build_base
            self.build_temp = os.path.join(base, f"temp.{self.plat_name}-{sys.implementation.cache_tag}")

    def run(self) -> None:
        """Translate only now: a source distribution, or a package's metadata, needs no C."""
        for extension, translated in zip(self.extensions, self.translate(self.extensions), strict=True):
            assert extension.name == translated.name
            extension.sources = translated.sources
        # The largest first, so that no processor waits for it in the end; the first of all stays where it is.
        self.extensions[1:] = sorted(self.extensions[1:], key=bytes_of_sources, reverse=True)
        super().run()

    def build_extensions(self) -> None:
        self.n_done = 0
        compile_always = self.compiler._compile
        is_forced, self.force = self.force, True    # check each object, even if its extension is newer

        def compile_if_stale(obj, src, ext, cc_args, extra_postargs, pp_opts):
            extra_postargs = [*extra_postargs, *self.flags_of.get(src, ())]
            command = "\n".join(map(str, [src, *cc_args, *extra_postargs, *pp_opts, *self.compiler.compiler_so]))
            if not is_forced and is_fresh(Path(obj), command):
                return
            compile_always(obj, src, ext, cc_args, [*extra_postargs, "-MMD", "-MF", f"{obj}.d"], pp_opts)
            Path(f"{obj}.command").write_text(command, encoding="utf-8")
            Path(f"{obj}.digest").write_text(digest(dependencies(Path(obj))), encoding="utf-8")

        if self.compiler.compiler_type != "unix":
            super().build_extensions()
            return
        with ThreadPoolExecutor(os.cpu_count() if self.parallel is True else self.parallel or 1) as pool:
            self._compile_by(pool, compile_if_stale)
            super().build_extensions()

    def _compile_by(self, pool: ThreadPoolExecutor, compile_one: Callable[..., None]) -> None:
        """Let the compiler, which is called by a thread for each extension, compile objects by the threads of a
        pool."""
        compile_sources, caller = self.compiler.compile, threading.local()

        def compile_all(*args, **kwargs):
            caller.under_way = []
            objects = compile_sources(*args, **kwargs)
            for task in caller.under_way:
                task.result()
            return objects

        self.compiler.compile = compile_all
        self.compiler._compile = lambda *args: caller.under_way.append(pool.submit(compile_one, *args))

    def build_extension(self, ext) -> None:
        super().build_extension(ext)
        self.n_done += 1
        print(f"[{self.n_done}/{len(self.extensions)}] {ext.name}", flush=True)


def bytes_of_sources(extension: Extension) -> int:
    return sum(Path(source).stat().st_size for source in extension.sources)


def is_fresh(obj: Path, command: str) -> bool:
    """Whether an object was made by this command, of files with the content of those that its .d file names."""
    try:
        if Path(f"{obj}.command").read_text(encoding="utf-8") != command:
            return False
        names = dependencies(obj)
        made = obj.stat().st_mtime_ns
        if not names or all(Path(name).stat().st_mtime_ns < made for name in names):
            return bool(names)
        return Path(f"{obj}.digest").read_text(encoding="utf-8") == digest(names)
    except OSError:
        return False


def dependencies(obj: Path) -> list[str]:
    """The files that an object was made of, as its .d file names them: "object: source header ...", long lines
    continued by a backslash."""
    return Path(f"{obj}.d").read_text(encoding="utf-8").replace("\\\n", " ").split()[1:]


def digest(names: Sequence[str]) -> str:
    """A digest of the contents of files."""
    total = sha256()
    for name in names:
        total.update(sha256(Path(name).read_bytes()).digest())
    return total.hexdigest()


@contextlib.contextmanager
def captured_output() -> Iterator[list[str]]:
    """Collects the output of this process and its children in a list, and prints it at the end."""
    said: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield said
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            os.close(kept[0])
            os.close(kept[1])
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
            sys.stderr.write(said[0])
