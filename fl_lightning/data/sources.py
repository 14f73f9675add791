# SPDX-License-Identifier: Apache-2.0
"""Where the data to be federated comes from: a LightningDataModule, or what is made to look like one.

That is loaders, datasets, a LightningModule that has its loaders with it, or what a Trainer was given. Data that cannot
be divided among clients are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
)

from fl_lightning.arguments import shown
from fl_lightning.data.labels import num_samples
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.names import LightningDataModule, LightningModule

STAGES = ("train", "val", "test", "predict")
ONE_DATASET = (
    "clients are formed from a single dataset, so join several with ConcatDataset; several to evaluate come in a list "
    "from val_dataloader or test_dataloader of a LightningDataModule"
)
"""What to do with several loaders, as the end of an error."""

if TYPE_CHECKING:
    AnyDataset = Dataset[Any] | DataLoader[Any]
else:
    AnyDataset = Dataset | DataLoader  # jsonargparse accepts no arguments of a subclass of `Dataset[Any]`


class StageLoaders(LightningDataModule):
    """Loaders from several places, stage by stage, as a LightningDataModule.

    An owner is a LightningModule or LightningDataModule with the stage's method, or the stage's loaders. Modules are
    prepared and set up, but for the one that the trainer runs, because Lightning does that.
    """

    def __init__(self, owners: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.owners = dict(owners)
        # What errors call loaders that are no module's; by default as Trainer.fit does.
        self.names = {stage: f"{stage}_dataloaders" for stage in STAGES} if names is None else names
        for stage in owners:
            setattr(self, f"{stage}_dataloader", partial(self._loaders, stage))

    @classmethod
    def of_module(cls, module: LightningModule) -> StageLoaders:
        """The loaders that a LightningModule has with it."""
        return cls({stage: module for stage in STAGES if is_overridden(f"{stage}_dataloader", module)})

    @classmethod
    def of_datasets(cls, datasets: Mapping[str, AnyDataset], batch_size: int, eval_batch_size: int) -> StageLoaders:
        """Loaders of datasets, which shuffle in training alone; what is a loader is taken as it is."""
        sizes = {"train": batch_size}
        owners = {
            stage: data
            if isinstance(data, DataLoader)
            else DataLoader(data, batch_size=sizes.get(stage, eval_batch_size), shuffle=stage == "train")
            for stage, data in datasets.items()
        }
        return cls(owners, {stage: "data" if stage == "train" else stage for stage in owners})

    def _modules(self) -> list[Any]:
        modules = {id(owner): owner for owner in self.owners.values() if is_module(owner)}
        return list(modules.values())

    def _runs(self, module: object) -> bool:
        return self.trainer is not None and self.trainer.lightning_module is module

    def prepare_data(self) -> None:
        """Prepares the modules' data, unless Lightning does."""
        for module in self._modules():
            if not self._runs(module):
                module.prepare_data()

    def setup(self, stage: str) -> None:
        """Sets the modules up, unless Lightning does."""
        for module in self._modules():
            if not (self._runs(module) and self.trainer is not None and self.trainer.state.fn == stage):
                module.setup(stage)

    def _loaders(self, stage: str) -> Any:
        owner = self.owners[stage]
        return getattr(owner, f"{stage}_dataloader")() if is_module(owner) else owner


def is_module(owner: object) -> bool:
    """Whether loaders are to be asked for, rather than there."""
    return isinstance(owner, (LightningModule, LightningDataModule))


def hide(module: LightningDataModule, methods: Iterable[str]) -> None:
    """Makes Lightning see its own versions of methods that a class defines but this instance has no use for.

    Lightning looks through ``partial``, which unlike a bound method survives pickling with the function it was given.
    """
    for method in methods:
        setattr(module, method, partial(getattr(LightningDataModule, method), module))


def check_dataset(name: str, dataset: object) -> None:
    """Refuses what cannot be divided among clients."""
    if isinstance(dataset, DataLoader):
        return  # Division looks at it
    for base in type(dataset).__mro__:
        if base.__name__ in ("LightningDataModule", "LightningModule"):
            raise TypeError(
                f"{name} must be a {LightningDataModule.__module__.split('.')[0]} {base.__name__}, found one of "
                f"{base.__module__.split('.')[0]}: set FL_LIGHTNING_TREE=pytorch_lightning or lightning.pytorch to "
                "match"
            )
    items = dataset.values() if isinstance(dataset, Mapping) else dataset if isinstance(dataset, (list, tuple)) else ()
    # Two arrays, or a tuple of them, are inputs and targets rather than samples.
    pair = isinstance(dataset, tuple) or (isinstance(dataset, list) and len(dataset) == 2)
    columns = items if pair else (dataset,)
    if columns and all(isinstance(column, (Tensor, np.ndarray)) for column in columns):
        raise TypeError(
            f"{name} must be a dataset or a module with loaders, found {shown(dataset)}: wrap inputs and targets, "
            "torch.utils.data.TensorDataset(torch.as_tensor(inputs), torch.as_tensor(targets))"
        )
    if any(isinstance(item, DataLoader) for item in items):
        raise TypeError(f"{name} must be one DataLoader, found {len(items)} of them: {ONE_DATASET}")
    # A dict has a length whatever its keys are.
    keyed = isinstance(dataset, (str, bytes)) or (isinstance(dataset, Mapping) and 0 not in dataset)
    if keyed or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{name} must be a LightningDataModule, a LightningModule that has loaders, a DataLoader, or a dataset "
            f"with a length and integer indices, found {type(dataset).__name__}"
        )
    if num_samples(dataset, name) == 0:
        raise ValueError(f"{name} must hold at least one sample, found {shown(dataset)}")
