"""The example of a backend in a package of its own, built and tested in an environment of its own."""

import os
import shutil
import site
import subprocess
from pathlib import Path

from processes import run_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "array_backend"


def suite_in_new_environment(folder: Path, wheel: Path | None = None, *options: str) -> str:
    """Install the example into a new environment, and run `pytest` as its README says; what that prints.

    `wheel`: ggml-sched's, which is installed, too; None: the ggml-sched that this process uses.  NumPy and pytest are
    those of this process.
    """
    environment, project = folder / "environment", folder / "project"
    run_python("-m", "venv", "--without-pip", str(environment))
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    packages = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], check=True, text=True,
                              capture_output=True).stdout.strip()
    Path(packages, "of_the_tests.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))
    pip = ["-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    if wheel is not None:
        run_python(*pip, str(wheel))
    run_python(*pip, "--no-build-isolation", str(project), timeout=300)
    (project / "array_backend.py").unlink()     # the installed one is tested
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if wheel is not None:
        settings.pop("PYTHONPATH", None)
    done = subprocess.run([python, "-m", "pytest", "-p", "no:cacheprovider", *options], cwd=project, text=True,
                          capture_output=True, timeout=300, env=settings)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
