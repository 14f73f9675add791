# SPDX-License-Identifier: Apache-2.0
"""Modules that gather in metrics and lists while they train do so in worker processes and behind requests."""

from collections import defaultdict, deque

import pytest
import torch
import torchmetrics
from resuming import ALGORITHMS
from support import CLASSES, Classifier
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score
from worker_processes import FORKS, compared, some

pytestmark = FORKS


class Template(Classifier):
    """As lightning-hydra-template: metrics of every stage as attributes, logged as objects."""

    def __init__(self, **options):
        super().__init__(**options)
        self.train_acc = MulticlassAccuracy(CLASSES)
        self.val_acc = MulticlassAccuracy(CLASSES)
        self.train_loss, self.val_loss = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.val_acc_best = torchmetrics.MaxMetric()

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.train_loss(loss)
        self.train_acc(logits.argmax(1), batch[1])
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.val_loss(F.cross_entropy(logits, batch[1]))
        self.val_acc(logits.argmax(1), batch[1])
        self.log("val/loss", self.val_loss)
        self.log("val/acc", self.val_acc)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True)


class Collected(Classifier):
    """A collection, in both ways of using it, and metrics of floats that are never emptied."""

    def __init__(self, **options):
        super().__init__(**options)
        metrics = {"acc": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)}
        self.called = torchmetrics.MetricCollection(metrics, prefix="called/")
        self.updated = torchmetrics.MetricCollection(metrics, prefix="updated/").clone(prefix="updated/")
        self.parts = torch.nn.ModuleDict({"auroc": BinaryAUROC(), "mse": torchmetrics.MeanSquaredError()})
        self.forever = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.log_dict({f"step/{k}": v for k, v in self.called(logits, batch[1]).items()}, on_epoch=True)
        self.log_dict(self.called)
        self.updated.update(logits, batch[1])
        self.parts["auroc"].update(logits[:, 0], batch[1] == 0)
        self.parts["mse"].update(logits[:, 0], batch[1].float())
        self.forever.update(logits.norm(), weight=len(batch[1]))
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self):
        self.log_dict(self.updated.compute())
        self.updated.reset()
        self.log_dict({name: part.compute() for name, part in self.parts.items()})
        self.parts["auroc"].reset()
        self.log("forever", self.forever.compute())


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


class Everywhere(Classifier):
    """Lists in dictionaries and lists, in submodules, bound anew by a hook, never emptied, and a deque."""

    def __init__(self, **options):
        super().__init__(**options)
        self.by_name, self.plain, self.both = defaultdict(list), {"net": []}, [[], []]
        self.net.seen, self.history, self.sizes = [], [], [8, 8]
        self.queue = deque()

    def on_train_epoch_start(self):
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        value = loss.detach()
        self.by_name["loss"].append(value)
        self.plain["net"] += [value * len(self.sizes)]
        self.both[batch_idx % 2].append(value.item())
        self.net.seen.extend([value, value])
        self.outputs.append(value)
        self.queue.append(value)
        if batch_idx == 0:
            self.history.append(float(value))
        return loss

    def on_train_epoch_end(self):
        lists = [*self.by_name.values(), *self.plain.values(), self.net.seen, self.outputs, list(self.queue)]
        for place, items in enumerate(lists):
            self.log(f"list_{place}", torch.stack(items).mean() + 0.1 * len(items))
        self.log("both", sum(self.both[0]) - 2 * sum(self.both[1]))
        self.log("history", sum(self.history) / len(self.history))
        self.by_name.clear()
        for items in (*self.plain.values(), *self.both, self.net.seen, self.queue):
            items.clear()


class Sometimes(Segmenting):
    """Gathers in later rounds only, and another list in the last."""

    rounds = 3

    def __init__(self, **options):
        super().__init__(**options)
        self.late = []

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 0:
            return Classifier.training_step(self, batch, batch_idx)
        if self.current_epoch == 2:
            self.late.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        if self.training_step_outputs:
            super().on_train_epoch_end()
        self.log("late", float(sum(self.late)))


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


class Both(Template, Segmenting):
    def training_step(self, batch, batch_idx):
        loss = Template.training_step(self, batch, batch_idx)
        self.training_step_outputs.append({"loss": loss, "hits": torch.tensor(1), "n": len(batch[1])})
        return loss


class Noting(Classifier):
    """The last loss of each batch index is kept in a dictionary, and averaged in a hook."""

    def __init__(self, **options):
        super().__init__(**options)
        self.losses = {}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses[batch_idx] = loss.detach()
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack([*self.losses.values()]).mean())
        self.losses.clear()


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


class Gated(Recurrent):
    def __init__(self, **options):
        super().__init__(nn.GRU, **options)


PARALLEL = [
    Template, Collected, Segmenting, Everywhere, Sometimes, Restarting, Noting, LogsItself, Looking, Stopping, TwoSteps,
    Recurrent, Gated, Listed,
]  # fmt: skip
QUICK = (Template, Segmenting, Everywhere, Noting, LogsItself, TwoSteps, Recurrent, Listed)


@pytest.mark.parametrize("module", some(PARALLEL, QUICK))
def test_what_clients_gather_reaches_the_fit_with_the_same_bits(tmp_path, module):
    compared(tmp_path, module)


@pytest.mark.parametrize("name", some(("SCAFFOLD", "FedMDFG", "MOON"), ("FedMDFG",)))
def test_with_methods_that_look_at_losses_or_keep_state(tmp_path, name):
    compared(tmp_path, Both, algorithm=ALGORITHMS[name])


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
