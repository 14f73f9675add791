# SPDX-License-Identifier: Apache-2.0
"""The set-up of the Makefile, with a Python that writes down what it is asked for."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = """#!/bin/sh
echo "base $*" >>calls
if [ "$1" = -m ] && [ "$2" = venv ]; then
  for folder; do :; done
  rm -rf "$folder" && mkdir -p "$folder/bin" && cp whole "$folder/bin/python"
fi
"""
WHOLE = """#!/bin/sh
echo "venv $*" >>calls
"""
WITHOUT_PIP = """#!/bin/sh
case "$*" in *pip*) echo "No module named pip" >&2; exit 1;; esac
"""


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def project(tmp_path):
    """The Makefile alone."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    script(tmp_path / "base", BASE)
    script(tmp_path / "whole", WHOLE)
    return tmp_path


def set_up(project):
    """The calls of a set-up, made by the base Python or by that of the environment."""
    (project / "calls").unlink(missing_ok=True)
    command = ["make", ".venv/.ready", "PYTHON=./base"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project / ".venv" / ".ready").exists()
    return [call for call in (project / "calls").read_text().splitlines() if not call.startswith("base -c")]


MADE = "base -m venv --clear .venv"
INSTALLED = "venv -m pip install --progress-bar off -e .[test,lint,mutants]"


@pytest.mark.parametrize("state", ["nothing", "a folder", "without pip", "a dead link"])
def test_an_environment_that_is_not_whole_is_made_anew(project, state):
    python = project / ".venv" / "bin" / "python"
    if state != "nothing":
        python.parent.mkdir(parents=True)
    if state == "without pip":
        script(python, WITHOUT_PIP)
    if state == "a dead link":
        python.symlink_to("/nowhere/python3")
    assert set_up(project) == [MADE, INSTALLED]


def test_a_whole_environment_is_kept(project):
    assert set_up(project) == [MADE, INSTALLED]
    (project / ".venv" / ".ready").unlink()
    (project / ".venv" / "of mine").touch()
    assert set_up(project) == ["venv -m pip --version", INSTALLED]
    assert (project / ".venv" / "of mine").exists()
