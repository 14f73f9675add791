# SPDX-License-Identifier: Apache-2.0
"""Where the data to be federated comes from: a user's LightningDataModule, or plain datasets made to look like one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_lightning._lightning import LightningDataModule, lightning_module
from fl_lightning.data.labels import num_samples

if TYPE_CHECKING:
    AnyDataset = Dataset[Any]
else:
    AnyDataset = Dataset  # jsonargparse accepts no arguments of a subclass of `Dataset[Any]`


class DatasetModule(LightningDataModule):
    """Plain datasets as a LightningDataModule; the training set is shuffled.

    Args:
        datasets: dataset of each stage: ``"train"`` and any of ``"val"``, ``"test"``, ``"predict"``.
        batch_size: samples per training batch.
        eval_batch_size: samples per batch of the other stages.
    """

    def __init__(self, datasets: dict[str, Dataset[Any]], batch_size: int, eval_batch_size: int) -> None:
        super().__init__()
        self.datasets = datasets
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        hide(self, [f"{stage}_dataloader" for stage in ("val", "test", "predict") if stage not in datasets])

    def train_dataloader(self) -> DataLoader[Any]:
        """The training set, shuffled."""
        return DataLoader(self.datasets["train"], self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation set."""
        return DataLoader(self.datasets["val"], self.eval_batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        """The test set."""
        return DataLoader(self.datasets["test"], self.eval_batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The data to predict."""
        return DataLoader(self.datasets["predict"], self.eval_batch_size)


def defines(module: LightningDataModule, method: str) -> bool:
    """Whether a data module has its own version of one of Lightning's methods, as Lightning sees it."""
    return bool(lightning_module("utilities.model_helpers").is_overridden(method, module))


def hide(module: LightningDataModule, methods: Iterable[str]) -> None:
    """Makes Lightning see its own versions of methods that a class defines but this instance has no use for.

    Lightning asks whether a method differs from its base class to decide, for instance, whether there is a validation
    set. It looks through ``partial``, which unlike a bound method survives pickling with the function it was given.
    """
    for method in methods:
        setattr(module, method, partial(getattr(LightningDataModule, method), module))


def check_dataset(name: str, dataset: object) -> None:
    """Refuses what cannot be divided among clients.

    Raises:
        TypeError: not a map-style dataset; the message says what was found.
    """
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} must be a map-style dataset, found the IterableDataset {type(dataset).__name__}: clients need "
            "samples that can be picked by index"
        )
    if any(base.__name__ == "LightningDataModule" for base in type(dataset).__mro__):
        found = next(base for base in type(dataset).__mro__ if base.__name__ == "LightningDataModule")
        raise TypeError(
            f"{name} must be a {LightningDataModule.__module__.split('.')[0]} LightningDataModule, found one of "
            f"{found.__module__.split('.')[0]}: set FL_LIGHTNING_TREE=pytorch_lightning or lightning.pytorch to match"
        )
    if isinstance(dataset, DataLoader) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} must be a LightningDataModule or a dataset with a length and integer indices, "
            f"found {type(dataset).__name__}"
        )
    num_samples(dataset)


def only_loader(loaders: Any) -> Any:
    """Takes the loader out of a list of one, which Lightning treats like the loader itself in evaluation."""
    return loaders[0] if isinstance(loaders, (list, tuple)) and len(loaders) == 1 else loaders
