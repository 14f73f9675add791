# SPDX-License-Identifier: Apache-2.0
"""Ways in which people gather what ``on_validation_epoch_end`` logs, one module each."""

import threading
from collections import Counter, defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
from support import CLASSES, Classifier
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, PearsonCorrCoef
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)


class Gathers(Classifier):
    """Counts right answers in a way of its own; ``start``, ``add`` and ``end`` are the way."""

    def __init__(self):
        super().__init__()
        self.start()

    def start(self):
        pass

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        return self.add(logits, y, batch_idx)

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.end()

    def on_test_epoch_end(self):
        self.end()


def hits(logits, y):
    return (logits.argmax(1) == y).sum()


class AverageMeter:
    def __init__(self):
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class Meters(Gathers):
    def start(self):
        self.meter = AverageMeter()
        self.meters = {"loss": AverageMeter()}

    def add(self, logits, y, index):
        self.meter.update(float(hits(logits, y)) / len(y), len(y))
        self.meters["loss"].update(F.cross_entropy(logits, y).item(), len(y))

    def end(self):
        self.log("acc", self.meter.avg)
        self.log("mean_loss", self.meters["loss"].avg)
        self.meter.reset()
        self.meters["loss"].reset()


class Counts(Gathers):
    def start(self):
        self.correct = self.total = 0

    def add(self, logits, y, index):
        self.correct += int(hits(logits, y))
        self.total += len(y)

    def end(self):
        self.log("acc", self.correct / self.total)
        self.correct = self.total = 0


class CountsFromTheStart(Counts):
    """Empties its numbers when the next evaluation begins."""

    def on_validation_epoch_start(self):
        self.correct = self.total = 0

    def on_test_epoch_start(self):
        self.correct = self.total = 0

    def end(self):
        self.log("acc", self.correct / self.total)


class Indexed(Gathers):
    def start(self):
        self.found, self.labels = {}, Counter()

    def add(self, logits, y, index):
        self.found[index] = (int(hits(logits, y)), len(y))
        self.labels.update(y.tolist())

    def end(self):
        right, total = (sum(column) for column in zip(*self.found.values(), strict=True))
        self.log("acc", right / total)
        self.log("samples", float(sum(self.labels.values())))
        self.found.clear()
        self.labels.clear()


class Arrays(Gathers):
    """A confusion matrix in numpy, as many segmentation projects keep it."""

    def start(self):
        self.confusion = np.zeros((CLASSES, CLASSES))

    def add(self, logits, y, index):
        np.add.at(self.confusion, (y.numpy(), logits.argmax(1).numpy()), 1)

    def end(self):
        self.log("acc", float(self.confusion.trace() / self.confusion.sum()))
        self.confusion[:] = 0


class Tensors(Gathers):
    """In place, through a view, in a buffer and in one that is bound anew."""

    def start(self):
        self.sums = torch.zeros(2)
        self.right = self.sums[:1]
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("steps", torch.zeros(()))

    def add(self, logits, y, index):
        self.right.add_(hits(logits, y))
        self.sums[1] += len(y)
        self.seen += len(y)
        self.steps = self.steps + 1

    def end(self):
        self.log("acc", self.sums[0] / self.sums[1])
        self.log("seen", self.seen)
        self.log("batches", self.steps)
        self.sums.zero_()
        self.seen.zero_()
        self.steps.zero_()


class Holder:
    def __init__(self):
        self.rows = []


class HoldsLists(Gathers):
    def start(self):
        self.holder = Holder()

    def add(self, logits, y, index):
        self.holder.rows.append((logits, y))

    def end(self):
        logits, y = (torch.cat(column) for column in zip(*self.holder.rows, strict=True))
        self.log("acc", hits(logits, y) / len(y))
        self.holder.rows = []


