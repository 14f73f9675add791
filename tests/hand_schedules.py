# SPDX-License-Identifier: Apache-2.0
"""Learning rates as people write them by hand: in hooks, from the length of the loader, at the last batch."""

from __future__ import annotations

import torch
from schedules import Rated
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR, StepLR

RATE = 0.1


class ByHand(Rated):
    """SGD with momentum; what its hooks set is up to them."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, momentum=0.9)

    def training_step(self, batch, batch_idx):
        if self.seen is not None:
            self.seen.after.append((self.group["lr"], self.group["momentum"]))
        return super().training_step(batch, batch_idx)

    def scheduled(self, kind, *args, interval="step", **options):
        optimizer = ByHand.configure_optimizers(self)
        return [optimizer], [{"scheduler": kind(optimizer, *args, **options), "interval": interval}]

    @property
    def group(self):
        return self.trainer.optimizers[0].param_groups[0]


class OverLoader(ByHand):
    """The commonest one: cosine over all batches of all epochs."""

    def configure_optimizers(self):
        batches = len(self.trainer.datamodule.train_dataloader())
        return self.scheduled(CosineAnnealingLR, batches * self.trainer.max_epochs)


class OneCycle(ByHand):
    """Over the trainer's own loader, which raises after its last step."""

    def configure_optimizers(self):
        self.trainer.fit_loop.setup_data()
        batches = len(self.trainer.train_dataloader)
        return self.scheduled(OneCycleLR, 0.2, epochs=self.trainer.max_epochs, steps_per_epoch=batches)


class WarmUp(ByHand):
    """As in Lightning's documentation: after a step, the rate of the next one."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            for group in optimizer.param_groups:
                group["lr"] = min(1.0, (self.trainer.global_step + 1) / 5) * RATE


class WarmUpAndSteps(WarmUp):
    """The same, and then a schedule over epochs."""

    def configure_optimizers(self):
        return self.scheduled(StepLR, 2, gamma=0.5, interval="epoch")


class WarmUpInBatches(ByHand):
    """Before every step, from the clock."""

    def on_train_batch_start(self, batch, batch_idx):
        self.group["lr"] = RATE * min(1.0, (self.global_step + 1) / 5)


class DecayAtLast(ByHand):
    """Once per epoch, at its last batch."""

    def on_train_batch_end(self, *_):
        if self.trainer.is_last_batch:
            self.group["lr"] *= 0.7


class DecayAfterEpoch(DecayAtLast):
    """The same, after a schedule over epochs has set the rate."""

    def configure_optimizers(self):
        return self.scheduled(LambdaLR, lambda epoch: 1 / (1 + epoch), interval="epoch")


class DecayAtNumber(ByHand):
    """The same, by counting; momentum and an option of its own move, too."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx + 1 == self.trainer.num_training_batches:
            self.group.update(lr=self.group["lr"] * 0.7, momentum=0.5, decays=self.group.get("decays", 0) + 1)


class DecayInSteps(ByHand):
    """In every step, without a hook: such fits take the lean path."""

    def training_step(self, batch, batch_idx):
        self.group["lr"] = max(self.group["lr"] * 0.95, 0.01)
        return super().training_step(batch, batch_idx)


class DecayBesideScheduler(ByHand):
    """A schedule per step that goes on from what was set by hand."""

    def configure_optimizers(self):
        return self.scheduled(ExponentialLR, 0.9)

    def on_train_batch_end(self, *_):
        if self.trainer.is_last_batch:
            self.group["lr"] *= 2


class OverClock(ByHand):
    """A lambda that reads the trainer's clock instead of its argument."""

    def configure_optimizers(self):
        return self.scheduled(LambdaLR, lambda _: 1 / (1 + self.trainer.global_step))


class InEpochs(ByHand):
    """Where a round begins and ends, outside of visits."""

    def on_train_epoch_start(self):
        self.group["lr"] = RATE / (1 + self.current_epoch)

    def on_train_epoch_end(self):
        self.group["momentum"] *= 0.9


HAND_SCHEDULES = (
    OverLoader, OneCycle, WarmUp, WarmUpAndSteps, WarmUpInBatches, DecayAtLast, DecayAfterEpoch, DecayAtNumber,
    DecayInSteps, DecayBesideScheduler, OverClock, InEpochs,
)  # fmt: skip
