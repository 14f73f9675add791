# SPDX-License-Identifier: Apache-2.0
"""Projects of others, federated without touching them: every script in examples/projects.

``make test-projects`` runs these cases with the packages and versions that each script needs. Cases of projects whose
packages are not installed are skipped.
"""

import importlib
import os
import re
import warnings

import project_runs
import pytest
from project_facts import PROJECTS, Facts
from project_runs import Few, changes, checkpoint, federated_fit, plain, plain_fit, source, unequal

import fl_lightning as fl

SCRIPTS = sorted(p.stem for p in project_runs.PROJECTS.glob("*.py") if "import fl_lightning" in p.read_text())
TREE = os.environ.get("FL_LIGHTNING_TREE", "lightning.pytorch")
each_project = pytest.mark.parametrize("name", SCRIPTS)
EPOCHS = 2


@each_project
def test_three_lines(name):
    text = source(name)
    assert 1 <= changes(text).count("\n+") + changes(text).startswith("+") <= 3
    before = plain(text)
    compile(before, name, "exec")
    assert re.findall(r"\bfl\.|fl_lightning|ederated", before) == []


def test_every_project_has_facts_and_versions():
    assert list(PROJECTS) == SCRIPTS
    files = (project_runs.PROJECTS / "requirements").glob("*.txt")
    assert sorted(file.stem for file in files) == SCRIPTS
    readme = (project_runs.PROJECTS / "README.md").read_text()
    assert [name for name in SCRIPTS if f"[{name}.py]({name}.py)" not in readme] == []
    assert changes(source("boring")) in readme


def test_the_page_has_a_row_with_the_version_of_each_project():
    page = (project_runs.PROJECTS.parents[1] / "docs" / "projects.md").read_text()
    for name in SCRIPTS:
        (row,) = (line for line in page.splitlines() if line.startswith(f"| [{name}](../examples/projects/{name}.py)"))
        pins = (project_runs.PROJECTS / "requirements" / f"{name}.txt").read_text().splitlines()[1:]
        assert any(pin.replace("==", " ") in row for pin in pins) or "| lightning " in row
        added = changes(source(name))
        assert row.split("|")[4].strip() == str(added.count("\n+") + added.startswith("+"))


@pytest.fixture
def facts(name, monkeypatch, tmp_path) -> Facts:
    """Skips projects that cannot run here."""
    found = PROJECTS[name]
    if found.tree != TREE:
        pytest.skip(f"{name} needs FL_LIGHTNING_TREE={found.tree}, see make test-projects")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a project's warnings are its own business
        pytest.importorskip(found.package)
        monkeypatch.syspath_prepend(str(project_runs.PROJECTS))
        monkeypatch.chdir(tmp_path)
        importlib.import_module(name)
        yield found


def unequal_numbers(before: dict, now: dict, without: list[str]) -> list[str]:
    """Logged values that are not the same, NaN like NaN, as ``epoch name: here, there``.

    What a step logs reaches loggers once per visit, and once per ``log_every_n_steps`` without a federation.
    """
    left_out = re.compile("|".join([r"^fed/", r"^epoch$", *without]))
    keys = sorted(key for key in {*before, *now} if not left_out.search(key[1]))
    lists = [(key, list(map(str, before.get(key, []))), list(map(str, now.get(key, [])))) for key in keys]
    return [f"{key[0]} {key[1]}: {a}, {b}" for key, a, b in lists if a != b and not (b and within(b, a))]


def within(some: list[str], more: list[str]) -> bool:
    """Whether the values stand among the others, in the same order; equal numbers of them must be equal."""
    rest = iter(more)
    return len(some) < len(more) and all(value in rest for value in some)


@each_project
def test_one_client_is_the_project_as_it_was(name, facts, tmp_path):
    before = plain_fit(name, facts.tree, tmp_path / "before", EPOCHS)
    now = federated_fit(name, facts.tree, tmp_path / "now", EPOCHS, partition=fl.data.IID(1))
    assert not isinstance(before.trainer.strategy, fl.FederatedStrategy)
    assert isinstance(now.trainer.strategy, fl.FederatedStrategy)
    assert before.trainer.global_step == now.trainer.global_step > 0
    if "weights" not in facts.differs:
        assert unequal(before.weights, now.weights) == []
    assert unequal_numbers(before.logged, now.logged, [key for key in facts.differs if key != "weights"]) == []
    assert before.rates == now.rates
    assert before.final == now.final
    assert bool(before.trainer.lr_scheduler_configs) == (facts.schedule is not None)


@each_project
def test_federated_resumed_and_in_parallel(name, facts, tmp_path):
    fit = federated_fit(name, facts.tree, tmp_path / "whole", EPOCHS)
    strategy = fit.trainer.strategy
    assert strategy.last_round.round == EPOCHS * facts.rounds - 1
    assert len(strategy.last_round.client_ids) > 1
    assert strategy.executor_fallback is None
    for metric in facts.evaluated:
        assert len(fit.evaluation.values[metric]) > 1
    for metric, words in facts.undefined.items():
        assert any(words in reason for reason in fit.evaluation.undefined[metric].values())
    if facts.resumes:
        whole, rest = checkpoint(tmp_path / "whole", 0), tmp_path / "rest"
        resumed = federated_fit(name, facts.tree, rest, EPOCHS, resume=whole)
        assert unequal(fit.weights, resumed.weights) == []
        assert resumed.trainer.global_step == fit.trainer.global_step
    parallel = federated_fit(name, facts.tree, tmp_path / "two", EPOCHS, executor=fl.executors.Parallel(2))
    assert unequal(fit.weights, parallel.weights) == []
    assert parallel.trainer.strategy.executor_fallback == facts.sequential


@pytest.mark.parametrize("name", [name for name, facts in PROJECTS.items() if facts.schedule is not None])
def test_many_clients_follow_the_schedule(name, facts, tmp_path, record_property):
    """VisitRecorder of three steps have the learning rates of plain Lightning's epochs of three steps."""
    before = plain_fit(name, facts.tree, tmp_path / "before", EPOCHS, limit_train_batches=3)
    options = {"clients_per_round": 3, "local_steps": 3}
    now = federated_fit(name, facts.tree, tmp_path / "now", EPOCHS, partition=Few(), **options)
    rounds = EPOCHS * facts.rounds
    steps = len(before.rates) // rounds
    assert now.rates == [rate for r in range(rounds) for rate in before.rates[r * steps : (r + 1) * steps] * 3]
    assert before.final == now.final
    ends = [before.rates[0][0], before.rates[steps - 1][0], before.rates[-1][0], before.final[0][0]]
    record_property("rates", f"{facts.schedule:36}" + ", ".join(f"{rate:.3g}" for rate in ends))
