# SPDX-License-Identifier: Apache-2.0
"""Federated data with training, validation and test samples for every client.

A sixth of a client's training data is its validation data: learning rates are picked there. Tests are the published
ones, where there are any. The division is the same in all runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.leaderboard import text
from benchmarks.papers import adult
from benchmarks.papers.own_tests import OwnTests, drawn_like
from benchmarks.papers.sources import MissingDataError, Source
from benchmarks.papers.tasks import domain
from fl_lightning.data import ByKey, Partition

HOLDOUT, EVAL_BATCH, SEED = 1 / 6, 1000, 0
AGES = (25, 30, 35, 40, 45, 50, 55, 60, 65)
"""Where the age groups of Adult begin, but for the first."""

Part = tuple[str, Tensor, Tensor]
"""Name of a client, its inputs and its labels."""


class Drawn(fl.FederatedDataModule):
    """Data of which the seed may decide more than the division: then ``draw`` makes them from one."""

    draw: Callable[[int], fl.FederatedDataModule] | None = None

    def divided_anew(self, seed: int) -> fl.FederatedDataModule:
        """All that is drawn, by another seed."""
        return super().divided_anew(seed) if self.draw is None else self.draw(seed)


def _divided(
    train: TensorDataset,
    partition: Partition,
    test: TensorDataset,
    batch_size: int,
    seed: int = SEED,
    draw: Callable[[int], fl.FederatedDataModule] | None = None,
) -> fl.FederatedDataModule:
    data = Drawn(
        train, partition, test=test, batch_size=batch_size, eval_batch_size=EVAL_BATCH, holdout=HOLDOUT, seed=seed
    )
    data.draw = draw
    return data


def images(
    source: Source, partition: Partition, root: Path, tests: int = 0, batch_size: int = 50, seed: int = SEED
) -> fl.FederatedDataModule:
    """A source of images, divided.

    Args:
        source: the images.
        partition: how their classes go to clients.
        root: folder of the data sets.
        tests: every client tests on so many images, drawn in proportion to the classes that it trains on, also if
            others test on them too; 0: the test images are divided.
        batch_size: of training.
        seed: of all that is drawn.

    Raises:
        MissingDataError: the images are not there.
    """
    pair = source.load(root)
    data = _divided(pair.train, partition, pair.test, batch_size, seed)
    if not tests:
        return data
    chosen = drawn_like(data.label_counts(), pair.test.tensors[1], tests, seed)
    own = TensorDataset(*(part[chosen] for part in pair.test.tensors))
    anew = partial(images, source, partition, root, tests, batch_size)
    return _divided(pair.train, OwnTests(partition, tests), own, batch_size, seed, anew)


def domains(
    names: tuple[str, ...], each: int, share: float, side: int, root: Path, batch_size: int, seed: int = SEED
) -> fl.FederatedDataModule:
    """Clients of several domains, which are also in their names.

    Args:
        names: domains of Office-Caltech-10, or ``mnist`` and ``usps``.
        each: clients per domain; they share neither training nor test images.
        share: part of a domain's training images that one client has.
        side: width and height of the images.
        root: folder of the data sets.
        batch_size: of training.
        seed: of all that is drawn.

    Raises:
        MissingDataError: a domain is not there.
    """
    parts: dict[str, list[Part]] = {"train": [], "test": []}
    for number, name in enumerate(names):
        for stage, half in zip(("train", "test"), domain(root, name, side), strict=True):
            inputs, labels = half.tensors
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * seed + number))
            size = int(share * len(labels)) if stage == "train" else len(labels) // each
            for client in range(each):
                mine = order[client * size : (client + 1) * size]
                parts[stage].append((name if each == 1 else f"{name} {client + 1}", inputs[mine], labels[mine]))
    return _by_name(parts, batch_size, seed, partial(domains, names, each, share, side, root, batch_size))


def modules(root: Path, batch_size: int = 50) -> fl.FederatedDataModule:
    """Python's standard library: its modules are the clients, samples are characters and the one that follows.

    Raises:
        MissingDataError: it is not that of the version that the table is made with.
    """
    parts: dict[str, list[Part]] = {"train": [], "test": []}
    for name, each in text.corpus(root).items():
        for stage, half in zip(("train", "test"), text.halves(each), strict=True):
            parts[stage].append((name, *half))
    return _by_name(parts, batch_size)


def _by_name(
    parts: Mapping[str, Sequence[Part]],
    batch_size: int,
    seed: int = SEED,
    draw: Callable[[int], fl.FederatedDataModule] | None = None,
) -> fl.FederatedDataModule:
    """Data whose clients are known by name, of the parts of each stage."""
    keys = {stage: [name for name, _, labels in some for _ in range(len(labels))] for stage, some in parts.items()}
    train, test = (
        TensorDataset(*(torch.cat([part[place] for part in parts[stage]]) for place in (1, 2)))
        for stage in ("train", "test")
    )
    return _divided(train, ByKey(keys), test, batch_size, seed, draw)


def people(root: Path, attributes: tuple[adult.Attribute, ...], batch_size: int = 256) -> fl.FederatedDataModule:
    """Adult: age groups are the clients; samples are ``(inputs, labels, groups)``.

    Args:
        root: folder of the data sets.
        attributes: which make the groups, see :class:`benchmarks.papers.adult.Adult`; the inputs lack them.
        batch_size: of training.

    Raises:
        MissingDataError: Adult is not there.
    """
    try:
        halves = [adult.load(root / "Adult" / name, *attributes) for name in ("adult.data", "adult.test")]
    except OSError as error:
        raise MissingDataError(
            f"Adult is needed: --data-root must be a folder that holds Adult/adult.data and Adult/adult.test, found "
            f"{root} ({error})"
        ) from error
    starts = torch.tensor(AGES)
    keys = {
        stage: [age_group(number) for number in torch.bucketize(half.ages, starts, right=True).tolist()]
        for stage, half in zip(("train", "test"), halves, strict=True)
    }
    train, test = (TensorDataset(one_hot(half), half.labels.long(), half.groups) for half in halves)
    return _divided(train, ByKey(keys), test, batch_size)


def age_group(number: int) -> str:
    """Such as ``"25-29"``."""
    bounds = (17, *AGES)
    return f"{bounds[number]}+" if number == len(AGES) else f"{bounds[number]}-{bounds[number + 1] - 1}"


def one_hot(half: adult.Adult) -> Tensor:
    """``[n, width]`` inputs; a value that is not known gives no one."""
    places = torch.zeros(len(half.labels), half.width + 1).scatter_(1, half.positions, 1.0)
    return places[:, : half.width].contiguous()
