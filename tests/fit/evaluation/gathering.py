# SPDX-License-Identifier: Apache-2.0
"""Ways in which people gather what an evaluation logs, one module each.

``MEANS`` are names whose value for all clients is the mean of theirs, ``OF_CLIENTS`` those with another function of
theirs; everything else is as if the data were nobody's.
"""

import threading
from collections import Counter, defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
from support import CLASSES, Blobs, Classifier, blobs
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, PearsonCorrCoef, RunningMean
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from fl_lightning.metrics import DemographicParity


def accuracy():
    return MulticlassAccuracy(CLASSES, average="micro")


def hits(logits, y):
    return (logits.argmax(1) == y).sum()


class Gathers(Classifier):
    """Counts right answers in a way of its own; ``start``, ``add`` and ``end`` are the way."""

    MEANS, OF_CLIENTS, DATA = (), {}, Blobs

    def __init__(self):
        super().__init__()
        self.start()

    def start(self):
        pass

    def begin(self):
        pass

    def validation_step(self, batch, batch_idx):
        return self.add(self(batch[0]), batch[1], batch_idx)

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)

    def on_validation_epoch_start(self):
        self.begin()

    def on_validation_epoch_end(self):
        self.end()

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end


class Logs(Gathers):
    """Logs in steps and batch hooks, and takes what they have logged from the trainer."""

    OF_CLIENTS = {"index": sum, "best": max}  # noqa: RUF012

    def add(self, logits, y, index):
        self.log("loss", F.cross_entropy(logits, y), on_step=True, on_epoch=True)
        self.log_dict({"right": hits(logits, y).float(), "index": float(index)}, reduce_fx="sum")
        self.log("worst", logits.min(), reduce_fx="min")
        counts = self.trainer.num_test_batches if self.trainer.testing else self.trainer.num_val_batches
        if index + 1 == counts[0]:
            self.log("best", logits.max(), reduce_fx="max")

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.log("samples", float(len(batch[1])), on_epoch=True, reduce_fx="sum")

    on_test_batch_end = on_validation_batch_end

    def end(self):
        self.log("twice", 2 * self.trainer.callback_metrics["loss"])


class Metrics(Gathers):
    """In torchmetrics, also in such as nobody registers; keeps the best value of all evaluations in one more."""

    def start(self):
        self.acc, self.late, self.best, self.loss = accuracy(), accuracy(), MaxMetric(), MeanMetric()
        self.pair = MetricCollection({"f1": MulticlassF1Score(CLASSES), "conf": MulticlassConfusionMatrix(CLASSES)})
        self.same = MetricCollection(
            [kind(CLASSES, average="micro") for kind in (MulticlassPrecision, MulticlassF1Score)]
        )
        self.scores = {"hidden": accuracy()}
        # Precision and recall share their state.
        kinds = (MulticlassPrecision, MulticlassRecall)
        self.group = MetricCollection([kind(CLASSES, average="micro") for kind in kinds], prefix="group_")
        self.gap = DemographicParity()

    def add(self, logits, y, index):
        self.acc(logits, y)
        self.group.update(logits, y)
        self.log_dict(self.group)
        self.gap.update((logits.argmax(1) < 2).long(), torch.arange(len(y)) % 2)
        self.log("gap", self.gap)
        self.pair.update(logits, y)
        self.same.update(logits, y)
        self.scores["hidden"].update(logits, y)
        self.loss.update(F.cross_entropy(logits, y), len(y))
        self.late.update(logits, y)
        self.log("logged", self.acc)

    def end(self):
        found = self.pair.compute()
        self.best(self.acc.compute())
        self.log("late", self.late)
        self.log_dict({"f1": found["f1"], "right": found["conf"].trace().float(), "mean_loss": self.loss.compute()})
        self.log_dict({name: metric.compute() for name, metric in self.same.items()})
        self.log_dict({"acc": self.scores["hidden"].compute(), "acc_best": self.best.compute()})
        for metric in (self.acc, self.pair, self.same, self.loss, self.scores["hidden"]):
            metric.reset()


class Lists(Gathers):
    """Lightning's own way from the old ``validation_epoch_end``, and a deque that the hook after a batch fills."""

    def start(self):
        self.outputs, self.ends = [], deque()

    def add(self, logits, y, index):
        self.log("step_loss", F.cross_entropy(logits, y))
        self.outputs.append((logits.argmax(1) == y).float())
        return len(y)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.ends.append(outputs)

    on_test_batch_end = on_validation_batch_end

    def end(self):
        self.log_dict({"acc": torch.cat(self.outputs).mean(), "samples": float(sum(self.ends))})
        self.outputs.clear()
        self.ends.clear()


