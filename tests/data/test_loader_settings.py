# SPDX-License-Identifier: Apache-2.0
import re

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
from fl_lightning.data.division import loader_settings
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
    assert loader_settings(loader) == LoaderSettings(4, True, True, collate, 2, True, init, 5.0, "spawn", 3)
    assert loader_settings(DataLoader(DATA)) == LoaderSettings(1, False)
    assert loader_settings(DataLoader(DATA)).collate_fn is default_collate


def test_plain_batch_sampler_is_understood():
    loader = DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, True))
    assert loader_settings(loader) == LoaderSettings(3, True, True)
    loader = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, False))
    assert loader_settings(loader) == LoaderSettings(3, False, False)


@pytest.mark.parametrize("sampler", [RandomSampler, SequentialSampler])
def test_a_batch_sampler_in_the_place_of_a_sampler_is_understood(sampler):
    loader = DataLoader(DATA, sampler=BatchSampler(sampler(DATA), 3, True), batch_size=None)
    expected = LoaderSettings(3, sampler is RandomSampler, True, default_convert, fetch_batches=True)
    assert loader_settings(loader) == expected


def test_subclasses_that_only_set_arguments_are_fine():
    class Graphs(DataLoader):
        def __init__(self, dataset):
            super().__init__(dataset, 5, collate_fn=collate)

    assert loader_settings(Graphs(DATA)) == LoaderSettings(5, collate_fn=collate)


def sampled(sampler, batch_size=1):
    return DataLoader(DATA, sampler=sampler, batch_size=batch_size)


def batched(sampler, kind=BatchSampler):
    return kind(sampler, 2, False)


ORDER, SOME = SequentialSampler(DATA), SubsetRandomSampler([1, 2])


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (DataLoader(Stream()), "have a length and integer indices, found .*Stream"),
        ([DataLoader(DATA)] * 2, "one torch DataLoader, found list.*ConcatDataset; several to evaluate come in a list"),
        ({"a": DataLoader(DATA)}, "found dict"),
        (lightning_module("utilities.combined_loader").CombinedLoader([DataLoader(DATA)]), "found CombinedLoader"),
        (DATA, "found TensorDataset"),
        (OwnIteration(DATA), "found OwnIteration with an __iter__ of its own"),
        (sampled(ORDER, None), "found batch_size=None and the sampler Sequential"),
        (sampled([[0]], None), "batch_size=None and the sampler list"),
        (sampled(batched(SOME), None), "found the sampler SubsetRandomSampler"),
        (sampled(batched(ORDER, OwnBatches), None), "batch_size=None and the sampler OwnBatches"),
        (DataLoader(DATA, batch_sampler=batched(ORDER, OwnBatches)), "custom batch sampler OwnBatches"),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), "custom batch sampler list"),
        (sampled(SOME), "found the sampler SubsetRandomSampler: choose samples with torch.utils.data.Subset"),
        (sampled(WeightedRandomSampler([1.0] * 10, 10)), "WeightedRandomSampler"),
        (sampled(RandomSampler(DATA, replacement=True)), r"found RandomSampler\(replacement"),
        (sampled(RandomSampler(DATA, num_samples=5)), "all 10 samples .* once per epoch, .* a RandomSampler of 5"),
        (sampled(SequentialSampler(range(3))), "SequentialSampler of 3"),
        (sampled([3, 4]), "found the sampler list"),
    ],
)
def test_refusals_name_what_was_found(loader, match):
    for name in ("loader", "My.train_dataloader()"):
        with pytest.raises((TypeError, ValueError), match=rf"^(the dataset of )?{re.escape(name)} must .*{match}"):
            loader_settings(loader, name)
