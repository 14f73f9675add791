# SPDX-License-Identifier: Apache-2.0
"""Limits on real fits: a planted fault is found and named, and an honest fit passes."""

import hashlib
import json
from dataclasses import replace
from itertools import product

import lightning as L
import pytest
import torch
from made_records import NAMES, record
from support import quiet_trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import BinaryAccuracy

import fl_lightning as fl
from fl_lightning.__main__ import main
from fl_lightning.comparison.files import write_run

SITES = ("Aachen", "Bari", "Cork", "Delft", "Espoo", "Faro")
LIMITS = {"mean": 0.85, "worst_10": 0.8, "client": 0.75, "gap": 0.3, "clients": 6}


class Screening(L.LightningModule):
    """A linear model of two groups of people."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(9, 1)
        self.accuracy, self.gap = BinaryAccuracy(), fl.metrics.ByGroup(BinaryAccuracy(), num_groups=2)

    def training_step(self, batch, batch_idx):
        x, y = batch[:2]
        return F.binary_cross_entropy_with_logits(self.net(x).squeeze(1), y.float())

    def test_step(self, batch, batch_idx):
        x, y = batch[:2]
        predictions, groups = (self.net(x).squeeze(1) > 0).long(), (x[:, 8] > 0).long()
        self.accuracy.update(predictions, y)
        self.gap.update(predictions, y, groups=groups)
        self.log("test_acc", self.accuracy)
        self.log("test_group_gap", self.gap)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def sites(plant, number):
    """To train and to test, 60 people of two groups at each of six sites; one fault is planted."""
    dice = torch.Generator().manual_seed(number)
    rule, parts = torch.randn(8, generator=dice), {"train": [], "test": []}
    for site, part in product(range(len(SITES)), parts):
        x = torch.randn(60, 9, generator=dice)
        x[:, 8] = (torch.arange(60) % 2) * 2.0 - 1
        y = ((x[:, :8] + 0.2 * torch.randn(60, 8, generator=dice)) @ rule > 0).long()
        fault = plant if site == 2 else ""
        if fault == "at chance":
            y = torch.randint(2, (60,), generator=dice)
        if fault == "swapped labels":
            y = 1 - y
        if fault == "a group ignored" and part == "test":
            y = torch.where(x[:, 8] > 0, 1 - y, y)
        if fault != "a site dropped":
            parts[part].append((x, y, torch.full((60,), site)))
    return [TensorDataset(*map(torch.cat, zip(*found, strict=True))) for found in parts.values()]


def trained(plant, number=0, seeds=3):
    """The records of fits with several seeds."""
    train, test = sites(plant, number)
    keys, found = fl.data.ByKey(lambda people: [SITES[site] for site in people.tensors[2]]), []
    for seed in range(100 * number, 100 * number + seeds):
        data, recorder = fl.FederatedDataModule(train, keys, test=test, batch_size=20), fl.callbacks.FitRecorder()
        L.seed_everything(seed, verbose=False)
        model, trainer = Screening(), quiet_trainer(fl.FederatedStrategy(seed=seed), 4, callbacks=[recorder])
        trainer.fit(model, data)
        trainer.test(model, data, verbose=False)
        found.append(recorder.record)
    return found


@pytest.mark.parametrize(
    ("plant", "limits", "who"),
    [
        ("nothing", set(), set()),
        ("at chance", {"client"}, {"Cork"}),
        ("swapped labels", {"client"}, {"Cork"}),
        ("a group ignored", {"gap"}, {"Cork"}),
        ("a site dropped", {"clients"}, {"clients"}),
    ],
)
def test_planted_faults_are_found_and_named(plant, limits, who):
    found = fl.audit(trained(plant), LIMITS)
    assert found.passed == (plant == "nothing")
    assert limits <= {one.limit for one in found.broken}
    named = {one.who for one in found.broken}
    assert who <= named <= {*who, "the mean over the clients", "the worst tenth of the clients"}


def made(method, values, metric="test_acc", mode="max", seeds=3, noise=0.01, names=NAMES):
    """Fits whose clients' values differ by a little from seed to seed."""
    return [
        replace(
            record({metric: [value and value + noise * seed for value in values]}, mode, names=names), method=method,
            seed=seed, is_bound=method == "local only",
        )
        for seed in range(seeds)
    ]  # fmt: skip