class Slotted(Gathers):
    """An object without ``__dict__``."""

    class Tally:
        __slots__ = ("right", "total")

        def __init__(self):
            self.right = self.total = 0

    def start(self):
        self.tally = self.Tally()

    def add(self, logits, y, index):
        self.tally.right += int(hits(logits, y))
        self.tally.total += len(y)

    def end(self):
        self.log("acc", self.tally.right / self.tally.total)
        self.tally = self.Tally()


class Closures(Gathers):
    """A part of the model that is no metric and gathers on its own."""

    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = defaultdict(list)

        def forward(self, logits, y):
            self.rows["hits"].append((logits.argmax(1) == y).float())

    def start(self):
        self.score = self.Score()

    def add(self, logits, y, index):
        self.score(logits, y)

    def end(self):
        self.log("acc", torch.cat(self.score.rows["hits"]).mean())
        self.score.rows.clear()


class CumulativeIterationMetric:
    """MONAI's class of this name, as far as one process uses it."""

    def __init__(self):
        self.reset()

    def reset(self):
        self._buffers = self._synced_tensors = None
        self._synced = False

    def extend(self, *data):
        if self._buffers is None:
            self._buffers = [[] for _ in data]
        for b, d in zip(self._buffers, data, strict=True):
            b.extend([x[0] for x in torch.split(d, 1, dim=0)])
        self._synced = False

    def _sync(self):
        if self._synced or self._buffers is None:
            return
        self._synced_tensors = [torch.stack(b, dim=0) for b in self._buffers]
        self._synced = True

    def get_buffer(self):
        self._sync()
        if self._synced_tensors is None:
            return self._synced_tensors
        buffers = [x.detach().clone() for x in self._synced_tensors]
        return buffers[0] if len(buffers) == 1 else buffers

    def __call__(self, y_pred, y):
        values = torch.stack([self._compute(p.unsqueeze(0), q.unsqueeze(0))[0] for p, q in zip(y_pred, y, strict=True)])
        self.extend(values)
        return values

    def aggregate(self):
        data = self.get_buffer()
        if not isinstance(data, torch.Tensor):
            raise ValueError(f"the data to aggregate must be PyTorch Tensor, got {type(data)}.")
        return torch.nanmean(data)


class DiceMetric(CumulativeIterationMetric):
    def _compute(self, y_pred, y):
        both, size = (y_pred * y).sum(-1), y_pred.sum(-1) + y.sum(-1)
        return torch.where(y.sum(-1) > 0, 2 * both / size, torch.nan)


class Monai(Gathers):
    """The Lightning tutorial of MONAI: a metric object, outputs in a list, both cleared in the hook."""

    def start(self):
        self.dice_metric = DiceMetric()
        self.validation_step_outputs = []

    def add(self, logits, y, index):
        loss = F.cross_entropy(logits, y)
        one_hot = F.one_hot(logits.argmax(1), CLASSES).float(), F.one_hot(y, CLASSES).float()
        self.dice_metric(y_pred=list(one_hot[0]), y=list(one_hot[1]))
        d = {"val_loss": loss, "val_number": len(y)}
        self.validation_step_outputs.append(d)
        return d

    def end(self):
        val_loss, num_items = 0, 0
        for output in self.validation_step_outputs:
            val_loss += output["val_loss"].sum().item()
            num_items += output["val_number"]
        self.log("acc", self.dice_metric.aggregate().item())
        self.log_dict({"mean_loss": torch.tensor(val_loss / num_items)})
        self.dice_metric.reset()
        self.validation_step_outputs.clear()


class Outputs(Gathers):
    """Lightning's own way from the old ``validation_epoch_end``."""

    def start(self):
        self.validation_step_outputs = []

    def add(self, logits, y, index):
        self.log("step_loss", F.cross_entropy(logits, y))
        self.validation_step_outputs.append((logits.argmax(1) == y).float())

    def end(self):
        self.log("acc", torch.cat(list(self.validation_step_outputs)).mean())
        self.validation_step_outputs.clear()


