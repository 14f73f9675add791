# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from fl_lightning.data import LoaderSettings
from fl_lightning.lightning.names import lightning_module

DATA = TensorDataset(torch.zeros(10, 2), torch.zeros(10, dtype=torch.int64))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class OwnBatches(BatchSampler):
    pass


class OwnIteration(DataLoader):
    def __iter__(self):
        return super().__iter__()


def init(worker_id):
    pass


def collate(samples):
    return samples


def test_everything_is_kept():
    loader = DataLoader(
        DATA,
        batch_size=4,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
        num_workers=2,
        pin_memory=True,
        worker_init_fn=init,
        timeout=5,
        multiprocessing_context="spawn",
        prefetch_factor=3,
        persistent_workers=True,
    )
    assert LoaderSettings.from_dataloader(loader) == LoaderSettings(
        4, True, True, collate, 2, True, init, 5.0, "spawn", 3
    )
    assert LoaderSettings.from_dataloader(DataLoader(DATA)) == LoaderSettings(1, False)
    assert LoaderSettings.from_dataloader(DataLoader(DATA)).collate_fn is default_collate


def test_plain_batch_sampler_is_understood():
    loader = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, True))
    assert LoaderSettings.from_dataloader(loader) == LoaderSettings(3, True, True)
    loader = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, False))
    assert LoaderSettings.from_dataloader(loader) == LoaderSettings(3, False, False)


@pytest.mark.parametrize("sampler", [RandomSampler, SequentialSampler])
def test_a_batch_sampler_in_the_place_of_a_sampler_is_understood(sampler):
    loader = DataLoader(DATA, sampler=BatchSampler(sampler(DATA), 3, True), batch_size=None)
    expected = LoaderSettings(3, sampler is RandomSampler, True, default_convert, fetch_batches=True)
    assert LoaderSettings.from_dataloader(loader) == expected


def test_subclasses_that_only_set_arguments_are_fine():
    class Graphs(DataLoader):
        def __init__(self, dataset):
            super().__init__(dataset, 5, collate_fn=collate)

    assert LoaderSettings.from_dataloader(Graphs(DATA)) == LoaderSettings(5, collate_fn=collate)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: DataLoader(Stream()), TypeError, "IterableDataset Stream: clients need samples that can be picked"),
        (
            lambda: [DataLoader(DATA), DataLoader(DATA)],
            TypeError,
            "one torch DataLoader, found list.*ConcatDataset; several to evaluate come in a list",
        ),
        (lambda: {"a": DataLoader(DATA)}, TypeError, "found dict"),
        (
            lambda: lightning_module("utilities.combined_loader").CombinedLoader([DataLoader(DATA)]),
            TypeError,
            "found CombinedLoader",
        ),
        (lambda: DATA, TypeError, "found TensorDataset"),
        (lambda: OwnIteration(DATA), TypeError, "found OwnIteration with an __iter__ of its own"),
        (lambda: DataLoader(DATA, batch_size=None), ValueError, "found batch_size=None and the sampler Sequential"),
        (lambda: DataLoader(DATA, sampler=[[0]], batch_size=None), ValueError, "batch_size=None and the sampler list"),
        (
            lambda: DataLoader(DATA, sampler=BatchSampler(SubsetRandomSampler([1]), 2, False), batch_size=None),
            ValueError,
            "found the sampler SubsetRandomSampler",
        ),
        (
            lambda: DataLoader(DATA, sampler=OwnBatches(SequentialSampler(DATA), 2, False), batch_size=None),
            ValueError,
            "batch_size=None and the sampler OwnBatches",
        ),
        (
            lambda: DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)),
            ValueError,
            "custom batch sampler OwnBatches",
        ),
        (lambda: DataLoader(DATA, batch_sampler=[[0, 1]]), ValueError, "custom batch sampler list"),
        (
            lambda: DataLoader(DATA, sampler=SubsetRandomSampler([1, 2])),
            ValueError,
            "found the sampler SubsetRandomSampler: choose samples with torch.utils.data.Subset",
        ),
        (lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), ValueError, "WeightedRandomSampler"),
        (
            lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)),
            ValueError,
            "without replacement, found RandomSampler",
        ),
        (
            lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)),
            ValueError,
            "all 10 samples of its dataset once per epoch, found a RandomSampler of 5",
        ),
        (lambda: DataLoader(DATA, sampler=SequentialSampler(range(3))), ValueError, "SequentialSampler of 3"),
        (lambda: DataLoader(DATA, sampler=[3, 4]), ValueError, "found the sampler list"),
    ],
)
def test_refusals_name_what_was_found(make, error, match):
    with pytest.raises(error, match=match):
        LoaderSettings.from_dataloader(make())
    with pytest.raises(error, match=r"^My\.train_dataloader"):
        LoaderSettings.from_dataloader(make(), "My.train_dataloader()")
