"""The command that installs a missing extra installs the packages of pyproject.toml."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from apex.runtime.optional_imports import EXTRAS, remedy

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_are_those_of_the_project(extra):
    needed = PROJECT["optional-dependencies"][extra]
    assert EXTRAS[extra] == tuple(re.match(r"[\w\[\]-]+", requirement)[0] for requirement in needed)


def test_the_remedy_names_this_interpreter_and_published_packages(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert remedy("export") == f"{sys.executable} -m pip install onnx onnxruntime"
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/.venv/bin/python")
    assert remedy("aws") == ".venv/bin/python -m pip install boto3"
    assert not any(PROJECT["name"] in remedy(extra) for extra in EXTRAS)
