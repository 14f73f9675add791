# SPDX-License-Identifier: Apache-2.0
"""The data module that divides an ordinary one among clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.arguments import ANY, FILLED, Bounds, check, check_unused, checked
from fl_lightning.core.records import numbered
from fl_lightning.data.client_loaders import ClientLoaders, VisitLoader
from fl_lightning.data.division import Division
from fl_lightning.data.matched_split import label_counts
from fl_lightning.data.partitions import Partition
from fl_lightning.data.sources import STAGES, AnyDataset, StageLoaders, check_dataset, hide
from fl_lightning.lightning.epoch_loop import running_host
from fl_lightning.lightning.inspection import TRANSFER_HOOKS, is_overridden, log_hyperparameters_like
from fl_lightning.lightning.names import LightningDataModule, LightningModule, Trainer


class FederatedDataModule(LightningDataModule):
    """Divides the data of an unchanged LightningDataModule, of loaders or of datasets among clients.

    The wrapped module's loaders are asked for as ever; their datasets are divided and their settings (batch size,
    collate function, workers, ``drop_last``, whether they shuffle) apply within each client. All hooks are forwarded,
    and attributes that this class does not have are looked up in the wrapped module.

    The division is made once per ``setup("fit")`` and kept for validation and test. Where evaluation runs without a
    fit, the wrapped module is set up for fitting as well, because clients are defined by their training data.

    Args:
        data: a LightningDataModule with one training loader; or a LightningModule that has its loaders with it; or the
            training loader or dataset.
        partition: how to divide, or ready vectors of training sample indices, one per client.
        val: validation loader or dataset; only next to a training loader or dataset, as ``test`` and ``predict``.
        test: test loader or dataset.
        predict: loader or dataset for ``trainer.predict``, which is not divided.
        labels: one integer per training sample, or a function from a sample of any stage to its label, or the name of
            an attribute of every stage's dataset. Looked for by :func:`labels_of` if left out.
        batch_size: samples per training batch; default the loader's own, 32 for datasets.
        eval_batch_size: samples per validation and test batch; default the loader's own, ``batch_size`` for datasets.
        evaluation: ``"matched"`` gives each client the evaluation data with its key, where :class:`ByKey` divides, and
            otherwise evaluation data that follows its training labels;
            ``"independent"`` applies the partition anew to the evaluation data; ``"shared"`` evaluates every client on
            all of it.
        holdout: share of each client's training data to set aside for evaluation, where ``data`` has none. It goes
            through the training dataset's transforms.
        holdout_stage: whether this share is the validation or the test data.
        seed: decides the division.

    Raises:
        TypeError: ``data`` or a dataset cannot be divided.
        ValueError: arguments contradict one another; the message names them.
    """

    @checked(
        data=ANY, partition=ANY, val=ANY, test=ANY, predict=ANY, labels=FILLED, batch_size=Bounds(1),
        eval_batch_size=Bounds(1), holdout=Bounds(0, below=1),
    )  # fmt: skip
    def __init__(
        self,
        data: LightningDataModule | LightningModule | AnyDataset,
        partition: Partition | Sequence[Tensor] | Sequence[Sequence[int]],
        *,
        val: AnyDataset | None = None,
        test: AnyDataset | None = None,
        predict: AnyDataset | None = None,
        labels: Tensor | Sequence[int] | Callable[[Any], int] | str | None = None,
        batch_size: int | None = None,
        eval_batch_size: int | None = None,
        evaluation: Literal["matched", "independent", "shared"] = "matched",
        holdout: float = 0.0,
        holdout_stage: Literal["val", "test"] = "val",
        seed: int = 0,
    ) -> None:
        super().__init__()
        given = {name: s for name, s in (("val", val), ("test", test), ("predict", predict)) if s is not None}
        if isinstance(data, (LightningDataModule, LightningModule)):
            if given:
                raise ValueError(f"{', '.join(given)} must come from the module {type(data).__name__} itself")
            self.data: LightningDataModule = (
                data if isinstance(data, LightningDataModule) else StageLoaders.of_module(data)
            )
        else:
            for name, dataset in (("data", data), *given.items()):
                check_dataset(name, dataset)
            size = batch_size or 32
            self.data = StageLoaders.of_datasets({"train": data, **given}, size, eval_batch_size or size)
        check("partition of FederatedDataModule", partition, Partition | Sequence[Any], FILLED)
        if evaluation == "independent" and not isinstance(partition, Partition):
            raise ValueError("evaluation must be 'matched' or 'shared' for ready index vectors, found 'independent'")
        offers = [stage for stage in STAGES if is_overridden(f"{stage}_dataloader", self.data)]
        if holdout and holdout_stage in offers:
            raise ValueError(f"holdout must be 0 where data has {holdout_stage} data of its own, found {holdout}")
        if not holdout:
            check_unused("holdout_stage", holdout_stage, "val", "without holdout")
            if not {"val", "test", "predict"}.intersection(offers):
                check_unused("eval_batch_size", eval_batch_size, None, "where there are no evaluation data")
        if not {"val", "test"}.intersection(offers):
            check_unused("evaluation", evaluation, "matched", "where there are no evaluation data to divide")
        if "train" not in offers:
            raise ValueError(f"data must define train_dataloader, found {type(data).__name__} without it")
        self.partition = partition
        self.seed = seed
        aside = (holdout_stage if holdout else None, holdout)
        sizes = {"train": batch_size, "val": eval_batch_size, "test": eval_batch_size}
        self._division = Division(self.data, partition, labels, evaluation, aside, sizes, seed)
        self.name, self.prepare_data_per_node = self.data.name, self.data.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            self.data.allow_zero_length_dataloader_with_multiple_devices
        )
        log_hyperparameters_like(self, self.data)
        has = ["train", *offers, holdout_stage] if holdout else ["train", *offers]
        hide(self, [f"{stage}_dataloader" for stage in STAGES if stage not in has])
        for hook in TRANSFER_HOOKS:
            if is_overridden(hook, self.data):
                setattr(self, hook, getattr(self.data, hook))

    @property
    def trainer(self) -> Trainer | None:
        """The trainer in use, known to the wrapped module as well."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        if "data" in self.__dict__:
            self.data.trainer = trainer

    @property
    def hparams(self) -> Any:
        """The wrapped module's hyperparameters, so that logs and checkpoints hold what they always held."""
        return self.data.hparams

    @property
    def hparams_initial(self) -> Any:
        """The wrapped module's hyperparameters as they were saved."""
        return self.data.hparams_initial

    def __getattr__(self, name: str) -> Any:
        # Modules read `self.trainer.datamodule.num_classes` and the like.
        if name.startswith("_") or "data" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.data, name)

    @checked(seed=Bounds(0))
    def divided_anew(self, seed: int) -> FederatedDataModule:
        """The same data divided by another seed; the wrapped module is shared.

        Args:
            seed: decides the division.
        """
        found = copy(self)
        found.seed, found._division = seed, self._division.anew(seed)
        hidden = [name for name, value in vars(self).items() if isinstance(value, partial) and value.args == (self,)]
        hide(found, hidden)
        return found

    @property
    def num_clients(self) -> int:
        """Number of clients; divides the data if that has not been done."""
        return len(self._division.train_parts)

    @property
    def client_sizes(self) -> Tensor:
        """``[N]`` int64 training samples per client, without what is held out."""
        return self._division.train_parts.sizes

    @property
    def client_names(self) -> tuple[str, ...]:
        """What people call the clients: the keys of :class:`ByKey`, otherwise their numbers."""
        names = self._division.train_parts.names
        return tuple(numbered(self.num_clients)) if names is None else names

    def client_labels(self, client_id: int) -> Tensor:
        """``[n]`` int64 labels of the client's training samples.

        Raises:
            IndexError: there is no such client.
            ValueError: the data has no integer labels.
        """
        part = self._division.train_parts[client_id]
        return self._division.train_samples.labels[part]

    def label_counts(self) -> Tensor:
        """``[N, C]`` training samples of each client in each class, the classes in ascending order.

        Raises:
            ValueError: the data has no integer labels.
        """
        return label_counts(self._division.train_samples.labels, list(self._division.train_parts))

    def known_label_counts(self) -> tuple[tuple[str, ...], Tensor] | None:
        """What the classes are called, and :meth:`label_counts`; ``None`` if that took a pass over the samples.

        Classes have the names in the dataset's attribute ``classes``, as torchvision's datasets do, or else their
        numbers.
        """
        samples = self._division.train_samples
        if not samples.labels_known:
            return None
        found, names = torch.unique(samples.labels).tolist(), getattr(samples.dataset, "classes", None)
        if isinstance(names, (list, tuple)) and found and found[0] >= 0 and found[-1] < len(names):
            return tuple(str(names[label]) for label in found), self.label_counts()
        return tuple(map(str, found)), self.label_counts()

    def summary(self) -> str:
        """One sentence about the clients' training data."""
        return self._division.train_parts.summary()

    def __repr__(self) -> str:
        how = self.partition if isinstance(self.partition, Partition) else f"{len(self.partition)} index vectors"
        text = f"{type(self).__name__}({type(self.data).__name__}, {how}, seed={self.seed})"
        return f"{text}: {self.summary()}" if self._division.done else text

    __str__ = __repr__

    def prepare_data(self) -> None:
        """Prepares the wrapped module."""
        self.data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Sets the wrapped module up; ``"fit"`` makes the clients anew."""
        self.data.setup(stage)  # type: ignore[arg-type]
        self._division.renew(stage)

    def teardown(self, stage: str) -> None:
        """Tears the wrapped module down; the clients are kept."""
        self.data.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        """Tells the wrapped module."""
        self.data.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped module's state; the division needs none, it follows from the data and the seed."""
        return self.data.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the wrapped module's state."""
        self.data.load_state_dict(state_dict)

    def train_dataloader(self) -> ClientLoaders:
        """All clients' training data; in a fit, as modules see them."""
        loaders = self._division.train()
        host = None if self.trainer is None else running_host(self.trainer)
        return loaders if host is None else VisitLoader(loaders, host.visit_batches)

    def val_dataloader(self) -> ClientLoaders | list[Any]:
        """All clients' validation data: of each loader that the wrapped module returns, in a list unless it is one."""
        return self._division.evaluation("val")

    def test_dataloader(self) -> ClientLoaders | list[Any]:
        """All clients' test data, as :meth:`val_dataloader`."""
        return self._division.evaluation("test")

    def predict_dataloader(self) -> Any:
        """The wrapped module's own loaders: predictions are not made per client."""
        return self.data.predict_dataloader()
