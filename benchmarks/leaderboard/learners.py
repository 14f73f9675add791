# SPDX-License-Identifier: Apache-2.0
"""What clients train: a network whose last module is its head, with all that any method asks of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

import fl_lightning as fl
from benchmarks.leaderboard.ranking import HeldAUROC
from fl_lightning.metrics import DemographicParity, EqualizedOdds


class Learner(fl.ClientModule):
    """A classifier on batches ``(inputs, labels)`` that also logs ``test_auroc``.

    Args:
        network: makes the network, a sequence of modules that ends with the head.
        rounds: of the fit. The learning rate falls to a tenth by then, so that the last rounds say less by chance.
        lr: learning rate of plain SGD in the first round.
        num_classes: number of logits.
    """

    def __init__(self, network: Callable[[], nn.Sequential], rounds: int, lr: float, num_classes: int = 10) -> None:
        super().__init__(
            network(),
            optimizer=partial(torch.optim.SGD, lr=lr),
            lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.1 ** (1 / rounds)),
            num_classes=num_classes,
        )
        self.test_metrics["auroc"] = HeldAUROC()  # in the test alone: sorting scores takes long

    def federated_features(self, batch: Any) -> tuple[Tensor, Tensor]:
        """What the head gets, and the classes."""
        features: Tensor = cast("nn.Sequential", self.net)[:-1](batch[0])
        return features, batch[1]


class PeopleLearner(Learner):
    """A binary classifier on batches ``(inputs, labels, groups)`` that also logs how groups are treated.

    Beside ``test_dp_gap`` and ``test_odds_gap`` these are, for each group, shares of the client's people: who belong to
    it (``test_members_0``), who do and are predicted 1 (``test_ones_0``), and who do and are predicted right
    (``test_right_0``).

    Args:
        network: as for :class:`Learner`, with two logits.
        rounds: as for :class:`Learner`.
        lr: as for :class:`Learner`.
        num_groups: of people.
    """

    def __init__(self, network: Callable[[], nn.Sequential], rounds: int, lr: float, num_groups: int = 2) -> None:
        super().__init__(network, rounds, lr, 2)
        self.num_groups = num_groups
        self.parity, self.odds = DemographicParity(num_groups), EqualizedOdds(num_groups)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        return super().training_step(batch[:2], batch_idx)

    def federated_accuracy(self, batch: Any, batch_idx: int) -> Tensor:
        """Share of the batch that is right."""
        return super().federated_accuracy(batch[:2], batch_idx)

    def federated_groups(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Score of class 1, labels and groups."""
        logits = self(batch[0])
        return logits[:, 1] - logits[:, 0], batch[1].float(), batch[2]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs loss and accuracy."""
        super().validation_step(batch[:2], batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Logs also how unequally the groups are treated."""
        super().test_step(batch[:2], batch_idx)
        inputs, labels, groups = batch
        predictions = self(inputs).argmax(1)
        self.parity.update(predictions, groups)
        self.odds.update(predictions, labels, groups)
        self.log("test_dp_gap", self.parity)
        self.log("test_odds_gap", self.odds)
        for group in range(self.num_groups):
            members = groups == group
            shares = {
                "members": members,
                "ones": members & (predictions == 1),
                "right": members & (predictions == labels),
            }
            for name, chosen in shares.items():
                self.log(f"test_{name}_{group}", chosen.float().mean(), batch_size=len(groups))
