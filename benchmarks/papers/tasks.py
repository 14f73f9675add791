# SPDX-License-Identifier: Apache-2.0
"""Divided data: images of one source, a few classes of it, and domains."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.papers.federated import Task
from benchmarks.papers.own_tests import OwnTests, PartOf, drawn_like
from benchmarks.papers.sources import MNIST, OFFICE, USPS, Pair, Source, made_up_digits, office, resized
from fl_lightning.data import Partition

EVAL_BATCH = 1000
DIGITS = {"mnist": MNIST, "usps": USPS}


@cache
def _present(source: Source, root: Path) -> None:
    source.load(root)


@dataclass(frozen=True)
class Images(Task):
    """A source among clients.

    Attributes:
        source: the data set.
        partition: how its classes go to clients.
        merged: training and test images are put together, divided, and each client keeps a part of its own for its
            test, as the code of FedLF does; otherwise the published test images go to clients by their classes.
        share: the part that is kept for the test, if merged.
        tests: every client tests on so many of the published test images, drawn in proportion to the classes that it
            trains on, also if others test on them too; 0: the images are divided, so that small clients have few.
        own: parts of the published training images of each client that it trains on and tests on; nobody sees the
            published test images.
    """

    source: Source
    partition: Partition
    merged: bool = False
    share: float = 1 / 7
    tests: int = 0
    own: tuple[float, float] | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of one image."""
        return self.source.shape

    @property
    def train(self) -> int:  # type: ignore[override]
        """Training samples."""
        return self.source.train if self.own is None else int(self.own[0] * self.source.train)

    @property
    def test(self) -> int:  # type: ignore[override]
        """Test samples."""
        return self.source.test if self.own is None else int(self.own[1] * self.source.train)

    def check(self, root: Path) -> None:
        """See the base class."""
        _present(self.source, root)

    def federate(self, root: Path, seed: int, batch_size: int) -> fl.FederatedDataModule:
        """See the base class."""
        pair = self.source.load(root)
        divided = partial(fl.FederatedDataModule, batch_size=batch_size, eval_batch_size=EVAL_BATCH, seed=seed)
        if self.merged:
            parts = (torch.cat(halves) for halves in zip(*(half.tensors for half in pair), strict=True))
            return divided(TensorDataset(*parts), self.partition, holdout=self.share)
        if self.own is not None:
            kept = sum(self.own)
            return divided(pair.train, PartOf(self.partition, kept), holdout=self.own[1] / kept)
        data = divided(pair.train, self.partition, val=pair.test)
        if not self.tests:
            return data
        chosen = drawn_like(data.label_counts(), pair.test.tensors[1], self.tests, seed)
        tests = TensorDataset(*(part[chosen] for part in pair.test.tensors))
        return divided(pair.train, OwnTests(self.partition, self.tests), val=tests)


