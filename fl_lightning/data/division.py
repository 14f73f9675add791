# SPDX-License-Identifier: Apache-2.0
"""Asks a data module for its loaders and decides which of their samples belong to whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from fl_lightning.arguments import trusted
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.client_indices import ClientIndices
from fl_lightning.data.client_loaders import ClientLoaders, LoaderSettings
from fl_lightning.data.labels import Labels, Samples, num_samples
from fl_lightning.data.matched_split import matched_split
from fl_lightning.data.partitions import Partition
from fl_lightning.data.sources import ONE_DATASET, StageLoaders, is_module
from fl_lightning.lightning.names import LightningDataModule, rank_zero_info


class Division:
    """The clients' shares of every stage, made when first needed and kept until the data module is set up again."""

    def __init__(
        self,
        data: LightningDataModule,
        partition: Partition | Sequence[Tensor] | Sequence[Sequence[int]],
        labels: Labels | None,  # see labels_of; vectors belong to the training data
        evaluation: str,
        holdout: tuple[str | None, float],  # stage and share of what is set aside from training
        batch_sizes: Mapping[str, int | None],  # per stage, None for the loader's own
        seed: int,
    ) -> None:
        self._data, self._partition, self._labels, self._evaluation = data, partition, labels, evaluation
        self._holdout_stage, self._holdout = holdout
        self._batch_sizes, self._seed, self._fit_ready = dict(batch_sizes), seed, False
        self._forget()

    def anew(self, seed: int) -> Division:
        """The same with another seed, not divided yet."""
        found = copy(self)
        found._seed, found._fit_ready = seed, False
        found._forget()
        return found

    def _forget(self) -> None:
        self._parts: dict[str, ClientIndices] = {}
        self._train: tuple[Samples, LoaderSettings] | None = None
        self._pending: ClientLoaders | None = None

    @property
    def done(self) -> bool:
        """Whether the training data has been divided."""
        return self._train is not None

    @property
    def train_parts(self) -> ClientIndices:
        """The clients' training samples, without what is held out."""
        self._divided()
        return self._parts["train"]

    @property
    def train_samples(self) -> Samples:
        """The training data of all clients."""
        return self._divided()[0]

    def renew(self, stage: str | None) -> None:
        """The data module was set up: its datasets may be new ones."""
        if stage in ("fit", None):
            self._fit_ready = True
            self._forget()
        gone = {"val", "test"} - {self._holdout_stage}
        self._parts = {name: parts for name, parts in self._parts.items() if name.split()[0] not in gone}

    def train(self) -> ClientLoaders:
        """All clients' training data, from a fresh loader of the data module."""
        self._divided()
        # Dividing asked for a loader already: a loader may be dear, so it is not asked for twice.
        loaders, self._pending = self._pending, None
        return self._ask() if loaders is None else loaders

    def evaluation(self, stage: Literal["val", "test"]) -> ClientLoaders | list[Any]:
        """All clients' evaluation data, of each loader if there are several; an empty list if there is none."""
        samples, settings = self._divided()
        size = self._batch_sizes[stage]
        if stage == self._holdout_stage:
            plain = replace(settings, shuffle=False, drop_last=False, batch_size=size or settings.batch_size)
            return trusted(ClientLoaders)(samples.dataset, self._parts[stage], stage, plain)
        loaders = _only_loader(getattr(self._data, f"{stage}_dataloader")())
        if loaders is None or loaders == []:
            return []
        if not isinstance(loaders, (list, tuple)):
            return self._of_loader(loaders, stage)
        found = [self._of_loader(loader, stage, place) for place, loader in enumerate(loaders)]
        if len({tuple(one.names) for one in found}) > 1:
            raise ValueError(
                f"evaluation must be 'matched' or 'shared' where the loaders of {_loader_name(self._data, stage)} have "
                f"different clients that training lacks, found {self._evaluation!r}"
            )
        return found

    def _of_loader(self, loader: Any, stage: Literal["val", "test"], place: int = 0) -> ClientLoaders:
        settings, name = self._settings(loader, stage), f"{stage} {place}" if place else stage
        parts = self._parts.get(name)
        if parts is None or parts.num_samples != num_samples(loader.dataset):
            self._parts[name] = parts = self._divide_evaluation(stage, loader.dataset, place)
        return trusted(ClientLoaders)(loader.dataset, parts, stage, settings)

    def _divided(self) -> tuple[Samples, LoaderSettings]:
        if self._train is None:
            if not self._fit_ready:
                self._data.setup("fit")
                self._fit_ready = True
            self._pending = self._ask()
        assert self._train is not None
        return self._train

    def _ask(self) -> ClientLoaders:
        """Takes a training loader from the data module, and divides its dataset the first time."""
        loader = self._data.train_dataloader()
        settings = self._settings(loader, "train")
        total = num_samples(loader.dataset)
        if self._train is None:
            samples = trusted(Samples)(loader.dataset, "train", self._labels)
            self._divide_training(samples)
            self._train = samples, settings
        elif self._parts["train"].num_samples != total:
            raise ValueError(
                f"train_dataloader must return as many samples as when clients were formed "
                f"({self._parts['train'].num_samples}) until the next setup, found {total}"
            )
        return trusted(ClientLoaders)(loader.dataset, self._parts["train"], "train", settings)

    def _settings(self, loader: Any, stage: str) -> LoaderSettings:
        settings = loader_settings(loader, _loader_name(self._data, stage))
        size = self._batch_sizes[stage]
        return settings if size is None else replace(settings, batch_size=size)

    def _divide_training(self, samples: Samples) -> None:
        how = self._partition
        vectors = how.divide(samples, derive_seed(self._seed, "partition")) if isinstance(how, Partition) else how
        names = how.names(samples) if isinstance(how, Partition) else None
        parts = ClientIndices(vectors, len(samples), names)
        if self._holdout_stage is not None:
            parts, self._parts[self._holdout_stage] = parts.hold_out(self._holdout, self._seed)
        self._parts["train"] = parts
        rank_zero_info(f"Federated data: {parts.summary()}")

    def _divide_evaluation(self, stage: str, dataset: Any, place: int) -> ClientIndices:
        train, parts, how = self.train_samples, self._parts["train"], self._partition
        total = num_samples(dataset)
        if self._evaluation == "shared":
            return ClientIndices.shared(total, len(parts), parts.names)
        if self._evaluation == "matched" and dataset is train.dataset and self._holdout_stage is None:
            return parts  # the same samples (forecasts of series that were trained on): everybody has their own
        seed = derive_seed(self._seed, "partition", stage, *([place] if place else []))
        given = self._labels if callable(self._labels) or isinstance(self._labels, str) else None
        samples = trusted(Samples)(dataset, stage, given)
        if not isinstance(how, Partition):
            return ClientIndices(matched_split(train.labels, list(parts), samples.labels, seed), total)
        if self._evaluation == "independent":
            return self._independent(how, samples, seed)
        return ClientIndices(how.match(train, list(parts), samples, seed), total, parts.names)

    def _independent(self, how: Partition, samples: Samples, seed: int) -> ClientIndices:
        parts = self._parts["train"]
        vectors, others = how.anew(self.train_samples, samples, seed)
        if others:
            rank_zero_info(
                f"Federated data: the {samples.stage} data has clients that are not in training, evaluated with the "
                f"global model: {', '.join(map(repr, others))}."
            )
        names = None if parts.names is None else (*parts.names, *others)
        return ClientIndices(vectors, len(samples), names, len(vectors) - len(others))


