# SPDX-License-Identifier: Apache-2.0
"""Dictionaries by client id in memory."""

import pytest
import torch
from support import reload
from torch import Tensor

from fl_lightning.core.model_snapshot import Snapshot
from fl_lightning.core.storage.per_client import PerClient


def test_numbers():
    numbers = PerClient(float)
    assert numbers.vector([3, 1], 0.5).tolist() == [0.5, 0.5]
    assert not numbers, "asking is not setting"
    numbers.put([3, 1], torch.tensor([2.0, 4.0]))
    assert numbers.vector([1, 2, 5, 3], torch.tensor([7.0, 8.0, 9.5, 9.0])).tolist() == [4, 8, 9.5, 2]
    state = numbers.state_dict()
    numbers.put([3], torch.tensor([0.1], dtype=torch.float64))
    assert state == {3: 2.0, 1: 4.0}
    assert numbers.vector([3, 4], 0.3).tolist() == [0.1, 0.3], "of 64 bits"
    other = PerClient(float)
    other[8] = 1.0
    other.load_state_dict(reload(numbers.state_dict()))
    other[1] = 5.0
    assert dict(other) == {3: 0.1, 1: 5.0}
    assert dict(numbers) == {3: 0.1, 1: 4.0}
    del numbers[3]
    assert numbers.get(3) is None
    numbers.load_state_dict({"7": 2})
    assert dict(numbers) == {7: 2.0}
    assert isinstance(numbers[7], float)


def test_tensors_stay_what_was_put_in_and_a_state_is_copied():
    tensors, value = PerClient(Tensor), torch.ones(4)
    tensors[3] = value
    assert tensors[3] is value
    other = PerClient(Tensor, "cpu")
    other.load_state_dict(tensors.state_dict())
    value.zero_()
    assert other[3].tolist() == [1.0] * 4
    assert PerClient(Tensor, "meta").keys() == set()
    elsewhere = PerClient(Tensor, "meta")
    elsewhere[0] = value
    assert elsewhere[0].is_meta


def test_models():
    models = PerClient(Snapshot, "cpu")
    models.keep(5, Snapshot(torch.ones(2), torch.zeros(3, dtype=torch.uint8)), when=9)
    other = PerClient(Snapshot)
    other.load_state_dict(reload(models.state_dict()))
    assert other[5].params.tolist() == [1.0, 1.0]
    assert other[5].buffers.dtype == torch.uint8
    assert len(other[5].buffers) == 3


@pytest.mark.parametrize("happened", [False, True])
def test_what_a_round_did_is_taken_back(happened):
    numbers = PerClient(int)
    numbers[1] = 1
    commit_or_undo = numbers.transaction()
    numbers[1], numbers[2] = 5, 2
    commit_or_undo(happened)
    assert dict(numbers) == ({1: 5, 2: 2} if happened else {1: 1})


@pytest.mark.parametrize(
    ("kind", "value"), [(Tensor, 3.0), (float, torch.ones(2)), (int, "many"), (float, {}), (Snapshot, {"params": 1})]
)
def test_values_of_another_kind_are_refused(kind, value):
    with pytest.raises((TypeError, KeyError)):
        PerClient(kind).load_state_dict({0: value})