class UsesUp(Gathers):
    """Takes out of its outputs what it has used, and changes the rest in place."""

    def start(self):
        self.rows = []

    def add(self, logits, y, index):
        self.rows.append({"hits": (logits.argmax(1) == y).float(), "size": len(y)})

    def end(self):
        total = sum(row.pop("size") for row in self.rows)
        self.log("acc", sum(row["hits"].mul_(2).sum() for row in self.rows) / total / 2)
        self.rows = []


class Locked(Gathers):
    """Gathers what can be neither copied nor pickled, in a list of an object that cannot be either."""

    class Tally:
        def __init__(self):
            self.lock, self.rows = threading.Lock(), []

    def start(self):
        self.tally = self.Tally()

    def add(self, logits, y, index):
        right = float(hits(logits, y)) / len(y)
        self.tally.rows.append(lambda: right)

    def end(self):
        self.log("acc", sum(row() for row in self.tally.rows) / len(self.tally.rows))
        self.tally.rows.clear()


class Counts(Gathers):
    """Numbers, dictionaries and objects of its own."""

    MEANS = ("acc", "again", "batches")

    class Slotted:
        __slots__ = ("total",)

        def __init__(self):
            self.total = 0

    def start(self):
        self.correct, self.tally, self.found, self.labels = 0, self.Slotted(), {}, Counter()

    def add(self, logits, y, index):
        self.correct += int(hits(logits, y))
        self.tally.total += len(y)
        self.found[index] = int(hits(logits, y))
        self.labels.update(y.tolist())

    def end(self):
        self.log("acc", self.correct / self.tally.total)
        self.log("again", sum(self.found.values()) / sum(self.labels.values()))
        self.log("batches", float(len(self.found)))
        self.correct, self.tally = 0, self.Slotted()
        self.found.clear()
        self.labels.clear()


class Sums(Gathers):
    """Tensors changed in place, through a view, in buffers, in an array, and in one that every evaluation makes."""

    MEANS = ("acc", "seen", "confusion", "anew")

    def start(self):
        self.sums = torch.zeros(2)
        self.right = self.sums[:1]
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("steps", torch.zeros(()))
        self.confusion = np.zeros((CLASSES, CLASSES))

    def begin(self):
        self.anew = torch.zeros(2)

    def add(self, logits, y, index):
        self.right.add_(hits(logits, y))
        self.sums[1] += len(y)
        self.anew += torch.tensor([hits(logits, y), len(y)])
        self.seen += len(y)
        self.steps = self.steps + 1
        np.add.at(self.confusion, (y.numpy(), logits.argmax(1).numpy()), 1)

    def end(self):
        self.log("acc", self.sums[0] / self.sums[1])
        self.log("anew", self.anew[0] / self.anew[1])
        self.log("seen", self.seen / self.steps)
        self.log("confusion", float(self.confusion.trace() / self.confusion.sum()))
        self.sums.zero_()
        self.seen.zero_()
        self.steps.zero_()
        self.confusion[:] = 0


