# SPDX-License-Identifier: Apache-2.0
"""Where the data to be federated comes from: a LightningDataModule, or what is made to look like one.

That is loaders, datasets, or a LightningModule that has its loaders with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from fl_lightning.core.lightning.inspection import is_overridden
from fl_lightning.core.lightning.names import LightningDataModule, LightningModule
from fl_lightning.data.labels import num_samples

_LOADERS = tuple(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict"))

if TYPE_CHECKING:
    AnyDataset = Dataset[Any] | DataLoader[Any]
else:
    AnyDataset = Dataset | DataLoader  # jsonargparse accepts no arguments of a subclass of `Dataset[Any]`


class DatasetModule(LightningDataModule):
    """Datasets and DataLoaders as a LightningDataModule. A training set is shuffled; loaders are taken as they are.

    Args:
        datasets: dataset or loader of each stage: ``"train"`` and any of ``"val"``, ``"test"``, ``"predict"``.
        batch_size: samples per training batch of a dataset.
        eval_batch_size: samples per batch of the other stages' datasets.
    """

    def __init__(self, datasets: dict[str, AnyDataset], batch_size: int, eval_batch_size: int) -> None:
        super().__init__()
        self.datasets = datasets
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        hide(self, [f"{stage}_dataloader" for stage in ("val", "test", "predict") if stage not in datasets])

    def _loader(self, stage: str) -> DataLoader[Any]:
        data = self.datasets[stage]
        if isinstance(data, DataLoader):
            return data
        if stage == "train":
            return DataLoader(data, batch_size=self.batch_size, shuffle=True)
        # By its name: for predictions Lightning makes the loader anew with a batch sampler in place of the size.
        return DataLoader(data, batch_size=self.eval_batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        """The training data."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Any]:
        """The validation data."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        """The test data."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """The data to predict."""
        return self._loader("predict")


class ModuleLoaders(LightningDataModule):
    """The loaders that a LightningModule has with it, as a LightningDataModule.

    Where the module is the one that the trainer runs, Lightning prepares it and sets it up, and nothing is done twice.

    Args:
        module: a LightningModule with ``train_dataloader`` and perhaps other loaders.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        hide(self, [name for name in _LOADERS if not defines(module, name)])

    def _runs(self) -> bool:
        return self.trainer is not None and self.trainer.lightning_module is self.module

    def prepare_data(self) -> None:
        """Prepares the module's data, unless Lightning does."""
        if not self._runs():
            self.module.prepare_data()

    def setup(self, stage: str) -> None:
        """Sets the module up, unless Lightning does."""
        if not (self._runs() and self.trainer is not None and self.trainer.state.fn == stage):
            self.module.setup(stage)

    def train_dataloader(self) -> Any:
        """The module's training loader."""
        return self.module.train_dataloader()

    def val_dataloader(self) -> Any:
        """The module's validation loader."""
        return self.module.val_dataloader()

    def test_dataloader(self) -> Any:
        """The module's test loader."""
        return self.module.test_dataloader()

    def predict_dataloader(self) -> Any:
        """The module's loader of what to predict."""
        return self.module.predict_dataloader()


def defines(module: LightningDataModule | LightningModule, method: str) -> bool:
    """Whether a module has its own version of one of Lightning's methods, as Lightning sees it."""
    return is_overridden(method, module)


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
        TypeError: neither a loader nor a map-style dataset; the message says what was found.
    """
    if isinstance(dataset, DataLoader):
        return  # LoaderSettings looks at it
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} must be a map-style dataset, found the IterableDataset {type(dataset).__name__}: clients need "
            "samples that can be picked by index"
        )
    for base in type(dataset).__mro__:
        if base.__name__ in ("LightningDataModule", "LightningModule"):
            raise TypeError(
                f"{name} must be a {LightningDataModule.__module__.split('.')[0]} {base.__name__}, found one of "
                f"{base.__module__.split('.')[0]}: set FL_LIGHTNING_TREE=pytorch_lightning or lightning.pytorch to "
                "match"
            )
    items = dataset.values() if isinstance(dataset, Mapping) else dataset if isinstance(dataset, (list, tuple)) else ()
    if any(isinstance(item, DataLoader) for item in items):
        raise TypeError(
            f"{name} must be one DataLoader, found {len(items)} of them: clients can be formed from a single "
            "dataset, so join several with ConcatDataset"
        )
    # A dict has a length whatever its keys are.
    if not hasattr(dataset, "__getitem__") or (isinstance(dataset, Mapping) and 0 not in dataset):
        raise TypeError(
            f"{name} must be a LightningDataModule, a LightningModule that has loaders, a DataLoader, or a dataset "
            f"with a length and integer indices, found {type(dataset).__name__}"
        )
    num_samples(dataset)


def loader_name(module: LightningDataModule, stage: str) -> str:
    """The name of a stage's loader in errors, as the user wrote it."""
    if isinstance(module, DatasetModule):
        return "data" if stage == "train" else stage
    owner = module.module if isinstance(module, ModuleLoaders) else module
    return f"{type(owner).__name__}.{stage}_dataloader()"


def only_loader(loaders: Any) -> Any:
    """Takes the loader out of a list of one, which Lightning treats like the loader itself in evaluation."""
    return loaders[0] if isinstance(loaders, (list, tuple)) and len(loaders) == 1 else loaders