def loader_settings(loader: object, name: str = "loader") -> LoaderSettings:
    """Reads the settings of a DataLoader that visits every sample of a map-style dataset once, in order or shuffled.

    Errors call it ``name``: a TypeError if it is none, has an iteration of its own, or its dataset no length or
    indices; a ValueError if its batches or samples are chosen by something else than plain order or chance.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"{name} must be one torch DataLoader, found {type(loader).__name__}: {ONE_DATASET}")
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{name} must iterate as DataLoader does, found {kind.__name__} with an __iter__ of its own: put what "
            "it does into the dataset or collate_fn"
        )
    total = num_samples(loader.dataset, f"the dataset of {name}")
    fetch_batches = loader.batch_sampler is None
    batches: object = loader.sampler if fetch_batches else loader.batch_sampler
    if type(batches) is not BatchSampler:
        what = "batch_size=None and the sampler" if fetch_batches else "the custom batch sampler"
        raise ValueError(
            f"{name} must use batch_size=, found {what} {type(batches).__name__}: each client's batches are drawn "
            "from its own samples, which a BatchSampler over a SequentialSampler or RandomSampler allows"
        )
    context = loader.multiprocessing_context
    return trusted(LoaderSettings)(  # torch has checked them
        batch_size=int(batches.batch_size),
        shuffle=_shuffles(batches.sampler, total, name),
        drop_last=bool(batches.drop_last),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
        # A context cannot be pickled, its name can.
        multiprocessing_context=None if context is None else str(context.get_start_method()),
        prefetch_factor=loader.prefetch_factor,
        fetch_batches=fetch_batches,
    )


def _shuffles(sampler: object, total: int, name: str) -> bool:
    plain, shuffles = type(sampler) in (SequentialSampler, RandomSampler), isinstance(sampler, RandomSampler)
    found = "" if plain else f"the sampler {type(sampler).__name__}"
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        found = "RandomSampler(replacement=True)"
    elif plain and (visited := sampler.num_samples if shuffles else len(sampler)) != total:  # type: ignore
        found = f"a {type(sampler).__name__} of {visited}"
    if found:
        raise ValueError(
            f"{name} must visit all {total} samples of its dataset once per epoch, in order or with shuffle=True, "
            f"found {found}: choose samples with torch.utils.data.Subset instead"
        )
    return shuffles


def _loader_name(module: LightningDataModule, stage: str) -> str:
    """The name of a stage's loader in errors, as the user wrote it."""
    owner: Any = module
    if isinstance(module, StageLoaders):
        owner = module.owners[stage]
        if not is_module(owner):
            return module.names[stage]
    return f"{type(owner).__name__}.{stage}_dataloader()"


def _only_loader(loaders: Any) -> Any:
    """Takes the loader out of a list of one, which Lightning treats like the loader itself in evaluation."""
    return loaders[0] if isinstance(loaders, (list, tuple)) and len(loaders) == 1 else loaders
