# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules as other projects write them, and what becomes of them over a fit."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from support import Classifier, blobs, quiet_trainer
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader

import fl_lightning as fl


class Rated(Classifier):
    """Notes what a step sees: learning rate, ``global_step``, batch, and whether it is the last."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: Seen | None = Seen()

    def training_step(self, batch, batch_idx):
        if self.seen is not None:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.seen.rows.append((rate, self.global_step, batch_idx, self.trainer.is_last_batch))
            self.seen.batches.add(self.trainer.num_training_batches)
        return super().training_step(batch, batch_idx)


def hooked(module: type[Rated]) -> type[Rated]:
    """The module with a hook after every batch, so that its steps go the full path; it notes what the hook sees."""

    class Hooked(module):
        def on_train_batch_end(self, *_):
            self.seen.after.append((self.trainer.optimizers[0].param_groups[0]["lr"], self.global_step))

    return Hooked


class Seen:
    """Changes inside, so that the module stays the same."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, int, int, bool]] = []
        self.after: list[tuple[float, int]] = []
        self.batches: set[int | float] = set()


class Glue(Rated):
    """Linear warm-up and decay, as Lightning's text classification of GLUE has them from transformers."""

    title = "linear warm-up and decay per step (GLUE, transformers)"

    warmup = 7

    def configure_optimizers(self):
        optimizer, total = AdamW(self.parameters(), lr=0.01, eps=1e-8), self.trainer.estimated_stepping_batches

        def factor(step):
            if step < self.warmup:
                return step / max(1, self.warmup)
            return max(0.0, (total - step) / max(1, total - self.warmup))

        return [optimizer], [{"scheduler": LambdaLR(optimizer, factor), "interval": "step", "frequency": 1}]


class OneCycle(Rated):
    """torch's one-cycle policy, as in Lightning's documentation; it moves Adam's betas, too."""

    title = "`OneCycleLR` over `estimated_stepping_batches`"

    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=0.001)
        schedule = OneCycleLR(optimizer, max_lr=0.02, total_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Cosine(Rated):
    """Cosine annealing over all steps, as segmentation-models-pytorch's examples do."""

    title = "`CosineAnnealingLR` per step (segmentation-models-pytorch)"

    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=0.02)
        steps = self.trainer.max_epochs * self.trainer.num_training_batches
        if steps == float("inf"):
            steps = self.trainer.estimated_stepping_batches
        schedule = CosineAnnealingLR(optimizer, T_max=steps, eta_min=1e-5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1}}


class Noam(Rated):
    """Linear up, exponential down, as chemprop counts its warm-up and cool-down epochs."""

    title = "Noam-like, counted in epochs (chemprop)"

    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=1e-4)
        if self.trainer.train_dataloader is None:
            self.trainer.estimated_stepping_batches  # noqa: B018 (loads the data, as chemprop does)
        per_epoch = self.trainer.num_training_batches
        warmup, cooldown = 2 * per_epoch, (self.trainer.max_epochs - 2) * per_epoch
        slope, gamma = (1e-3 - 1e-4) / warmup, (1e-4 / 1e-3) ** (1 / cooldown)

        def factor(step):
            if step < warmup:
                return (step * slope + 1e-4) / 1e-4
            return 10 * gamma ** (step - warmup) if step < warmup + cooldown else 1.0

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}


class PerStep(Rated):
    """neuralforecast's: a third of ``max_steps`` each at a lower rate; the optimizer is Adam."""

    title = "`StepLR` per step (neuralforecast)"

    def configure_optimizers(self):
        optimizer = Adam(self.parameters(), lr=0.01)
        size = max(1, int(self.trainer.estimated_stepping_batches) // 3)
        schedule = StepLR(optimizer, step_size=size, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1}}


class Wrapped(Rated):
    """One schedule after another, every second step."""

    title = "`SequentialLR` every second step"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        first = LambdaLR(optimizer, lambda step: min(1.0, 0.1 + step / 10))
        schedule = SequentialLR(optimizer, [first, CosineAnnealingLR(optimizer, 30)], milestones=[9])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


class WarmUp(LRScheduler):
    """Goes up, then hands over to another schedule, as warm-up packages outside torch do."""

    def __init__(self, optimizer: Optimizer, after: LRScheduler) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < 5:
            return [rate * self.last_epoch / 5 for rate in self.base_lrs]
        return self.after.get_last_lr()

    def step(self, epoch=None):
        if self.last_epoch >= 5:
            self.after.step()
        super().step(epoch)


class Remembering:
    """A lambda that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / self.calls


class Inner(Rated):
    """A schedule inside another one."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = WarmUp(optimizer, CosineAnnealingLR(optimizer, 30))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counted(Rated):
    """A schedule with a memory of its own."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": LambdaLR(optimizer, Remembering()), "interval": "step"}]


class ByHand(Rated):
    """Manual optimization: ``sch.step()`` after every step of the optimizer."""

    title = "`ExponentialLR`, `sch.step()` by hand after every batch"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.take(loss)
        self.lr_schedulers().step()

    def take(self, loss):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        optimizer: Optimizer = Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)]


class ByHandLast(ByHand):
    """Manual optimization: ``if trainer.is_last_batch: sch.step()``, as in Lightning's documentation."""

    title = "`ExponentialLR`, `if trainer.is_last_batch: sch.step()`"

    def training_step(self, batch, batch_idx):
        self.take(Rated.training_step(self, batch, batch_idx))
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


SCHEDULES = (Glue, OneCycle, Cosine, Noam, PerStep, Wrapped, ByHand, ByHandLast)


class Ordered(L.LightningDataModule):
    """The blobs in their order, which one client and plain Lightning then share."""

    def __init__(self, samples: int = 105, batch_size: int = 10) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def train_dataloader(self):
        return DataLoader(blobs(self.samples), batch_size=self.batch_size)


def plain_fit(module: L.LightningModule, data: L.LightningDataModule, rounds: int, **options: Any) -> L.Trainer:
    """The same without a federation."""
    options = {"limit_val_batches": 0, **options}
    trainer = quiet_trainer("auto", rounds, **options)  # type: ignore[arg-type]
    trainer.fit(module, data)
    return trainer


def one_client_fit(
    module: L.LightningModule, data: L.LightningDataModule, rounds: int, strategy: dict[str, Any] | None = None,
    **options: Any,
) -> L.Trainer:  # fmt: skip
    """One client has all data and keeps its optimizer."""
    chosen = {"client_optimizer_state": "keep", **(strategy or {})}
    trainer = quiet_trainer(fl.FederatedStrategy(**chosen), rounds, limit_val_batches=0, **options)
    trainer.fit(module, fl.FederatedDataModule(data, fl.data.IID(1)))
    return trainer


def final_rate(trainer: L.Trainer) -> float:
    """The learning rate after the fit."""
    return float(trainer.optimizers[0].param_groups[0]["lr"])
