"""Runs tests of the working tree on an x86-64 processor that Bochs emulates, to execute kernels that this one cannot.

    python tools/emulate.py --kernel VMLINUZ [--cpu MODEL] [--folder FOLDER] -- PYTEST ARGUMENTS

The image that is booted holds a Linux kernel and, as its initial file system, this Python, NumPy, pytest, the package
and its tests, each at its path on this machine.  The first process runs pytest; its output comes over the serial port.
The exit status is pytest's, or 2 where the machine stopped before pytest did.

Needs `bochs` with its `rfb` display, `grub-mkrescue` with GRUB's modules for a BIOS, `ldd`, and an image of any Linux
kernel for x86-64 that has no need of modules for a serial console and an initial file system, as distributions' have.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = ("numpy", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
OF_THE_TREE = ("ggml_sched", "tests", "pyproject.toml")
"""Without setup.py: the tests are those that run with the package, NumPy and pytest alone."""
UNUSED = {"site-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3"}
"""Folders of the standard library that are left out, and of distributions where they hold tests."""
SUFFIXES = (".py", ".pyc", ".pyi", ".so", ".toml", ".json", ".txt", ".npz", ".gguf")
ORACLE = {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR"}
"""Keeps NumPy and its BLAS, on which the oracle runs, off the instructions under test.  Bochs 3.0 refuses a gather of
NumPy's."""
LAST_LINE = re.compile(rb"^pytest: exit status (-?\d+)\s|Kernel panic", re.MULTILINE)

INIT = """#!{python}
import ctypes, os, subprocess, termios

os.environ.update(PATH="/usr/bin:/bin", HOME="/tmp", VIRTUAL_ENV={prefix!r}, {settings})
libc = ctypes.CDLL(None)
for kind, place in ((b"proc", b"/proc"), (b"sysfs", b"/sys"), (b"tmpfs", b"/tmp"), (b"tmpfs", b"/dev/shm")):
    libc.mount(kind, place, kind, 0, None)
done = subprocess.run([{python!r}, "-m", "pytest", *{arguments!r}], cwd={root!r})
if done.returncode < 0:     # what the kernel says of the signal
    log = ctypes.create_string_buffer(1 << 18)
    libc.klogctl(3, log, len(log))
    print(*[line for line in log.value.decode().splitlines() if "trap" in line or "segfault" in line], sep="\\n")
print("pytest: exit status", done.returncode, flush=True)
termios.tcdrain(1)
libc.reboot(0x4321fedc)     # power off
"""

MENU = """serial
terminal_output serial
set timeout=0
menuentry tests {{
    linux /boot/vmlinuz console=ttyS0 loglevel=1 panic=-1 mitigations=off {append} rdinit=/init
    initrd /boot/initrd
}}
"""

MACHINE = """config_interface: textconfig
display_library: rfb, options="timeout=0"
cpu: model={cpu}, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest={megabytes}, host={megabytes}
ata0-master: type=disk, mode=flat, path="{image}"
boot: disk
clock: sync=none
com1: enabled=1, mode=file, dev="{console}"
log: "{log}"
panic: action=fatal
error: action=ignore
info: action=ignore
"""


# -- the initial file system --------------------------------------------------------------------------


def target_of(link: Path) -> Path:
    return Path(os.path.normpath(link.parent / os.readlink(link)))