@dataclass(frozen=True)
class Classes(Task):
    """One client per chosen class of a source, in this order; every client tests on its own class.

    Attributes:
        source: the data set.
        classes: by number.
        recorded: as the authors of FedFV did: training and test images are put together, of which every client trains
            on 80 % and tests on 10 %, drawn by the seed; every pixel is standardised over all training images.
    """

    source: Source
    classes: tuple[int, ...]
    recorded: bool = False

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of one image."""
        return self.source.shape

    @property
    def train(self) -> int:  # type: ignore[override]
        """Training samples, if all ten classes have equally many."""
        return self.source.train * len(self.classes) // 10

    @property
    def test(self) -> int:  # type: ignore[override]
        """Test samples, likewise."""
        return self.source.test * len(self.classes) // 10

    def check(self, root: Path) -> None:
        """See the base class."""
        _present(self.source, root)

    def federate(self, root: Path, seed: int, batch_size: int) -> fl.FederatedDataModule:
        """See the base class."""
        pair = self.source.load(root)
        train, test = self._recorded(pair, seed) if self.recorded else (self._chosen(half) for half in pair)
        keys = {"train": train.tensors[1].tolist(), "val": test.tensors[1].tolist()}
        return fl.FederatedDataModule(
            train, fl.data.ByKey(keys), val=test, batch_size=batch_size, eval_batch_size=EVAL_BATCH, seed=seed
        )

    def _chosen(self, half: TensorDataset) -> TensorDataset:
        images, labels = half.tensors
        places = [torch.nonzero(labels == number).flatten() for number in self.classes]
        return TensorDataset(
            images[torch.cat(places)],
            torch.cat([torch.full((len(place),), client) for client, place in enumerate(places)]),
        )

    def _recorded(self, pair: Pair, seed: int) -> tuple[TensorDataset, TensorDataset]:
        std, mean = torch.std_mean(pair.train.tensors[0].float(), dim=0, correction=0)
        images, labels = (
            torch.cat(parts) for parts in zip(*(self._chosen(half).tensors for half in pair), strict=True)
        )
        generator = torch.Generator().manual_seed(seed)
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for client in range(len(self.classes)):
            mine = torch.nonzero(labels == client).flatten()
            mine = mine[torch.randperm(len(mine), generator=generator)]
            cuts = (len(mine) * 8 // 10, len(mine) * 9 // 10)
            parts[0].append(mine[: cuts[0]])
            parts[1].append(mine[cuts[0] : cuts[1]])
        train, test = (
            TensorDataset((images[torch.cat(half)].float() - mean) / (std + 0.001), labels[torch.cat(half)])
            for half in parts
        )
        return train, test


@dataclass(frozen=True)
class Domains(Task):
    """Clients of several domains. The first client of a domain tests on all of the domain's test images.

    Attributes:
        names: domains of Office-Caltech-10, or of digits: ``"mnist"``, ``"usps"``, ``"uci"`` and ``"rendered"``.
        each: clients per domain.
        share: part of a domain's training images that one client has; clients share none.
        side: width and height of the images.
        train: training samples, about.
        test: test samples.
        least: training images that one client has at least.
        tests: test images of a domain at most.
    """

    names: tuple[str, ...]
    each: int
    share: float
    side: int
    train: int
    test: int
    least: int = 1
    tests: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Of one image."""
        return (3, self.side, self.side)

    def check(self, root: Path) -> None:
        """See the base class."""
        for name in self.names:
            if name in DIGITS:
                _present(DIGITS[name], root)
            elif name in OFFICE and not (root / "OfficeCaltech10" / name).is_dir():
                office(root, name, self.side)

    def federate(self, root: Path, seed: int, batch_size: int) -> fl.FederatedDataModule:
        """See the base class."""
        train: list[tuple[Tensor, Tensor]] = []
        test: list[tuple[Tensor, Tensor]] = []
        keys: dict[str, list[int]] = {"train": [], "val": []}
        for number, name in enumerate(self.names):
            pair = domain(root, name, self.side)
            images, labels = pair.train.tensors
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * seed + number))
            size = max(int(self.share * len(labels)), self.least)
            for client in range(self.each):
                mine = order[client * size : (client + 1) * size]
                train.append((images[mine], labels[mine]))
                keys["train"] += [number * self.each + client] * size
            test.append((pair.test.tensors[0][: self.tests], pair.test.tensors[1][: self.tests]))
            keys["val"] += [number * self.each] * len(test[-1][1])
        halves = [TensorDataset(*(torch.cat(parts) for parts in zip(*half, strict=True))) for half in (train, test)]
        return fl.FederatedDataModule(
            halves[0],
            fl.data.ByKey(keys),
            val=halves[1],
            batch_size=batch_size,
            eval_batch_size=EVAL_BATCH // 4,
            seed=seed,
        )


def domain(root: Path, name: str, side: int) -> Pair:
    """One domain with square colour images.

    Raises:
        MissingDataError: it is not there.
    """
    if name in OFFICE:
        return office(root, name, side)
    pair = DIGITS[name].load(root) if name in DIGITS else made_up_digits(name)
    return Pair(*(TensorDataset(resized(half.tensors[0], side), half.tensors[1]) for half in pair))
