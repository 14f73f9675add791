# SPDX-License-Identifier: Apache-2.0
"""Projects that log when an evaluation ends get every client's values too."""

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support import Classifier, Manual, fit, fresh

import fl_lightning as fl


class Says(Classifier):
    """Prints, writes to its logger and counts when an evaluation ends."""

    def __init__(self):
        super().__init__()
        self.outputs, self.ends = [], 0

    def validation_step(self, batch, batch_idx):
        self.outputs.append(batch[1])

    def on_validation_epoch_end(self):
        self.ends += 1
        print("the end")
        self.logger.log_metrics({"here": 1.0})
        self.logger.experiment.anything(1)
        self.log("samples", float(sum(map(len, self.outputs))))
        self.outputs.clear()


def test_only_the_call_for_all_is_heard(tmp_path, capsys, caplog):
    logger, said = CSVLogger(tmp_path), []
    logger.experiment.anything = said.append
    logger.log_metrics = lambda metrics, step=None: said.extend(name for name in metrics if name == "here")
    found = fit(fresh(Says), 2, logger=logger)
    assert said == ["here", 1] * 2
    assert capsys.readouterr().out.count("the end") == 2
    assert "which nothing can add up" not in caplog.text
    assert (found.module.ends, found.module.outputs) == (2, [])
    assert float(found.trainer.callback_metrics["samples"]) == found.strategy.last_evaluation.sizes.sum() == 80


class Steps(Manual):
    """Logs, and steps its scheduler by hand at the end of a validation; then it logs again."""

    def on_validation_epoch_end(self):
        self.log("before", 1.0)
        self.lr_schedulers().step()
        self.log("after", 1.0)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_schedulers_step_once():
    with pytest.warns(UserWarning, match="on_validation_epoch_end does not run for a client alone.*step once"):
        _, strategy, trainer = fit(fresh(Steps), 2)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
    assert "before" in strategy.last_evaluation.values
    assert "after" not in strategy.last_evaluation.values
    assert float(trainer.callback_metrics["after"]) == 1.0


class FailsForOne(Classifier):
    """Its hook cannot do with few samples."""

    def __init__(self):
        super().__init__()
        self.labels = []

    def validation_step(self, batch, batch_idx):
        self.labels.extend(batch[1].tolist())

    def on_validation_epoch_end(self):
        self.log("first", float(len(self.labels)))
        if len(self.labels) < 10:
            raise ValueError("too few")
        self.log("second", 1.0)
        self.labels.clear()


def test_where_the_hook_fails_for_a_client_its_values_are_undefined():
    with pytest.warns(UserWarning, match=r"second is undefined for client .* \(ValueError: too few\)"):
        found = fit(fresh(FailsForOne), 1)
    record = found.strategy.last_evaluation
    assert record.values["first"].equal(record.sizes.double())
    few = record.sizes < 10
    assert 0 < few.sum() < len(few)
    assert record.values["second"].isnan().equal(few)
    assert record.undefined == {
        "second": dict.fromkeys(torch.tensor(record.client_ids)[few].tolist(), "ValueError: too few")
    }


@pytest.mark.parametrize(
    "algorithm", [fl.algorithms.FedAvg(), fl.algorithms.Ditto()], ids=lambda rule: type(rule).__name__
)
def test_a_rate_that_the_hook_sets_moves_once_per_evaluation(algorithm):
    class Decays(Classifier):
        def on_validation_epoch_end(self):
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5

    found = fit(fresh(Decays, lr=0.1), 2, algorithm=algorithm)
    assert found.trainer.optimizers[0].param_groups[0]["lr"] == 0.1 * 0.5**2