class Archive:
    """A cpio archive of the format newc, which Linux unpacks as its initial file system."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.names: set[str] = set()

    def entry(self, name: str, mode: int, data: bytes = b"", mtime: int = 0, device: tuple[int, int] = (0, 0)) -> None:
        encoded = name.encode() + b"\0"
        fields = (len(self.names) + 1, mode, 0, 0, 1, mtime, len(data), 0, 0, *device, len(encoded), 0)
        self._padded(b"070701" + b"".join(b"%08x" % field for field in fields) + encoded)
        self._padded(data)
        self.names.add(name)

    def _padded(self, data: bytes) -> None:
        self._stream.write(data + bytes(-len(data) % 4))

    def folder(self, path: Path) -> None:
        """A folder, or a link to one, and those above it."""
        name = str(path).lstrip("/")
        if path == path.parent or name in self.names:
            return
        self.folder(path.parent)
        if path.is_symlink():
            self.entry(name, stat.S_IFLNK | 0o777, os.readlink(path).encode())
            self.folder(target_of(path))
        else:
            self.entry(name, stat.S_IFDIR | 0o755)

    def file(self, path: Path) -> None:
        """A file, or a link and what it leads to."""
        name = str(path).lstrip("/")
        if name in self.names:
            return
        self.folder(path.parent)
        info = path.lstat()
        if path.is_symlink():
            self.entry(name, info.st_mode, os.readlink(path).encode())
            self.file(target_of(path))
        else:   # compiled Python files name the times of their sources
            self.entry(name, info.st_mode, path.read_bytes(), int(info.st_mtime))


def files_below(folder: Path, unused: Iterable[str] = ()) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in unused]
        yield from (Path(place, name) for name in names if name.endswith(SUFFIXES))


def files_of_distribution(name: str) -> Iterator[Path]:
    for file in importlib.metadata.files(name) or ():
        path = Path(file.locate())
        if path.is_file() and ".." not in file.parts and not UNUSED & set(file.parts[:-1]):
            yield path


def files_to_run() -> Iterator[Path]:
    """Python, the distributions and the tree, without the libraries that they are linked with."""
    yield Path(sys.executable)
    yield Path(sys.prefix, "pyvenv.cfg")
    yield from files_below(Path(sysconfig.get_path("stdlib")), UNUSED)
    for name in DISTRIBUTIONS:
        yield from files_of_distribution(name)
    for name in OF_THE_TREE:
        yield from files_below(ROOT / name) if (ROOT / name).is_dir() else (ROOT / name,)


def libraries_of(binaries: list[Path]) -> set[Path]:
    lines = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    return {Path(os.path.normpath(found)) for found in re.findall(r"(?:=> |^\t)(/\S+) \(0x", lines, re.MULTILINE)}


def write_initrd(target: Path, arguments: list[str], settings: dict[str, str]) -> None:
    init = INIT.format(python=sys.executable, prefix=sys.prefix, root=str(ROOT), arguments=arguments,
                       settings=", ".join(f"{name}={value!r}" for name, value in settings.items()))
    with target.open("wb") as stream:
        archive = Archive(stream)
        for name in ("dev/shm", "proc", "sys", "tmp"):
            archive.folder(Path("/", name))
        for name, numbers in {"console": (5, 1), "null": (1, 3), "zero": (1, 5), "urandom": (1, 9)}.items():
            archive.entry(f"dev/{name}", stat.S_IFCHR | 0o666, device=numbers)
        files = [path for path in files_to_run() if path.exists()]
        linked = [path for path in files if path.suffix == ".so" or os.access(path, os.X_OK)]
        for path in (*files, *libraries_of(linked)):
            archive.file(path)
        archive.entry("init", stat.S_IFREG | 0o755, init.encode())
        archive.entry("TRAILER!!!", 0)


# -- the machine --------------------------------------------------------------------------------------


def write_image(folder: Path, kernel: Path, append: str) -> Path:
    (folder / "disk/boot/grub").mkdir(parents=True, exist_ok=True)
    (folder / "disk/boot/grub/grub.cfg").write_text(MENU.format(append=append))
    shutil.copyfile(kernel, folder / "disk/boot/vmlinuz")
    os.replace(folder / "initrd", folder / "disk/boot/initrd")
    image = folder / "image.iso"
    subprocess.run(["grub-mkrescue", "-o", image, folder / "disk"], check=True, capture_output=True)
    return image


def run_machine(bochs: str, folder: Path, image: Path, cpu: str) -> int:
    """Run until the machine is switched off, printing what its serial port sends; pytest's exit status."""
    console = folder / "console.txt"
    console.write_bytes(b"")
    settings = folder / "machine.txt"
    settings.write_text(MACHINE.format(cpu=cpu, image=image, console=console, log=folder / "log.txt", megabytes=1536))
    Path(f"{image}.lock").unlink(missing_ok=True)      # of a machine that was killed
    seen = b""
    is_over = False
    with console.open("rb") as output, subprocess.Popen(
            [bochs, "-q", "-f", settings], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL) as machine:
        try:
            assert machine.stdin is not None
            machine.stdin.write(b"continue\n")     # a Bochs with a debugger waits for it
            machine.stdin.flush()
            while not is_over:
                time.sleep(0.2)
                is_over = machine.poll() is not None or LAST_LINE.search(seen) is not None
                new = output.read()
                sys.stdout.buffer.write(new)
                sys.stdout.flush()
                seen = (seen + new)[-4096:]
        finally:
            machine.kill()
    last = LAST_LINE.search(seen)
    if last and last[1]:
        return int(last[1])
    print(f"the machine stopped: {(folder / 'log.txt').read_text(errors='replace')[-300:]}", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", type=Path, required=True, help="image of a Linux kernel for x86-64")
    parser.add_argument("--bochs", default="bochs", help="the emulator")
    parser.add_argument("--cpu", default="corei7_icelake_u", help="one of `bochs --help cpu`")
    parser.add_argument("--append", default="", help="more parameters of the Linux kernel")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE",
                        help="a variable of the environment")
    parser.add_argument("--folder", type=Path, help="keep the image, the serial port's output and Bochs's log here")
    parser.add_argument("arguments", nargs="*", help="pytest's")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        settings = ORACLE | dict(setting.split("=", 1) for setting in options.set)
        write_initrd(folder / "initrd", options.arguments, settings)
        image = write_image(folder, options.kernel, options.append)
        return run_machine(options.bochs, folder, image, options.cpu)


if __name__ == "__main__":
    sys.exit(main())
