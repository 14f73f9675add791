# SPDX-License-Identifier: Apache-2.0
import logging
import random

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from fl_lightning.data import Samples, labels_of


class WithTargets(Dataset):
    def __init__(self, targets, name="targets"):
        setattr(self, name, targets)
        self.n = len(targets)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        raise AssertionError("samples must not be read")


class Pairs(Dataset):
    """Samples without any attribute that tells the labels."""

    def __init__(self, samples):
        self.samples, self.reads = samples, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        torch.rand(1), np.random.rand(), random.random()
        return self.samples[index]


@pytest.mark.parametrize(
    "targets",
    [[3, 1, 2], (3, 1, 2), torch.tensor([3, 1, 2]), np.array([3, 1, 2], np.uint8), [torch.tensor(3), 1, np.int32(2)]],
)
@pytest.mark.parametrize("name", ["targets", "labels"])
def test_attributes_are_used_without_reading_samples(targets, name):
    labels = labels_of(WithTargets(targets, name))
    assert labels.dtype == torch.int64
    assert labels.tolist() == [3, 1, 2]


def test_attributes_are_found_behind_subsets_and_concatenations():
    whole = WithTargets([0, 1, 2, 3, 4])
    nested = Subset(Subset(whole, [4, 2, 0]), torch.tensor([0, 2]))
    both = ConcatDataset([nested, TensorDataset(torch.zeros(2, 3), torch.tensor([8, 9]))])
    assert labels_of(nested).tolist() == [4, 0]
    assert labels_of(both).tolist() == [4, 0, 8, 9]
    assert labels_of(Subset(both, [3, 0])).tolist() == [9, 4]


def test_tensor_dataset_uses_its_last_tensor():
    assert labels_of(TensorDataset(torch.zeros(2, 3), torch.zeros(2), torch.tensor([True, False]))).tolist() == [1, 0]
    with pytest.raises(ValueError, match=r"TensorDataset must be a vector of 2 integers, found float32 of shape \[2\]"):
        labels_of(TensorDataset(torch.zeros(2, 3), torch.zeros(2)))
    with pytest.raises(ValueError, match=r"int64 of shape \[2, 4\].*pass labels="):
        labels_of(TensorDataset(torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64)))


def test_argument_wins():
    data = WithTargets([0, 0, 0])
    data.domain = [5, 6, 7]
    assert labels_of(data, torch.tensor([1, 2, 3])).tolist() == [1, 2, 3]
    assert labels_of(data, [1, 2, 3]).tolist() == [1, 2, 3]
    assert labels_of(Subset(data, [2, 0]), "domain").tolist() == [7, 5]
    pairs = Pairs([{"image": 0, "kind": 4}, {"image": 0, "kind": 5}])
    assert labels_of(pairs, lambda sample: sample["kind"]).tolist() == [4, 5]
    with pytest.raises(ValueError, match="labels must be a vector of 3 integers, found int64 of shape"):
        labels_of(data, [1, 2])
    with pytest.raises(ValueError, match="attribute 'nothing' with 3 entries, found none in WithTargets"):
        labels_of(data, "nothing")


def test_one_counted_pass_that_leaves_the_generators_alone(caplog):
    pairs = Pairs([(torch.zeros(2), label) for label in (1, torch.tensor(0), np.int64(2))])
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    with caplog.at_level(logging.INFO):
        assert labels_of(pairs).tolist() == [1, 0, 2]
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected
    assert pairs.reads == 3
    assert "Reading 3 samples of Pairs once" in caplog.text


def test_labels_attribute_that_is_not_per_sample_is_passed_over():
    pairs = Pairs([(0.0, 1), (0.0, 0), (0.0, 1)])
    pairs.labels = ["cat", "dog"]
    pairs.targets = {"a": 1, "b": 2, "c": 3}
    assert labels_of(pairs).tolist() == [1, 0, 1]


def test_samples_in_dicts():
    assert labels_of(Pairs([{"x": 0, "label": 3}, {"x": 0, "label": 4}])).tolist() == [3, 4]


NONE, OTHERS = "labels must be found in each sample of Pairs, found only", "must be a vector of 2 integers, found"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        *((Pairs([sample]), NONE) for sample in (torch.zeros(3), (torch.zeros(3),), 5.0)),
        (Pairs([{"x": 0}]), rf"{NONE} the keys \['x'\]"),
        *((Pairs([(0, bad)] * 2), OTHERS) for bad in (0.5, "cat", [1, 2], torch.zeros(2, dtype=torch.int64))),
        (WithTargets([[1], [1, 2]]), f"{OTHERS} object"),
    ],
)
def test_what_has_no_integer_labels(data, error):
    with pytest.raises(ValueError, match=error):
        labels_of(data)


def test_dataset_without_length():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match=r"dataset must have a length and integer indices, found .*Endless"):
        labels_of(Endless())


def test_samples_look_once():
    pairs = Pairs([(0, 5), (0, -1)])
    samples = Samples(pairs, "train")
    assert not samples.labels_known
    assert samples.labels.tolist() == samples.labels.tolist() == [5, -1]
    assert samples.labels_known
    assert pairs.reads == 2


def test_a_column_of_labels_is_a_vector():
    column = [{"x": torch.zeros(2), "target": np.array([label])} for label in (2, 0, 1)]
    assert labels_of(column).tolist() == [2, 0, 1]
    assert labels_of(column, torch.tensor([[4], [5], [6]])).tolist() == [4, 5, 6]