class InBatchEnd(Outputs):
    """Gathers in the hook after a batch, in a deque."""

    def start(self):
        self.validation_step_outputs = deque()

    def add(self, logits, y, index):
        return (logits.argmax(1) == y).float()

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.validation_step_outputs.append(outputs)

    def on_test_batch_end(self, outputs, batch, batch_idx):
        self.validation_step_outputs.append(outputs)


class Torchmetrics(Gathers):
    def start(self):
        self.acc = MulticlassAccuracy(CLASSES, average="micro")
        self.pair = MetricCollection({"f1": MulticlassF1Score(CLASSES), "conf": MulticlassConfusionMatrix(CLASSES)})
        self.loss = MeanMetric()

    def add(self, logits, y, index):
        self.acc(logits, y)
        self.pair.update(logits, y)
        self.loss.update(F.cross_entropy(logits, y), len(y))

    def end(self):
        found = self.pair.compute()
        self.log("acc", self.acc.compute())
        self.log_dict({"f1": found["f1"], "right": found["conf"].trace().float(), "mean_loss": self.loss.compute()})
        for metric in (self.acc, self.pair, self.loss):
            metric.reset()


class InADictionary(Gathers):
    """Metrics that are not registered, in a plain dictionary."""

    def start(self):
        self.scores = {"acc": MulticlassAccuracy(CLASSES, average="micro")}

    def add(self, logits, y, index):
        for metric in self.scores.values():
            metric.update(logits, y)

    def end(self):
        for name, metric in self.scores.items():
            self.log(name, metric.compute())
            metric.reset()


class HandMadeMetric(Gathers):
    """A metric that keeps its numbers in attributes instead of states."""

    class Right(Metric):
        def __init__(self):
            super().__init__()
            self.right = self.total = 0

        def update(self, logits, y):
            self.right += int(hits(logits, y))
            self.total += len(y)

        def compute(self):
            return torch.tensor(self.right / self.total)

        def reset(self):
            super().reset()
            self.right = self.total = 0

    def start(self):
        self.own = self.Right()

    def add(self, logits, y, index):
        self.own.update(logits, y)

    def end(self):
        self.log("acc", self.own.compute())
        self.own.reset()


class Unjoinable(Gathers):
    """States that no rule joins."""

    def start(self):
        self.best, self.pearson = MinMaxMetric(MulticlassAccuracy(CLASSES, average="micro")), PearsonCorrCoef()

    def add(self, logits, y, index):
        self.best.update(logits, y)
        self.pearson.update(logits.amax(1), y.float())

    def end(self):
        self.log("acc", self.best.compute()["raw"])
        self.log("pearson", self.pearson.compute())
        self.best.reset()
        self.pearson.reset()


class InTheLastStep(Counts):
    """Logs when it has seen the last batch."""

    def add(self, logits, y, index):
        super().add(logits, y, index)
        counts = self.trainer.num_test_batches if self.trainer.testing else self.trainer.num_val_batches
        if index + 1 == counts[0]:
            self.log("acc", self.correct / self.total, batch_size=1)
            self.correct = self.total = 0

    def end(self):
        pass


class RunningInSteps(Gathers):
    """Logs a running mean of what is in a list."""

    def start(self):
        self.seen = []

    def add(self, logits, y, index):
        self.seen.append(float(hits(logits, y)) / len(y))
        self.log("acc", sum(self.seen) / len(self.seen))

    def end(self):
        self.seen.clear()


class ComputesInSteps(Gathers):
    """Logs what a metric has come to in every step."""

    def start(self):
        self.metric = MulticlassAccuracy(CLASSES, average="micro")

    def add(self, logits, y, index):
        self.metric.update(logits, y)
        self.log("acc", self.metric.compute())

    def end(self):
        self.metric.reset()


