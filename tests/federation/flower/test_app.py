# SPDX-License-Identifier: Apache-2.0
"""The example with an app for Flower: simulated and behind messages, with the same weights."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
import tomli
from flwr.app import Context, RecordDict
from in_process import InProcess

EXAMPLE = Path(__file__).parents[3] / "examples" / "flower_app"
PARTS = ("task", "simulate", "server_app", "client_app")


@pytest.fixture
def app(tmp_path, monkeypatch):
    """The app's modules."""
    shutil.copytree(EXAMPLE, tmp_path / "my-app", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(str(tmp_path / "my-app"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in PARTS:
        sys.modules.pop(name, None)
    yield {name: importlib.import_module(name) for name in PARTS}
    for name in PARTS:
        sys.modules.pop(name, None)


def test_the_app_gives_the_weights_of_its_simulation(tmp_path, app, capsys):
    project = tomli.loads((tmp_path / "my-app" / "pyproject.toml").read_text())
    settings = project["tool"]["flwr"]["app"]
    assert settings["components"] == {"serverapp": "server_app:app", "clientapp": "client_app:app"}
    sites = app["task"].SITES
    grid = InProcess(
        dict.fromkeys(range(10, 10 + sites), app["client_app"].app), {10 + k: {"client-id": k} for k in range(sites)}
    )
    context = Context(7, 1, {}, RecordDict(), {**settings["config"], "rounds": 3})
    app["server_app"].app(grid, context)
    said = capsys.readouterr().out
    assert f"digest of the weights: {app['task'].digest(app['simulate'].main(3))}" in said
    assert (tmp_path / "four-sites-run" / "last.ckpt").exists()
    assert list((tmp_path / "four-sites-run" / "logs").rglob("metrics.csv"))


def test_flower_builds_the_app(tmp_path, app):
    command = [sys.executable, "-c", "import sys; from flwr.cli.app import app; sys.argv[0] = 'flwr'; app()", "build"]
    done = subprocess.run(
        command, cwd=tmp_path / "my-app", capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "my-app").glob("*.fab"))