class AverageMeter:
    """As many projects have it; as MONAI's do, it keeps what it has seen in a list that the first batch makes."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = self.count = 0
        self.seen = None

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
        self.seen = [] if self.seen is None else self.seen
        self.seen.append(torch.tensor([value * n, n]))

    def aggregate(self):
        total, count = torch.stack(self.seen).sum(0)
        self.seen.clear()
        return total / count


class Objects(Gathers):
    """Meters, a part of the model that is no metric and gathers under new names, and a list beside them."""

    MEANS = ("acc", "again", "mean_loss", "part", "in_list")

    class Score(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = defaultdict(list)

        def forward(self, logits, y):
            self.rows["hits"].append((logits.argmax(1) == y).float())

    def start(self):
        self.meter, self.meters, self.score, self.outputs = AverageMeter(), {"loss": AverageMeter()}, self.Score(), []

    def add(self, logits, y, index):
        self.meter.update(float(hits(logits, y)) / len(y), len(y))
        self.meters["loss"].update(F.cross_entropy(logits, y).item(), len(y))
        self.score(logits, y)
        self.outputs.append({"right": hits(logits, y), "size": len(y)})

    def end(self):
        right = sum(int(row["right"]) for row in self.outputs)
        self.log("in_list", right / sum(row["size"] for row in self.outputs))
        self.log("acc", self.meter.sum / self.meter.count)
        self.log("again", self.meter.aggregate())
        self.log("mean_loss", self.meters["loss"].aggregate())
        self.log("part", torch.cat(self.score.rows["hits"]).mean())
        self.meter.reset()
        self.meters["loss"].reset()
        self.score.rows.clear()
        self.outputs.clear()


class HandMade(Metric):
    """Keeps its numbers in attributes instead of states."""

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


class Wrappers(Gathers):
    """Metrics whose states no rule joins, logged as objects and as values; one remembers earlier evaluations."""

    MEANS = ("acc", "raw", "pearson", "running")

    def start(self):
        self.best, self.pearson, self.running, self.own, self.kept = (
            MinMaxMetric(accuracy()),
            PearsonCorrCoef(),
            RunningMean(2),
            HandMade(),
            HandMade(),
        )

    def add(self, logits, y, index):
        self.best.update(logits, y)
        self.pearson.update(logits.amax(1), y.float())
        self.own.update(logits, y)
        self.running.update(logits.amax())
        self.log_dict({"pearson": self.pearson, "running": self.running})

    def end(self):
        self.kept.update(torch.eye(CLASSES), torch.arange(CLASSES))
        self.log("raw", self.best.compute()["raw"])
        self.log("acc", self.own.compute())
        self.best.reset()
        self.own.reset()


class ReadsInSteps(Gathers):
    """Logs what a list and a metric have come to in every step, and empties a list when it is full."""

    MEANS, OF_CLIENTS = ("acc", "metric"), {"few": max}

    def start(self):
        self.seen, self.few, self.metric = [], [], accuracy()

    def add(self, logits, y, index):
        for rows in (self.seen, self.few):
            rows.append(float(hits(logits, y)) / len(y))
        self.metric.update(logits, y)
        self.log("acc", sum(self.seen) / len(self.seen))
        self.log("metric", self.metric.compute())
        if len(self.few) == 2:
            self.log("few", sum(self.few) / 2, reduce_fx="max")
            self.few.clear()

    def end(self):
        self.seen.clear()
        self.few.clear()
        self.metric.reset()


class TwoSources(Blobs):
    """Validates and tests on a large source and on a small one, which not all clients share."""

    def val_dataloader(self):
        return [DataLoader(blobs(80, 1), batch_size=7), DataLoader(blobs(5, 2), batch_size=3)]

    def test_dataloader(self):
        return tuple(reversed(self.val_dataloader()))


class OfLoaders(Gathers):
    """Gathers in a list per loader, in a metric of all loaders and in numbers of its own, and has hooks around."""

    MEANS = ("largest_0", "largest_1", "right", "starts", "seen", "twice_0", "twice_1")
    OF_CLIENTS, DATA = {"own_0": max, "own_1": max}, TwoSources

    def start(self):
        self.losses, self.accuracy = [[], []], accuracy()
        self.right, self.starts = 0, 0

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + dataloader_idx, batch[1]]

    def on_validation_batch_start(self, batch, batch_idx, dataloader_idx=0):
        self.starts += 1 + dataloader_idx

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return self.add(self(batch[0]), batch[1], (batch_idx, dataloader_idx))

    test_step = validation_step

    def add(self, logits, y, place):
        index, loader = place
        loss = F.cross_entropy(logits, y)
        self.losses[loader].append(loss)
        self.accuracy(logits, y)
        self.right += int(hits(logits, y))
        self.log("acc", self.accuracy)
        self.log("loss", loss)
        self.log(f"own_{loader}", float(index), add_dataloader_idx=False, reduce_fx="max")

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.log("ends", 1.0 + dataloader_idx, on_epoch=True, reduce_fx="sum")

    on_test_batch_start, on_test_batch_end = on_validation_batch_start, on_validation_batch_end

    def end(self):
        for k, losses in enumerate(self.losses):
            if losses:
                self.log(f"largest_{k}", max(losses))
            losses.clear()
        batches = self.trainer.num_test_batches if self.trainer.testing else self.trainer.num_val_batches
        self.log_dict({"right": float(self.right), "starts": float(self.starts), "seen": float(sum(batches))})
        for k in (0, 1):
            if (value := self.trainer.callback_metrics.get(f"acc/dataloader_idx_{k}")) is not None:
                self.log(f"twice_{k}", 2 * value)
        self.right = self.starts = 0


KINDS = (Logs, Metrics, Lists, UsesUp, Locked, Counts, Sums, Objects, Wrappers, ReadsInSteps, OfLoaders)


class BestOfLists(Lists):
    """The best of all evaluations in a plain number, of what is in a list."""

    def start(self):
        super().start()
        self.best = -1.0

    def end(self):
        self.best = max(self.best, float(torch.cat(self.outputs).mean()))
        self.log("acc_best", self.best)
        super().end()
