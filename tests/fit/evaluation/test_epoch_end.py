# SPDX-License-Identifier: Apache-2.0
"""Projects that log when an evaluation ends get every client's values too."""

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support import CLASSES, Classifier, federated_blobs, fit, fresh
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

import fl_lightning as fl


class InSteps(Classifier):
    """Logs the metric itself in the step: what the others must agree with."""

    def __init__(self):
        super().__init__()
        self.metrics = MetricCollection(
            {"val_macc": MulticlassAccuracy(CLASSES), "val_precision": MulticlassPrecision(CLASSES)}
        )

    def _predict(self, batch):
        return self(batch[0]).argmax(1), batch[1]

    def validation_step(self, batch, batch_idx):
        self.metrics.update(*self._predict(batch))
        self.log_dict(self.metrics)

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)


class AtTheEnd(InSteps):
    """Updates metrics in the step; computes, logs and resets them at the end."""

    def validation_step(self, batch, batch_idx):
        self.metrics.update(*self._predict(batch))

    def on_validation_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()

    def on_test_epoch_end(self):
        self.on_validation_epoch_end()


class InLists(AtTheEnd):
    """Collects what its steps found in a list, beside another list that is none of the kind."""

    def __init__(self):
        super().__init__()
        self.outputs, self.names, self.ends = [], ["a", "b"], 0

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self._predict(batch))

    def on_validation_epoch_end(self):
        assert self.names == ["a", "b"]
        predicted, labels = (torch.cat(parts) for parts in zip(*self.outputs, strict=True))
        self.log_dict(self.metrics(predicted, labels))
        self.ends += 1
        print("the end")
        if self.logger is not None:
            self.logger.log_metrics({"here": 1.0})
            self.logger.experiment.anything(1)
        self.outputs.clear()
        self.metrics.reset()


def evaluated(module_class, **options):
    """A module and its trainer after a fit and a test, and what was evaluated in each."""
    data = federated_blobs()
    module, strategy, trainer = fit(fresh(module_class), 2, data=data, clients_per_round=1.0, **options)
    fitted = strategy.last_evaluation
    trainer.test(module, data)
    return module, trainer, fitted, strategy.last_evaluation


def test_values_of_each_client(capsys):
    _, trainer, expected, tested = evaluated(InSteps)
    pooled = dict(trainer.callback_metrics)
    module, trainer, fitted, late = evaluated(InLists)
    for one, other in ((expected, fitted), (tested, late)):
        assert set(one.values) == set(other.values) == {"val_macc", "val_precision"}
        for name, values in one.values.items():
            torch.testing.assert_close(other.values[name], values)
    for name, value in pooled.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value)
    assert module.ends == 3  # once per real end, whatever the number of clients
    assert capsys.readouterr().out.count("the end") == 3
    assert module.outputs == []


def test_loggers_hear_the_real_end_only(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.experiment.anything = lambda value: None
    evaluated(InLists, logger=logger)
    assert sum("here" in row for row in logger.experiment.metrics) + _saved(tmp_path) == 3


def _saved(folder):
    rows = [line for file in folder.rglob("metrics.csv") for line in file.read_text().splitlines()]
    if not rows:
        return 0
    place = rows[0].split(",").index("here") if "here" in rows[0].split(",") else None
    return 0 if place is None else sum(row.split(",")[place] == "1.0" for row in rows[1:])


class Steps(AtTheEnd):
    """Steps its scheduler by hand at the end of a validation."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        return loss

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        if not self.trainer.testing:
            self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_schedulers_step_once():
    with pytest.warns(UserWarning, match="on_validation_epoch_end does not run for a client alone.*step once"):
        _, trainer, fitted, _ = evaluated(Steps)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    assert set(fitted.values) == {"val_macc", "val_precision"}  # logged before it stepped


@pytest.mark.parametrize(
    "algorithm", [fl.algorithms.FedAvg(), fl.algorithms.Ditto()], ids=lambda rule: type(rule).__name__
)
def test_a_rate_that_the_hook_sets_moves_once_per_evaluation(algorithm):
    class Decays(Classifier):
        def on_validation_epoch_end(self):
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

    found = fit(fresh(Decays, lr=0.1), 2, algorithm=algorithm)
    assert found.trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**2
