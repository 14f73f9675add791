# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning flower-app``, which needs no Flower."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from copies import ran

from fl_lightning.__main__ import main
from fl_lightning.federation.flower_template import SOURCES

FILES = {"README.md", "client_app.py", "pyproject.toml", "server_app.py", "simulate.py", "task.py"}


@pytest.mark.parametrize("place", ["fair-sites", "new/fair-sites", "."])
def test_it_writes_an_app(tmp_path, capsys, monkeypatch, place):
    folder = given = tmp_path / place
    if place == ".":  # an empty folder, from within
        folder, given = tmp_path / "fair-sites", Path()
        folder.mkdir()
        monkeypatch.chdir(folder)
    assert main(["flower-app", str(given)]) == 0
    assert {path.name for path in folder.iterdir()} == FILES
    assert str(given / "task.py") in capsys.readouterr().out
    for path in folder.iterdir():
        text = path.read_text()
        assert "APP_NAME" not in text
        if path.suffix == ".py":
            ast.parse(text)
    assert 'name = "fair-sites"' in (folder / "pyproject.toml").read_text()


def test_its_files_are_linted_like_others(tmp_path):
    ruff = pytest.importorskip("ruff")
    main(["flower-app", str(tmp_path / "app")])
    rules = ["--isolated", "--line-length", "120", "--target-version", "py310"]
    for command in (["check", *rules], ["format", "--check", *rules]):
        done = subprocess.run(
            [ruff.find_ruff_bin(), *command, "."], cwd=tmp_path / "app", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
def test_its_simulation_runs(tmp_path):
    main(["flower-app", str(tmp_path / "app")])
    said = ran("simulate.py", "--rounds", "2", cwd=tmp_path / "app")
    assert said.splitlines()[-1].startswith("digest of the weights: ")


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["a", "b"], 2), (["--force"], 2), (["--help"], 0)])
def test_its_command_line(capsys, arguments, status):
    assert main(["flower-app", *arguments]) == status
    said = capsys.readouterr()
    assert "usage: python -m fl_lightning flower-app DIR" in (said.err if status else said.out)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").touch()
    assert main(["flower-app", str(folder)]) == 1
    assert "must be a new or an empty folder" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert main(["flower-app", str(folder / "file")]) == 1
    assert "must be a new or an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["My app", "4sites", "a" * 33, "site_1"])
def test_names_that_flower_does_not_take_are_refused(tmp_path, capsys, name):
    assert main(["flower-app", str(tmp_path / name)]) == 1
    assert f"because Flower takes it for the name of the app, found {name!r}" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_missing_flower_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.delitem(sys.modules, "fl_lightning.federation.flower", raising=False)
    with pytest.raises(ImportError, match=r"needs Flower: pip install '\.\[flower\]' in a checkout"):
        import fl_lightning.federation.flower  # noqa: F401

    assert {path.name.removesuffix(".txt") for path in SOURCES.iterdir()} == FILES
