# SPDX-License-Identifier: Apache-2.0
"""The leaderboard on a little noise in place of real data: run, packed, gone on with, and reported."""

import json
import re
from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.leaderboard import __main__ as program
from benchmarks.leaderboard import data, suites
from benchmarks.leaderboard.bootstrap import difference, mean, worst_tenth
from benchmarks.leaderboard.learners import Learner, PeopleLearner
from benchmarks.leaderboard.methods import REFERENCE, TELLING, UNIFORM, all_methods, with_groups
from benchmarks.leaderboard.ranking import HeldAUROC
from benchmarks.leaderboard.records import failed, finished, pack, packed, packed_file, unpack
from benchmarks.leaderboard.report import rewritten
from benchmarks.leaderboard.standing import Standing, pace
from benchmarks.leaderboard.suites import RATES, SUITES, Suite, suite
from benchmarks.leaderboard.traffic import measured
from fl_lightning.comparison.fitted import read_fitted
from fl_lightning.metrics import DemographicParity

METHODS = (REFERENCE, UNIFORM, "FedLF")


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def blobs(size, seed):
    labels = torch.arange(size) % 3
    noise = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(noise + 2 * torch.eye(6)[labels], labels)


def federate(root):
    return fl.FederatedDataModule(
        blobs(180, 0), fl.data.Dirichlet(4, 1.0), test=blobs(90, 1), batch_size=10, holdout=1 / 6
    )


def methods():
    every = all_methods(3, 2)
    return {name: every[name] for name in METHODS}


class Small(Learner):
    def __init__(self, network, rounds, lr):
        if lr == 1.0:
            raise ValueError("too fast")
        super().__init__(network, rounds, lr, 3)


TINY = Suite("tiny", "A little noise", 2, Small, network, federate, methods, "four clients")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "SUITES", (TINY,))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- tiny -->\nold\n<!-- end of tiny -->\nAfter.\n")
    return tmp_path


def call(command, folder, out="out", *more):
    given = [command, "tiny", "--out", str(folder / out), *more]
    given += ["--data-root", str(folder)] if command in ("run", "traffic") else []
    given += ["--page", str(folder / "page.md")] if command == "report" else []
    program.main(given)


def shown(folder, out):
    """The tables but for the seconds."""
    call("report", folder, out)
    text = (folder / "page.md").read_text()
    text = re.sub(r"They took .* of one core", "", text)
    return [
        line.split(" | ")[:2] if "never" in line or len(line.split(" | ")) == 6 else line for line in text.split("\n")
    ]


@pytest.mark.fit
def test_a_suite_runs_is_packed_and_goes_on_elsewhere(tiny, capsys):
    call("run", tiny, "out", "--dry-run")
    said = capsys.readouterr().err
    assert "3 methods x (4 learning rates x 1 seed, 2 seeds more with the picked one) = 18 runs, of which 0" in said
    call("run", tiny, "out", "--seeds", "1")
    call("pack", tiny)
    assert "9 runs in" in capsys.readouterr().out
    (tiny / "elsewhere").mkdir()
    packed_file(tiny / "out" / "tiny").rename(tiny / "elsewhere" / "tiny.jsonl.xz")
    call("report", tiny, "elsewhere")
    assert "9 of 18 runs are finished; 3 failed." in (tiny / "page.md").read_text()
    assert set(failed(tiny / "elsewhere" / "tiny").values()) == {"ValueError: too fast"}
    call("run", tiny, "elsewhere")
    assert "18 runs, of which 9 are finished" in capsys.readouterr().err
    call("run", tiny, "out")
    whole = shown(tiny, "out")
    assert shown(tiny, "elsewhere") == whole
    assert "Four clients. 2 rounds; complete; 3 failed." in "\n".join(map(str, whole))
    call("pack", tiny, "elsewhere")
    for path in (tiny / "elsewhere" / "tiny" / "runs").glob("*"):
        path.unlink()
    assert shown(tiny, "elsewhere") == whole, "from the packed file alone"


