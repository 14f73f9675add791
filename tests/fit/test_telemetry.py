# SPDX-License-Identifier: Apache-2.0
"""What is written down about a round, against the vectors themselves."""

import math

import lightning as L
import pytest
import torch
from support import Classifier, Manual, federated_blobs, fit, fresh, on_path, quiet_trainer

import fl_lightning as fl
from fl_lightning.algorithms import (
    AFL,
    SCAFFOLD,
    FedAvg,
    FedLF,
    FedMDFG,
    ServerRule,
    StepReport,
)
from fl_lightning.core.records import RoundRecord, round_metrics

RULES = {
    "FedAvg-uniform": lambda: FedAvg("uniform"),
    "SCAFFOLD": SCAFFOLD,
    "FedLF-tensor": lambda: FedLF(layers="tensor", reading="paper"),
    "FedMDFG": FedMDFG,
    "AFL": lambda: AFL(lambda_lr=0.1),
}


class Witness(ServerRule):
    """Passes everything on to another rule and keeps the vectors."""

    def __init__(self, rule):
        self.rule, self.layers, self.needs = rule, rule.layers, rule.needs
        self.seen = []

    def client_rule(self):
        return self.rule.client_rule()

    def aggregate(self, cohort):
        step = self.rule.aggregate(cohort)
        self.report = self.rule.report
        self.seen.append((cohort, cohort.updates.rows.double().clone(), step.double().clone()))
        return step


class Watch(L.Callback):
    """Collects the records and the numbers that loggers and callbacks can see."""

    def __init__(self):
        self.records, self.metrics = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.records.append(trainer.strategy.last_round)
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def watched(rule, rounds=5, module=None, **options):
    watch, witness = Watch(), Witness(rule)
    local = {} if rule.needs.full_gradients else {"local_epochs": 2}
    strategy = fl.FederatedStrategy(witness, **{"clients_per_round": 4, "seed": 3, **local, **options})
    quiet_trainer(strategy, rounds, callbacks=[watch]).fit(module or fresh(lr=0.3), federated_blobs(alpha=0.1))
    return witness.seen, watch.records, watch.metrics


@pytest.mark.parametrize("name", RULES)
def test_records_equal_counting_from_the_vectors(name):
    seen, records, metrics = watched(RULES[name]())
    assert len(seen) == len(records) == 5
    asks = RULES[name]().needs.losses
    total = 0
    for (cohort, rows, step), record, logged in zip(seen, records, metrics, strict=True):
        layout = cohort.updates.layout
        assert record.client_ids == cohort.client_ids
        assert record.conflicts == int((rows @ step < 0).sum())
        per_layer = {}
        for layer, layer_name in enumerate(layout.layer_names):
            part = slice(layout.layer_starts[layer], layout.layer_starts[layer + 1])
            per_layer[layer_name] = int((rows[:, part] @ step[part] < 0).sum())
        assert dict(record.layer_conflicts) == per_layer
        total += record.conflicts + sum(per_layer.values())
        assert record.step_norm == pytest.approx(step.norm().item(), rel=1e-6)
        assert record.update_norms.tolist() == pytest.approx(rows.norm(dim=1).tolist(), rel=1e-6)
        assert logged["fed/conflicts"] == record.conflicts
        assert logged["fed/step_norm"] == pytest.approx(record.step_norm)
        assert logged["fed/update_norm"] == pytest.approx(rows.norm(dim=1).mean().item(), rel=1e-6)
        assert all(logged[f"fed/conflicts_in/{layer}"] == count for layer, count in per_layer.items())
        assert not record.dropped
        assert logged["fed/clients"] == 4
        assert (record.losses is not None) == ("fed/start_loss" in logged) == asks
        if asks:
            assert logged["fed/start_loss"] == pytest.approx(record.losses.mean().item())
            assert logged["fed/start_loss_max"] == pytest.approx(record.losses.max().item())
        assert record.seconds == pytest.approx(logged["fed/seconds"], rel=1e-5)
        assert 0 < record.seconds < 60
    if name in ("FedAvg-uniform", "SCAFFOLD"):
        assert total > 0, "otherwise nothing was counted"
    if name == "FedMDFG":
        assert all(record.conflicts == 0 for record in records)


def test_what_a_rule_reports_is_recorded_and_logged_for_its_own_round_alone():
    class FirstRoundOnly(ServerRule):
        def aggregate(self, cohort):
            if cohort.round == 0:
                self.report = StepReport(flagged=True, scalars={"depth": 3.0})
            return cohort.updates.rows.mean(0)

    watch = Watch()
    fit(rounds=2, algorithm=FirstRoundOnly(), callbacks=[watch])
    assert [record.flagged for record in watch.records] == [logged["fed/flagged"] for logged in watch.metrics]
    assert [record.flagged for record in watch.records] == [True, False]
    assert [record.scalars for record in watch.records] == [{"depth": 3.0}, {}]
    assert watch.metrics[0]["fed/depth"] == 3.0


class Telling(Classifier):
    """Keeps what its training step returned."""

    def __init__(self, as_dict=False, **options):
        super().__init__(**options)
        self.as_dict, self.told = as_dict, []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.training:
            self.told.append((loss.item(), len(batch[1])))
        return {"loss": loss, "other": 1} if self.as_dict else loss


@pytest.mark.parametrize("algorithm", [FedAvg, FedLF, FedMDFG])
@pytest.mark.parametrize("lean", [True, False])
def test_train_loss_is_the_mean_over_samples_of_what_the_module_returned(lean, algorithm):
    module = fresh(Telling, as_dict=not lean)
    passes = 1 if algorithm is FedMDFG else 2
    options = {"algorithm": algorithm(), "clients_per_round": 4, "local_epochs": passes}
    _, strategy, trainer = fit(module, 1, **options, **on_path(lean))
    samples = sum(size for _, size in module.told)
    assert samples % passes == 0
    # All clients make the same number of passes, so batches by samples weigh the same as clients by samples.
    expected = sum(loss * size for loss, size in module.told) / samples
    assert strategy.last_round.train_loss == pytest.approx(expected, rel=1e-5)
    assert trainer.callback_metrics["fed/train_loss"].item() == pytest.approx(expected, rel=1e-5)


def test_a_module_that_reports_no_loss_has_none():
    strategy = fit(fresh(Manual), 1).strategy
    assert math.isnan(strategy.last_round.train_loss)
    assert strategy.last_round.client_ids
    assert not strategy.last_round.dropped


def test_large_cohorts_are_not_listed_one_by_one():
    record = RoundRecord(
        0, tuple(range(7)), {}, 0.5, None, 1.0, torch.ones(7), 0, {"a": 0}, False, torch.full((7,), 1 / 7), {}, 1.0
    )
    assert "fed/weight/6" in round_metrics(record)
    short = round_metrics(record, listed=6)
    assert "fed/weight/0" not in short
    assert "fed/client/0" not in short
    assert short["fed/weight/max"] == pytest.approx(1 / 7)
    empty = RoundRecord(3, (), {4: "x"}, math.nan, None, 0.0, torch.zeros(0), 0, {}, True, None, {}, 0.1)
    metrics = round_metrics(empty)
    assert metrics["fed/dropped"] == 1
    assert metrics["fed/update_norm"] == 0
    assert metrics["fed/flagged"] == 1
