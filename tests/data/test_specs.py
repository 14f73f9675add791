# SPDX-License-Identifier: Apache-2.0
import copy
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from fl_lightning import data as fd
from fl_lightning.data import Samples, labels_of


class Owned(TensorDataset):
    def __init__(self, owner, labels=None):
        super().__init__(torch.zeros(len(owner), 1), torch.zeros(len(owner)).long() if labels is None else labels)
        self.owner = owner


LABELS = torch.randint(0, 10, (400,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "spec",
    [
        fd.IID(7), fd.Dirichlet(7, 0.1, 20, capped=True), fd.DirichletClasses(7, 0.5), fd.Pathological(7, 3),
        fd.Shards(7, 3), fd.Mutex(11), fd.Unbalanced(), fd.ByKey(LABELS.tolist()), fd.ByKey("owner"),
    ],
)  # fmt: skip
def test_partitions_are_values(spec):
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    with pytest.raises(AttributeError):
        spec.num_clients = 5


@pytest.mark.parametrize("keys", [{"val": [1]}, {"train": [1], "fit": [1]}])
def test_keys_per_stage_name_the_stages(keys):
    with pytest.raises(ValueError, match="keys must have the entry 'train' and may have 'val', 'test'"):
        fd.ByKey(keys)


def test_iid_needs_no_labels():
    unlabelled = TensorDataset(torch.randn(10, 3))
    with pytest.raises(ValueError, match="labels"):
        labels_of(unlabelled)
    train, held = Samples(unlabelled, "train"), Samples(TensorDataset(torch.randn(3, 3)), "val")
    parts = fd.IID(5).divide(train, 0)
    assert [len(part) for part in parts] == [2] * 5
    assert sum(len(part) for part in fd.IID(5).match(train, parts, held, 0)) == 3
    with pytest.raises(ValueError, match="labels"):
        fd.Dirichlet(2, 1.0).divide(train, 0)


@pytest.mark.parametrize("keys", ["owner", lambda dataset: np.array(dataset.owner)], ids=["attribute", "function"])
def test_by_key_asks_each_stages_dataset(keys):
    spec, held = fd.ByKey(keys), Owned(["a", "c", "a"])
    for train in (Owned(["c", "a", "b", "a"]), Subset(Owned(["c", "a", "b", "a", "z"]), [0, 1, 2, 3])):
        if not callable(keys) or isinstance(train, Owned):  # a Subset has no such attribute
            parts = spec.divide(Samples(train, "train"), 0)
            assert [part.tolist() for part in parts] == [[1, 3], [2], [0]]
            matched = spec.match(Samples(train, "train"), parts, Samples(held, "val"), 0)
            assert [part.tolist() for part in matched] == [[0, 2], [], [1]]
    train = Samples(Owned(["c", "a"]), "train")
    with pytest.raises(ValueError, match=r"keys of the val samples .* found also q: evaluation='independent'"):
        spec.match(train, [], Samples(Owned(["q"]), "val"), 0)
    with pytest.raises(ValueError, match="one entry for each of the 3 samples, found 1"):
        fd.ByKey(lambda dataset: ["a"]).divide(Samples(held, "train"), 0)


def test_by_key_given_keys_are_needed_for_evaluation_data_too():
    labels = torch.tensor([0, 0, 1, 1])
    train = Samples(TensorDataset(torch.zeros(4, 1), labels), "train")
    held = Samples(TensorDataset(torch.zeros(4, 1), torch.tensor([1, 0, 1, 0])), "val")
    spec = fd.ByKey(torch.tensor([5, 5, 3, 3]))
    parts = spec.divide(train, 0)
    assert [part.tolist() for part in parts] == [[2, 3], [0, 1]]
    with pytest.raises(ValueError, match="must say whose the val samples are, found those of the training samples"):
        spec.match(train, parts, held, 0)
    per_stage = fd.ByKey({"train": [5, 5, 3, 3], "val": [5, 3, 3, 3]})
    assert [part.tolist() for part in per_stage.match(train, parts, held, 0)] == [[1, 2, 3], [0]]
    with pytest.raises(ValueError, match="one entry for each of the 4 samples, found 2"):
        fd.ByKey(["a", "b"]).divide(train, 0)