@pytest.mark.fit
def test_what_is_packed_is_what_the_tables_need(tiny):
    call("run", tiny, "out", "--seeds", "1")
    folder = tiny / "out" / "tiny"
    before = Standing(TINY, finished(folder), failed(folder)).rows()
    pack(folder)
    runs = packed(folder)
    path = next((folder / "runs").glob("FedLF*"))
    record, kept = read_fitted(path).record, runs[path.stem].record
    assert record.weights is not None
    assert kept.weights is None
    assert kept.last_values("test").values["test_acc"] == record.last_values("test").values["test_acc"]
    assert len(json.dumps(kept, default=vars)) < len(path.read_text())
    path.unlink()
    unpack(folder)
    assert read_fitted(path).record == kept
    after = Standing(TINY, finished(folder), failed(folder)).rows()
    for one, other in zip(before, after, strict=True):
        assert replace(one.accuracy, seconds=0) == replace(other.accuracy, seconds=0)
        assert one.rounds == other.rounds or isnan(one.rounds)
        assert one.differences == other.differences
    assert before[0].differences == {}
    assert set(before[1].differences) == {(m, k) for m in ("accuracy", "auroc") for k in ("mean", "worst 10 %")}
    assert Standing(TINY, {}, {}).rows() == []
    assert Standing(TINY, {}, {}).missing == list(METHODS)


def test_the_bootstrap_finds_a_known_interval():
    generator = np.random.default_rng(5)
    reference = generator.normal(0.7, 0.2, (1, 400))
    ours = reference + generator.normal(0.05, 0.1, (1, 400))
    found = difference(ours, reference, mean, draws=4000)
    gain = (ours - reference).ravel()
    width = 1.96 * gain.std() / 20  # the normal interval of a mean of 400
    assert found.difference == pytest.approx(gain.mean())
    assert found.low == pytest.approx(gain.mean() - width, abs=0.002)
    assert found.high == pytest.approx(gain.mean() + width, abs=0.002)
    assert not found.is_noise
    assert difference(ours, reference, mean) == difference(ours, reference, mean), "seeded"
    assert difference(reference, reference, worst_tenth) == (0.0, 0.0, 0.0), "paired"
    assert difference(reference, reference, mean).is_noise


def test_the_bootstrap_draws_seeds_as_well():
    reference = np.zeros((3, 50))
    ours = reference + np.array([[-0.1], [0.0], [0.4]])  # the seeds disagree, and clients say nothing
    found = difference(ours, reference, mean)
    assert found.difference == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(-0.1, abs=0.04), pytest.approx(0.4, abs=0.04))


def test_clients_without_a_value_are_left_out_and_misfits_refused():
    reference = np.array([[0.5, nan, 0.5, 0.5]])
    ours = np.array([[0.7, 0.9, nan, 0.7]])
    assert difference(ours, reference, mean).difference == pytest.approx(0.2)
    with pytest.raises(ValueError, match="must have all its values"):
        difference(reference, reference * nan, mean)
    with pytest.raises(ValueError, match="must be"):
        difference(ours, reference[:, :2], mean)


def test_the_worst_tenth_is_that_of_the_summary():
    values = np.random.default_rng(0).random((2, 37))
    expected = [fl.metrics.functional.worst_fraction(torch.tensor(row), 0.1) for row in values]
    assert worst_tenth(values) == pytest.approx(float(sum(expected)) / 2)


def test_auroc_counts_the_classes_that_a_client_has():
    logits = torch.tensor([[3.0, 1, 0], [2, 3, 0], [0, 2, 0], [1, 0, 9]])
    metric = HeldAUROC()
    metric.update(logits[:2], torch.tensor([0, 0]))
    assert isnan(metric.compute())
    metric.update(logits[2:], torch.tensor([1, 0]))
    scores = logits.softmax(1)
    first = float((scores[[0, 1, 3], 0] > scores[2, 0]).float().mean())
    second = float((scores[2, 1] > scores[[0, 1, 3], 1]).float().mean())
    metric = HeldAUROC()
    metric.update(logits, torch.tensor([0, 0, 1, 0]))
    assert metric.compute() == pytest.approx((first + second) / 2)
    binary = HeldAUROC()
    binary.update(torch.tensor([[0.0, 1], [0, 3], [0, 2]]), torch.tensor([0, 1, 0]))
    assert binary.compute() == 1.0


@pytest.mark.fit
def test_every_method_trains_a_round_and_has_traffic():
    dataset = federate(None).data.train_dataloader().dataset
    bytes_up = {}
    for name, strategy in all_methods(3, 1.0).items():
        bytes_up[name] = measured(strategy, TINY.learner, dataset)
    row, numbers = 4 * sum(p.numel() for p in network().parameters()), 300  # among them what the schedule remembers
    assert row < bytes_up[REFERENCE].up < row + numbers
    assert row < bytes_up[REFERENCE].down < row + numbers
    assert bytes_up["SCAFFOLD"].up == bytes_up[REFERENCE].up + row
    assert bytes_up["FedMDFG"].down >= bytes_up[REFERENCE].down + row, "it asks again"
    assert bytes_up["FedPer"].up == bytes_up[REFERENCE].up, "what stays at the client is sent as zeros"
    assert set(TELLING) <= set(bytes_up)