class Flushes(RunningInSteps):
    """Empties the list whenever it is full."""

    def add(self, logits, y, index):
        self.seen.append(float(hits(logits, y)) / len(y))
        if len(self.seen) == 3:
            self.log("acc", sum(self.seen) / 3, batch_size=1)
            self.seen.clear()


class ReadsTheTrainer(Gathers):
    """Takes what its steps have logged from the trainer."""

    def add(self, logits, y, index):
        self.log("step_acc", hits(logits, y) / len(y))

    def end(self):
        self.log("acc", self.trainer.callback_metrics["step_acc"] * 1.0)


class BestSoFar(Torchmetrics):
    """lightning-hydra-template's way."""

    def start(self):
        super().start()
        self.best = MaxMetric()

    def end(self):
        self.best(self.acc.compute())
        self.log("acc_best", self.best.compute(), sync_dist=True)
        super().end()


class Locked(Gathers):
    """Gathers in something that cannot be copied."""

    class Tally:
        def __init__(self):
            self.lock, self.rows = threading.Lock(), []

    def start(self):
        self.tally = self.Tally()

    def add(self, logits, y, index):
        self.tally.rows.append(float(hits(logits, y)) / len(y))
        self.log("step_acc", hits(logits, y) / len(y))

    def end(self):
        self.log("acc", sum(self.tally.rows) / len(self.tally.rows))
        self.tally.rows.clear()


class MadeAnew(Gathers):
    """Makes a tensor when the evaluation begins, and another metric when it ends, instead of emptying them."""

    def start(self):
        self.metric = MulticlassAccuracy(CLASSES, average="micro")

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(2)

    def on_test_epoch_start(self):
        self.sums = torch.zeros(2)

    def add(self, logits, y, index):
        self.sums[0] += hits(logits, y)
        self.sums[1] += len(y)
        self.metric.update(logits, y)

    def end(self):
        self.log("acc", self.sums[0] / self.sums[1])
        self.log("same", self.metric.compute())
        self.metric = MulticlassAccuracy(CLASSES, average="micro")


class UsesUp(Gathers):
    """Takes out of its outputs what it has used, and changes the rest in place; reads a collection metric by metric."""

    def start(self):
        self.rows, self.pair = (
            [],
            MetricCollection([kind(CLASSES, average="micro") for kind in (MulticlassPrecision, MulticlassF1Score)]),
        )

    def add(self, logits, y, index):
        self.rows.append({"hits": (logits.argmax(1) == y).float(), "size": len(y)})
        self.pair.update(logits, y)

    def end(self):
        total = sum(row.pop("size") for row in self.rows)
        self.log("acc", sum(row["hits"].mul_(2).sum() for row in self.rows) / total / 2)
        for name, metric in self.pair.items():
            self.log(name, metric.compute())
        self.rows.clear()
        self.pair.reset()


PATTERNS = (
    Meters, Counts, CountsFromTheStart, Indexed, Arrays, Tensors, HoldsLists, Slotted, Closures, Monai, Outputs,
    InBatchEnd, Torchmetrics, InADictionary, HandMadeMetric, Unjoinable, InTheLastStep, RunningInSteps,
    ComputesInSteps, Flushes, ReadsTheTrainer, BestSoFar, Locked, MadeAnew, UsesUp,
)  # fmt: skip


class BestNumber(Counts):
    """The best of all evaluations in a plain number, and how many there were, for nobody to log."""

    def start(self):
        super().start()
        self.best, self.evaluations = -1.0, 0

    def end(self):
        self.best = max(self.best, self.correct / self.total)
        self.evaluations += 1
        self.log("acc_best", self.best)
        super().end()


class BestLater(Outputs):
    """Keeps the best in the last hook of all, and logs it in every step."""

    def start(self):
        super().start()
        self.best = 0.0

    def add(self, logits, y, index):
        self.log("acc_best", self.best)
        return super().add(logits, y, index)

    def on_validation_end(self):
        self.best = max(self.best, float(self.trainer.callback_metrics["acc"]))