def test_only_what_is_beyond_chance_breaks_a_limit_unless_strict():
    runs = made("FedAvg", (0.9, 0.9, 0.9, 0.685), noise=0.01)
    found = fl.audit(runs, {"client": 0.7})
    assert found.passed
    assert "within chance:\n  Dundee: test_acc 0.695" in str(found)
    strict = fl.audit(runs, {"client": 0.7}, strict=True)
    assert [one.who for one in strict.broken] == ["Dundee"]
    assert str(strict).startswith("failed: FedAvg, 3 seeds, breaks client:\n  Dundee: test_acc 0.695 (")
    broken = fl.audit(made("FedAvg", (0.9, 0.9, 0.9, 0.5)), {"client": 0.7, "worst_10": 0.7}).broken
    assert [one.who for one in broken] == ["Dundee", "the worst tenth of the clients"]


@pytest.mark.parametrize(("bound", "passed"), [(0.0, False), (0.2, True)])
def test_nobody_may_lose_more_than_a_limit_by_not_training_alone(bound, passed):
    runs = made("FedLF", (0.9, 0.9, 0.9, 0.6)) + made("local only", (0.8, 0.8, 0.8, 0.7))
    found = fl.audit(runs, {"alone": bound})
    assert found.passed == passed
    assert [one.who for one in found.broken] == ["Dundee"] * (not passed)


def test_a_client_without_a_value_breaks_limits_for_each_client_and_is_named():
    runs = made("FedLF", (0.9, 0.9, 0.9, None)) + made("local only", (0.8, 0.8, 0.8, 0.8))
    found = fl.audit(runs, {"client": 0.5, "alone": 0.5, "clients": 3})
    assert [(one.limit, one.who, one.number) for one in found.broken] == [
        ("client", "Dundee", "no value"), ("alone", "Dundee", "no value"),
    ]  # fmt: skip
    assert str(found).endswith("Never evaluated: Dundee.")


def test_what_some_runs_lack_is_no_chance():
    runs = made("FedAvg", (0.9, 0.9, 0.9, 0.4))
    empty = [replace(run, evaluations=()) for run in runs]
    found = fl.audit([runs[0], *empty[1:]], {"mean": 0.1, "worst_10": 0.1})  # two fits came to nothing
    assert [one.number for one in found.broken] == ["no value"] * 2
    values = replace(runs[0].evaluations[0], values={"test_acc": (0.9, 0.9, 0.9, None)})
    others = [replace(run, evaluations=(values,)) for run in runs[1:]]
    assert [one.who for one in fl.audit([runs[0], *others], {"client": 0.5}).broken] == ["Dundee"]  # in one run alone
    unknown = {"test_acc": (0.9,) * 4, "test_gap": (None,) * 4}
    gaps = replace(values, values=unknown, modes={"test_acc": "max", "test_gap": "abs"})
    assert not fl.audit([replace(run, evaluations=(gaps,)) for run in runs], {"gap": 0.3}).passed
    with pytest.raises(ValueError, match="records must hold every run once, found seed 1 of FedAvg twice"):
        fl.audit([*runs, runs[1]], {"mean": 0.5})


