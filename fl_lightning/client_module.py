# SPDX-License-Identifier: Apache-2.0
"""The ready LightningModule around a plain ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.arguments import Bounds, check
from fl_lightning.lightning.names import LightningModule


class ClientModule(LightningModule):
    """Local training of a plain network on batches ``(inputs, targets)``.

    It logs ``val_loss`` and ``test_loss``, and each metric under the same two prefixes. Nothing is logged in training,
    because a log call in every step costs as much as the step of a small network: the strategy logs the mean loss.

    Checkpoints hold the weights and ``num_classes``; pass the rest again:
    ``ClientModule.load_from_checkpoint(path, net=net)``.

    Args:
        net: maps the inputs of a batch to predictions.
        loss: maps predictions and targets to a scalar: a function or a module such as ``nn.CrossEntropyLoss``.
        optimizer: makes the client's optimizer from the parameters that require gradients.
        lr_scheduler: makes a scheduler from the optimizer; it steps once per epoch, which is once per round.
        num_classes: adds ``val_acc`` and ``test_acc``, the accuracy of class scores ``[batch, num_classes, ...]``
            against class indices ``[batch, ...]``.
        metrics: further metrics of predictions and targets by name; each stage gets its own copy.

    Raises:
        ValueError: ``num_classes`` is below 2, or ``metrics`` uses a name that the module logs itself.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module | Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1),
        lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        num_classes: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        super().__init__()
        # Not by @checked: save_hyperparameters looks for the arguments of a subclass one frame further up.
        net = check("net of ClientModule", net, nn.Module)
        loss = check("loss of ClientModule", loss, nn.Module | Callable[..., Tensor])
        optimizer = check("optimizer of ClientModule", optimizer, Callable[..., Optimizer])
        lr_scheduler = check("lr_scheduler of ClientModule", lr_scheduler, Callable[..., LRScheduler] | None)
        num_classes = check("num_classes of ClientModule", num_classes, int | None, Bounds(2))
        metrics = check("metrics of ClientModule", metrics, Mapping[str, Metric] | None)
        # Networks and callables would be pickled into the checkpoint, which then no longer loads with weights_only.
        self.save_hyperparameters(ignore=["net", "loss", "optimizer", "lr_scheduler", "metrics"])
        measured = dict(metrics or {})
        if num_classes is not None:
            if "acc" in measured:
                raise ValueError("metrics must not use the name 'acc' when num_classes is given, found both")
            measured["acc"] = MulticlassAccuracy(num_classes, average="micro")
        if "loss" in measured:
            raise ValueError("metrics must not use the name 'loss': the module logs its loss under it")
        self.net = net
        self.loss = loss
        self.num_classes = num_classes
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.val_metrics = nn.ModuleDict({name: metric.clone() for name, metric in measured.items()})
        self.test_metrics = nn.ModuleDict({name: metric.clone() for name, metric in measured.items()})

    def forward(self, inputs: Any) -> Any:
        """What the network makes of ``inputs``."""
        return self.net(inputs)

    def configure_optimizers(self) -> Any:
        """The client's optimizer, with its scheduler if there is one."""
        optimizer = self.optimizer(p for p in self.parameters() if p.requires_grad)
        if self.lr_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.lr_scheduler(optimizer)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        inputs, targets = _pair(batch)
        loss: Tensor = self.loss(self._scores(inputs), targets)
        return loss

    def federated_accuracy(self, batch: Any, batch_idx: int) -> Tensor:
        """Share of a batch of class scores ``[batch, num_classes, ...]`` that are right, for methods that ask for it.

        Raises:
            ValueError: the targets are no class indices ``[batch, ...]``.
        """
        inputs, targets = _pair(batch)
        predictions = self(inputs)
        if targets.is_floating_point() or targets.shape != predictions.shape[:1] + predictions.shape[2:]:
            raise ValueError(
                "targets must be class indices beside class scores [batch, num_classes, ...] for an accuracy, found "
                f"{targets.dtype} {tuple(targets.shape)} beside {tuple(predictions.shape)}"
            )
        accuracy: Tensor = (predictions.argmax(1) == targets).float().mean()
        return accuracy

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs ``val_loss`` and the metrics."""
        self._evaluate("val", self.val_metrics, batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Logs ``test_loss`` and the metrics."""
        self._evaluate("test", self.test_metrics, batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Predictions for a batch ``(inputs, targets)``, ``(inputs,)`` or ``inputs``."""
        return self(batch[0] if isinstance(batch, (tuple, list)) and len(batch) in (1, 2) else batch)

    def _scores(self, inputs: Any) -> Any:
        scores, wanted = self(inputs), self.num_classes
        if wanted is not None and isinstance(scores, Tensor) and (scores.dim() < 2 or scores.shape[1] != wanted):
            raise ValueError(
                f"num_classes of ClientModule must be the number of class scores of net, which returns "
                f"{list(scores.shape)}, found {wanted}"
            )
        return scores

    def _evaluate(self, stage: str, metrics: nn.ModuleDict, batch: Any) -> None:
        inputs, targets = _pair(batch)
        predictions = self._scores(inputs)
        self.log(f"{stage}_loss", self.loss(predictions, targets), prog_bar=True, batch_size=len(targets))
        for name, module in metrics.items():
            metric = cast("Metric", module)
            metric.update(predictions, targets)
            self.log(f"{stage}_{name}", metric, prog_bar=True, batch_size=len(targets))


def _pair(batch: Any) -> tuple[Any, Tensor]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        found = f"a mapping with the keys {sorted(map(str, batch))}"
    elif isinstance(batch, (tuple, list)):
        found = f"a {type(batch).__name__} of {', '.join(type(part).__name__ for part in batch) or 'nothing'}"
    else:
        found = type(batch).__name__
    raise TypeError(
        f"batch must be a pair (inputs, targets) with a tensor of targets, found {found}: "
        "write a LightningModule for other batches, it federates unchanged"
    )
