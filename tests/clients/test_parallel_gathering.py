# SPDX-License-Identifier: Apache-2.0
"""Modules that gather in metrics and lists while they train do so in worker processes and behind requests."""

import pytest
import torch
import torchmetrics
from rank_session import Gathering
from resuming import ALGORITHMS
from support import CLASSES, Classifier
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from worker_processes import FORKS, compared, some

pytestmark = FORKS


class Segmenting(Classifier):
    """As the example of segmentation-models-pytorch: outputs, the loss with its graph, in a list that a hook clears."""

    def __init__(self, **options):
        super().__init__(**options)
        self.training_step_outputs = []

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        hits = (logits.argmax(1) == batch[1]).sum()
        info = {"loss": F.cross_entropy(logits, batch[1]), "hits": hits, "n": len(batch[1])}
        self.training_step_outputs.append(info)
        return self.training_step_outputs[-1]

    def on_train_epoch_end(self):
        outputs = self.training_step_outputs
        self.log("train_loss", torch.stack([x["loss"] for x in outputs]).mean().detach())
        self.log("train_acc", sum(x["hits"] for x in outputs) / sum(x["n"] for x in outputs))
        self.log("first", outputs[0]["loss"].detach() - 2 * outputs[-1]["loss"].detach())
        self.training_step_outputs.clear()


class Restarting(Classifier):
    """Empties a metric in the middle."""

    def __init__(self, **options):
        super().__init__(**options)
        self.whole, self.count = torchmetrics.MeanMetric(), torchmetrics.SumMetric()
        self.hits = MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            for metric in (self.whole, self.hits):
                metric.reset()
        logits = self(batch[0])
        self.whole.update(logits.mean())
        self.hits.update(logits, batch[1])
        self.count.update(1)
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self):
        self.log_dict({"whole": self.whole.compute(), "hits": self.hits.compute(), "count": self.count.compute()})


class LogsItself(Classifier):
    def training_step(self, batch, batch_idx):
        self.logger.log_metrics({"direct": float(batch_idx)}, step=batch_idx)
        return super().training_step(batch, batch_idx)


class Looking(Classifier):
    def training_step(self, batch, batch_idx):
        factor = 1.5 if "val_loss" in self.trainer.callback_metrics else 1.0
        return factor * super().training_step(batch, batch_idx)


class Stopping(Classifier):
    rounds = 3

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class TwoSteps(Classifier):
    """Steps twice per batch and looks at the number of steps, which no other client changes."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            loss = super().training_step(batch, batch_idx) * (1 + 0.01 * (self.global_step % 5))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Recurrent(Classifier):
    """Reads the features one after the other; the cell keeps its parameters in a list as well."""

    def __init__(self, cell=nn.LSTM, **options):
        super().__init__(**options)
        self.cell, self.head = cell(1, 5, num_layers=2, batch_first=True), nn.Linear(5, CLASSES)

    def training_step(self, batch, batch_idx):
        out, _ = self.cell(batch[0].unsqueeze(-1))
        return F.cross_entropy(self.head(out[:, -1]), batch[1]) + super().training_step(batch, batch_idx)


class Listed(Classifier):
    """Keeps parameters and a buffer in plain attributes too, as penalties and logs of norms need them."""

    def __init__(self, **options):
        super().__init__(norm=True, **options)
        self.own = list(self.net.parameters())
        self.by_name = {"all": dict(self.net.named_parameters()), "means": list(self.net.buffers())}

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 1e-3 * sum(p.square().sum() for p in self.own)


PARALLEL = [Gathering, Segmenting, Restarting, LogsItself, Looking, Stopping, TwoSteps, Recurrent, Listed]
QUICK = (Gathering, Segmenting, LogsItself, TwoSteps, Recurrent, Listed)


@pytest.mark.filterwarnings("ignore:parity is undefined")
@pytest.mark.parametrize("module", some(PARALLEL, QUICK))
def test_what_clients_gather_reaches_the_fit_with_the_same_bits(tmp_path, module):
    compared(tmp_path, module)


@pytest.mark.filterwarnings("ignore:parity is undefined")
@pytest.mark.parametrize("name", some(("SCAFFOLD", "FedMDFG", "MOON"), ("FedMDFG",)))
def test_with_methods_that_look_at_losses_or_keep_state(tmp_path, name):
    compared(tmp_path, Gathering, algorithm=ALGORITHMS[name])


class Sum(torchmetrics.Metric):
    """Somebody's own: adds once."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, values):
        self.total += values.sum()

    def compute(self):
        return self.total


class WithOwn(Classifier):
    kind = Sum

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = self.kind()

    def training_step(self, batch, batch_idx):
        self.seen.update(batch[0].flatten())
        self.log("step", self.seen(batch[0][0]) if batch_idx % 2 else 0.0)
        return Classifier.training_step(self, batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("seen", self.seen.compute())


def test_metrics_of_ones_own(tmp_path):
    compared(tmp_path, WithOwn)
