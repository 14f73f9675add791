# SPDX-License-Identifier: Apache-2.0
"""Keys of clients are plain values, and clients are called by them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import fl_lightning as fl
from fl_lightning.comparison.compare import as_strategies
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.labels import Samples, labels_of

SET = TensorDataset(torch.arange(20))


def clients(keys):
    return [part.tolist() for part in fl.data.ByKey(keys).divide(Samples(SET, "train"), 0)]


@pytest.mark.parametrize(
    "keys",
    [
        torch.arange(20) % 4,
        list(torch.arange(20) % 4),
        list(np.arange(20) % 4),
        np.arange(20) % 4,
        lambda dataset: list(dataset.tensors[0] % 4),
        [float(n % 4) for n in range(20)],
        list((torch.arange(20) % 4).to(torch.int16)),
    ],
)
def test_equal_keys_are_one_client_whatever_holds_them(keys):
    assert clients(keys) == [list(range(first, 20, 4)) for first in range(4)]


def test_keys_may_be_tuples():
    spec = fl.data.ByKey([("a", torch.tensor(n % 2)) for n in range(20)])
    assert spec.names(Samples(SET, "train")) == ("a, 0", "a, 1")


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (Path("a"), TypeError, "keys must be integers, strings or tuples of them, found PosixPath at sample 3"),
        (None, TypeError, "found NoneType at sample 3"),
        (object(), TypeError, "found object at sample 3"),
        (float("nan"), ValueError, "keys must not be NaN, found it at sample 3"),
        ("", ValueError, "keys must not be empty, found '' at sample 3: give it a name"),
    ],
)
def test_other_keys_are_refused(key, error, message):
    with pytest.raises(error, match=message):
        clients([0, 1, 2, key, *range(16)])


class Sited(TensorDataset):
    """Its keys are an attribute."""

    def __init__(self, site):
        super().__init__(torch.arange(20))
        self.site = site


def test_keys_of_an_attribute_are_those_of_its_list():
    for keys in ([0, "a"] * 10, [("a", n % 11) for n in range(20)], [b"a", "b"] * 10):
        found = fl.data.ByKey("site").divide(Samples(Sited(keys), "train"), 0)
        assert [part.tolist() for part in found] == clients(keys)
    missing = Samples(Sited(["a", "b", float("nan"), "c"] * 5), "train")
    with pytest.raises(ValueError, match="keys must not be NaN, found it at sample 2"):
        fl.data.ByKey("site").divide(missing, 0)


def test_keys_that_would_be_called_alike_are_refused():
    for keys, name in (([1, "1"] * 10, "'1'"), ([("a", 1), "a, 1"] * 10, "'a, 1'")):
        data = fl.FederatedDataModule(SET, fl.data.ByKey(keys))
        data.setup("fit")
        with pytest.raises(ValueError, match=f"names must tell the clients apart, found 2 clients called {name}"):
            data.train_dataloader()


@pytest.mark.parametrize("name", ["=1+1", "-2+3+cmd", "@here", "a\u202eb", "a\nb", "x" * 201])
def test_names_that_tables_cannot_hold_are_refused(name):
    data = fl.FederatedDataModule(SET, fl.data.ByKey([name, "b"] * 10))
    with pytest.raises(ValueError, match="names of clients, and keys that become names, must have 1 to 200 printable"):
        data.train_dataloader()
    with pytest.raises(ValueError, match="strategies must have names other than 'local only'"):
        as_strategies({name: fl.algorithms.FedAvg()})


def test_numbers_and_names_of_all_scripts_are_names():
    keys = [-1, -0.5, "\u0645\u0633\u062a", "São João | Nord", "A-1"]
    assert len(fl.FederatedDataModule(SET, fl.data.ByKey(keys * 4)).client_names) == 5


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (fl.data.ByKey("site"), "ByKey('site')"),
        (fl.data.ByKey(len), "ByKey(len)"),
        (fl.data.ByKey([1, 2, 3]), "ByKey(3 keys)"),
        (fl.data.ByKey({"train": [1, 2], "val": [1]}), "ByKey({'train': 2 keys, 'val': 1 keys})"),
    ],
)
def test_a_partition_by_key_shows_its_key(spec, text):
    assert repr(spec) == text


def test_held_out_and_shared_data_keep_names():
    data = fl.FederatedDataModule(
        SET, fl.data.ByKey(["a", "b"] * 10), holdout=0.3, test=TensorDataset(torch.arange(4)), evaluation="shared"
    )
    data.setup("fit")
    for loaders in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert tuple(loaders.names) == ("a", "b")
    assert data.client_names == ("a", "b")
    plain = fl.FederatedDataModule(SET, [[0, 1], [2]])
    assert plain.client_names == ("0", "1")
    assert list(plain.train_dataloader().names) == ["0", "1"]


class Named(TensorDataset):
    """A subclass that says more about itself, and nothing else about a sample."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.site = ["a"] * len(tensors[0])

    def describe(self):
        return "named"


class Doubled(TensorDataset):
    def __getitem__(self, index):
        return tuple(2 * tensor for tensor in super().__getitem__(index))


class Fast(TensorDataset):
    def __getitems__(self, indices):
        return [(self.tensors[0][i] + 100,) for i in indices]


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize(("kind", "direct"), [(Named, True), (Doubled, False), (Fast, False), (TensorDataset, True)])
def test_subclasses_are_gathered_directly_unless_they_make_samples(kind, direct, subset):
    dataset = kind(torch.arange(20))
    if subset:
        dataset = Subset(dataset, list(range(19, -1, -1)))
    loaders = ClientLoaders(dataset, [range(10), range(10, 20)])
    assert (loaders._source is not None) == direct
    found = torch.cat([batch[0] for batch, _ in loaders.batches(1, seed=None)])
    items = dataset.__getitems__(list(range(10, 20))) if hasattr(dataset, "__getitems__") else None
    expected = items or [dataset[i] for i in range(10, 20)]
    assert found.tolist() == [int(item[0]) for item in expected]


class Unreadable(TensorDataset):
    def __getitem__(self, index):
        if index == 7:
            raise OSError("cannot identify image file")
        return super().__getitem__(index)[0], 0


def test_a_sample_that_cannot_be_read_for_its_label_is_named():
    with pytest.raises(ValueError, match=r"sample 7 of Unreadable cannot be read .*OSError: cannot identify.*labels="):
        labels_of(Unreadable(torch.arange(20)))
