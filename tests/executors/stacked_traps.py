# SPDX-License-Identifier: Apache-2.0
"""Modules that one pass over several clients would train wrongly, and the reasons why they are not."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from stacked_modules import Blob
from support import CLASSES, FEATURES
from torch import nn
from torchmetrics.classification import MulticlassAccuracy


class Dropout(Blob):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES)))


class Late(Blob):
    """Draws from the second round on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.current_epoch == 0 else loss + 0.1 * torch.rand(()) * self.net[0].weight.sum()


class Numpy(Blob):
    def training_step(self, batch, batch_idx):
        share = float(np.random.beta(0.5, 0.5))
        x, y = batch
        return F.cross_entropy(self.net(share * x + (1 - share) * x.flip(0)), y)


class Python(Blob):
    def training_step(self, batch, batch_idx):
        return random.random() * super().training_step(batch, batch_idx)


class Item(Blob):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) < 1 else 0.5 * loss


class Attribute(Blob):
    """A number that goes on from client to client."""

    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx) / self.steps


class Kept(Blob):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.detach())
        return loss


class Measured(Blob):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MulticlassAccuracy(CLASSES)

    def training_step(self, batch, batch_idx):
        self.metric.update(self.net(batch[0]).argmax(1), batch[1])
        return super().training_step(batch, batch_idx)


class LoggedMetric(Measured):
    def training_step(self, batch, batch_idx):
        loss = Blob.training_step(self, batch, batch_idx)
        self.log("accuracy", self.metric, on_step=False, on_epoch=True)
        return loss


class GlobalStep(Blob):
    """Warms up over all clients' steps."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * min(1.0, (1 + self.global_step) / 50)


class Cached(Blob):
    """Reads a parameter past the module, as recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = [self.net[0].weight]

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net[2](torch.relu(x @ self.flat[0].T + self.net[0].bias)), y)


class Nothing(Blob):
    """Leaves out a batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class GradientHook(Blob):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: 2 * gradient)


class BackwardHook(Blob):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_full_backward_hook(
            lambda module, before, after: tuple(2 * g for g in before if g is not None) or None
        )


class StepHook(Blob):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(
            lambda o, args, kwargs: [p.grad.clamp_(-0.01, 0.01) for g in o.param_groups for p in g["params"]] and None
        )
        return optimizer


RANDOM = "draws random numbers"
TRAPS = {
    "dropout": (Dropout, RANDOM),
    "late": (Late, RANDOM),
    "numpy": (Numpy, RANDOM),
    "python_random": (Python, RANDOM),
    "item": (Item, "in a pass over several clients"),
    "attribute": (Attribute, "changes the attribute steps"),
    "list": (Kept, "changes the attribute seen"),
    "metric": (Measured, "metric"),
    "logged_metric": (LoggedMetric, "logs a MulticlassAccuracy"),
    "global_step": (GlobalStep, "trainer.global_step"),
    "cached": (Cached, "other gradients than the clients alone"),
    "none": (Nothing, "must return one number"),
    "gradient_hook": (GradientHook, "gradient hooks"),
    "backward_hook": (BackwardHook, "backward hooks"),
    "step_hook": (StepHook, "somebody waits for the steps of SGD"),
}