def test_small_values_may_be_good_and_gaps_count_by_size():
    losses = made("FedAvg", (0.1, 0.2, 0.3, 0.9), "test_loss", "min")
    assert [one.who for one in fl.audit(losses, {"client": 0.5}).broken] == ["Dundee"]
    gaps = made("FedAvg", (0.1, -0.1, 0.0, -0.4), "test_gap", "abs")
    assert [one.who for one in fl.audit(gaps, {"client": 0.3}).broken] == ["Dundee"]
    values = replace(gaps[0].evaluations[0], values={"test_gap": (0.9,) * 4, "personal/test_gap": (0.1,) * 4},
                     modes={"test_gap": "abs", "personal/test_gap": "abs"})  # fmt: skip
    own = fl.audit([replace(run, evaluations=(values,)) for run in gaps], {"gap": 0.3})
    assert {one.what for one in own.findings} == {"personal/test_gap"}  # nobody uses the global model
    large = made("FedAvg", (9e3,) * 4, "test_loss", "min")
    assert fl.audit(large, {"client": 2e4}).findings[0].number == "9,000.0 (9,000.0 to 9,000.1)"


@pytest.mark.parametrize(
    ("limits", "options", "words"),
    [
        ({}, {}, "limits must hold one limit or more, of mean, worst_10, client, gap, alone, clients, failed, found"),
        ({"worst10": 0.5}, {}, "found 'worst10': did you mean 'worst_10'"),
        ({"gap": 0.5}, {}, "gap needs a metric of a gap between groups, such as val_parity_gap, found test_acc"),
        ({"alone": 0}, {}, "alone needs records in which every client trains alone"),
        ({"mean": 0.5}, {"method": "FedVA"}, "method must be one of FedAvg, found 'FedVA'"),
        ({"mean": 0.5}, {"metric": "test_auc"}, "found 'test_auc'"),
    ],
)
def test_what_cannot_be_audited_is_named(limits, options, words):
    with pytest.raises(ValueError, match=words):
        fl.audit(made("FedAvg", (0.9,) * 4), limits, **options)


def test_one_run_and_clients_that_do_not_last_are_refused_by_name():
    with pytest.raises(ValueError, match="there must be two runs of FedAvg or more to tell what is chance, found 1"):
        fl.audit(made("FedAvg", (0.9,) * 4, seeds=1), {"mean": 0.5})
    assert fl.audit(made("FedAvg", (0.9,) * 4, seeds=1), {"mean": 0.5}, strict=True).passed
    runs = made("FedAvg", (0.9,) * 4, names=("0", "1", "2", "3"))
    other = [replace(run, division=k) for k, run in enumerate(runs)]
    with pytest.raises(ValueError, match="client looks at clients one by one, and other divisions"):
        fl.audit(other, {"client": 0.5})
    assert fl.audit(other, {"mean": 0.5}).passed
    with pytest.raises(ValueError, match="one task, found a module with unknown trained parameters and Net with 7"):
        fl.audit([*runs[:2], replace(runs[2], configuration={"module": "Net", "trained parameters": 7})], {"mean": 0.5})
    with pytest.raises(ValueError, match="records must have a finished fit of a method, found none among 3"):
        fl.audit([replace(run, status="interrupted") for run in runs], {"mean": 0.5})