@pytest.mark.fit
def test_people_have_groups():
    module = PeopleLearner(_binary, 1, 0.1)
    people = blobs(120, 0).tensors
    labels, groups = (people[1] == 1).long(), torch.arange(120) % 2
    dataset = TensorDataset(people[0], labels, groups)
    dm = fl.FederatedDataModule(dataset, fl.data.IID(3), labels=labels, test=dataset, batch_size=20, holdout=0.2)
    for strategy in with_groups(2).values():
        trainer = fl_trainer(strategy)
        trainer.fit(module, dm)
        (found,) = trainer.test(module, dm, verbose=False)
        record = strategy.last_evaluation
        assert set(record.values) >= {"test_acc", "test_auroc", "test_dp_gap", "test_odds_gap"}
    parity = DemographicParity()
    parity.update(module(people[0]).argmax(1), groups)
    assert found["test_dp_gap"] == pytest.approx(float(parity.compute()), abs=1e-6)


def _binary():
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


def fl_trainer(strategy):
    import lightning as L

    return L.Trainer(
        max_epochs=1, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def test_adult_is_divided_by_age(tmp_path):
    row = "{}, Private, 1, Bachelors, 13, Never-married, Sales, Husband, White, {}, 0, 0, 40, Cuba, {}"
    ages = [17, 24, 25, 29, 30, 64, 65, 90] * 3
    lines = [row.format(age, ("Male", "Female")[k % 2], (">50K", "<=50K")[k % 3 == 0]) for k, age in enumerate(ages)]
    (tmp_path / "Adult").mkdir()
    for name in ("adult.data", "adult.test"):
        (tmp_path / "Adult" / name).write_text("\n".join(lines) + "\n")
    dm = data.people(tmp_path)
    assert sorted(dm.client_names) == ["17-24", "25-29", "30-34", "60-64", "65+"]
    assert set(dm.test_dataloader().sizes.tolist()) == {3, 6}
    (inputs, _, groups), _ = next(dm.train_dataloader().batches(0, seed=None))
    assert inputs.shape[1] == 97
    assert inputs.sum(1).tolist() == [7.0] * len(inputs)
    assert set(groups.tolist()) <= {0, 1}


def test_domains_share_nothing(monkeypatch, tmp_path):
    halves = {"a": (40, 20), "b": (20, 10)}

    def domain(root, name, side):
        return [
            TensorDataset(torch.arange(n)[:, None] + 1000 * (name == "b"), torch.arange(n) % 2) for n in halves[name]
        ]

    monkeypatch.setattr(data, "domain", domain)
    dm = data.domains(("a", "b"), 2, 0.5, 8, tmp_path, 4)
    assert dm.client_names == ("a 1", "a 2", "b 1", "b 2")
    train, test = dm.train_dataloader(), dm.test_dataloader()
    assert (train.sizes + dm.val_dataloader().sizes).tolist() == [20, 20, 10, 10]
    assert test.sizes.tolist() == [10, 10, 5, 5]
    seen = [set(loader_values(test, k)) for k in range(4)]
    assert not seen[0] & seen[1]
    assert data.domains(("a",), 1, 1.0, 8, tmp_path, 4).client_names == ("a",)


def loader_values(loaders, client):
    return [int(v) for batch, _ in loaders.batches(client, seed=None) for v in batch[0].flatten()]


def test_the_pace_is_read_from_the_curve():
    series = fl.report.MetricSeries("val_acc", "val", "max", (2, 4, 6), {"mean": (0.1, 0.5, 0.7)})
    zeros = (0.0,) * 6
    rounds = fl.report.RoundSeries(
        tuple(range(6)), (4,) * 6, zeros, zeros, (0,) * 6, (0,) * 6, (0,) * 6, (False,) * 6, (False,) * 6, zeros,
        (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), zeros, zeros,
    )  # fmt: skip
    record = fl.report.FitRecord("A", rounds=rounds, metrics=(series,))
    assert pace(record, 0.45) == (4, 10.0)
    assert all(map(isnan, pace(record, 0.8)))


def test_the_suites_are_as_the_page_says():
    assert [len(each.methods()) for each in SUITES] == [35, 38, 35, 35, 8, 8, 8]
    assert all(next(iter(each.methods())) == REFERENCE for each in SUITES)
    assert len({each.name for each in SUITES}) == len(SUITES)
    assert suite("adult").trainer.keywords["max_epochs"] == suite("adult").rounds
    assert tuple(sorted(RATES)) == RATES


def test_tables_have_one_place_in_the_page():
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    assert rewritten(page, "x", "new") == "a\n<!-- x -->\n\nnew\n\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="end of y"):
        rewritten(page, "y", "new")
