# SPDX-License-Identifier: Apache-2.0
"""What ``self.log`` collects, without a search for tensors to move at every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.lightning.names import Trainer, lightning_module

if TYPE_CHECKING:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
else:
    _result = lightning_module("trainer.connectors.logger_connector.result")
    _ResultCollection = _result._ResultCollection
    _ResultMetric = _result._ResultMetric


class _SettledResult(_ResultMetric):
    """A logged tensor: its parts are all on one device."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and torch.device(args[0]) == self.value.device:
            return self
        return super().to(*args, **kwargs)


class SettledResults(_ResultCollection):
    """Lightning's collection, whose tensors are moved only where they are on another device.

    Lightning moves an entry at every call of ``self.log``, which takes ten times as long as all else that it does then.
    """

    def __setitem__(self, key: str, entry: _ResultMetric) -> None:
        if type(entry) is _ResultMetric and entry.is_tensor:
            entry.__class__ = _SettledResult  # Lightning makes it, by a name of its own module
        super().__setitem__(key, entry)


def settle_results(trainer: Trainer) -> None:
    """Lets the loops of a trainer collect in :class:`SettledResults`; what they hold already is lost."""
    for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop,
                 trainer.test_loop):  # fmt: skip
        loop._results = SettledResults(loop._results.training)