def test_the_command_reads_files_and_writes_a_card(tmp_path, capsys):
    pytest.importorskip("jinja2")
    files = []
    for run in made("FedAvg", (0.9, 0.9, 0.9, 0.5)) + made("local only", (0.8, 0.8, 0.8, 0.8)):
        files.append(tmp_path / f"{run.method}-{run.seed}.json")
        settings = {"reads": "sums", "clients_also_send": [], "guard": "NormBound(1.0)", "epsilon": 3.5}
        files[-1].write_text(fl.report.record_to_json(replace(run, settings=settings)))
    weights, card = tmp_path / "model.ckpt", tmp_path / "card.html"
    weights.write_bytes(b"weights")
    command = ["audit", *map(str, files), "--card", str(card), "--weights", str(weights)]
    assert main([*command, "--limit", "client=0.7", "--limit", "alone=0"]) == 1
    printed = capsys.readouterr().out
    assert "failed: FedAvg, 3 seeds, breaks client, alone beyond chance:\n  Dundee: test_acc 0.510" in printed
    found = json.loads(card.with_suffix(".json").read_text())
    assert not found["passed"]
    assert found["sha256"][str(weights)] == hashlib.sha256(b"weights").hexdigest()
    assert found["gains"]["Dundee"]["advice"] == "worse off"
    assert found["server_saw"]["epsilon"] == 3.5
    page = card.read_text()
    shown = ("Audit of FedAvg: failed", "sums of the updates alone", "NormBound(1.0)", "worse off", "0.510 ± 0.025",
             "<td><bdi>broken")  # fmt: skip
    assert [words for words in shown if words not in page] == []
    assert page.index("<td><bdi>broken") < page.index("<td><bdi>kept")
    assert main([*command, "--limit", "client=0.4"]) == 0
    fl.audit(made("FedAvg", (0.9,) * 4, seeds=1), {"mean": 0.5}, strict=True).write(card)
    one_run = json.loads(card.with_suffix(".json").read_text())["clients"]["test_acc"]
    assert one_run["Dundee"] == {"value": 0.9, "half_width": None}
    for wrong, words in (
        (["--limit", "client"], "--limit must be NAME=NUMBER, such as worst_10=0.6, found 'client'"),
        (["--limit", "client=0.9", "--limit", "client=0.4"], "--limit must give client once, found 0.9 and 0.4"),
        (["--limit", "client=0.4", "--card", "audit.json"], "path must name the page, such as audit.html"),
    ):
        assert main([*command, *wrong]) == 2
        assert words in capsys.readouterr().err
    for given, words in (
        ([weights], "model.ckpt must be the record of a fit"),
        ([files[0], "--weights", weights], "--weights needs --card"),
    ):
        assert main(["audit", *map(str, given), "--limit", "client=0.4"]) == 2
        assert words in capsys.readouterr().err


def test_the_command_takes_the_picked_runs_of_a_comparison(tmp_path, capsys):
    assert main(["audit", str(tmp_path), "--limit", "mean=0.5"]) == 2
    assert "the folder of a finished comparison" in capsys.readouterr().err
    for text in ("method,picked\nFedAvg,1", "method,picked,learning_rate\nFedAvg,1,high", b"\xff".decode("latin-1")):
        (tmp_path / "runs.csv").write_text(text, encoding="latin-1")
        assert main(["audit", str(tmp_path), "--limit", "mean=0.5"]) == 2
        assert "runs.csv must be as compare writes it: compare again to write it" in capsys.readouterr().err
    rows = ["method,learning_rate,division,seed,picked,status"]
    for run in made("FedAvg", (0.9,) * 4):
        rows += [
            f"FedAvg,,0,{run.seed},1,{'failed' if run.seed == 1 else 'finished'}",
            f"FedAvg,9,0,{run.seed},0,failed",
        ]
        write_run(tmp_path / "runs" / f"FedAvg--lr-own--seed-{run.seed}.json", run)
    (tmp_path / "runs.csv").write_text("\n".join(rows))
    for allowed, status, words in (
        ([], 1, "failed: FedAvg, 2 seeds, breaks failed beyond chance:\n"
                "  FedAvg, seed 1: failed or interrupted runs 1, must be at most 0\n"),
        (["--limit", "failed=1"], 0, "passed: FedAvg, 2 seeds, keeps 2 limits\n"),
    ):  # fmt: skip
        assert main(["audit", str(tmp_path), "--limit", "mean=0.5", *allowed]) == status
        assert capsys.readouterr() == (words, "")


def test_runs_of_the_method_that_are_not_over_break_an_audit_and_those_of_others_do_not():
    def statuses(runs):
        return [replace(runs[0], status="runs"), *runs[1:]]

    runs, alone = made("FedAvg", (0.9,) * 4), made("local only", (0.8,) * 4)
    found = fl.audit(statuses(runs), {"mean": 0.5})
    assert [(one.limit, one.who) for one in found.broken] == [("failed", "FedAvg, seed 0")]
    others = [*statuses(alone), *statuses(made("FedLF", (0.9,) * 4))]
    assert fl.audit([*runs, *others], {"mean": 0.5}, method="FedAvg").passed
    assert [one.who for one in fl.audit([*runs, *statuses(alone)], {"alone": 0}).broken] == ["local only, seed 0"]
