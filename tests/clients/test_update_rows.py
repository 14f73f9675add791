# SPDX-License-Identifier: Apache-2.0
"""The rows of a round say what they hold, and give out updates alone."""

import pytest
import torch
from support import Classifier, fresh
from torch import nn

from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.update_rows import UpdateRows


@pytest.fixture
def binding():
    return BoundParameters(fresh(Classifier), "module")


def held(rows, index):
    """Whether a row gives out an update."""
    try:
        rows.update(index)
    except ValueError:
        return False
    return True


def trained(rows, index, by):
    rows.open(index)
    with torch.no_grad():
        for parameter in rows._binding.parameters:
            parameter.sub_(by)
    rows.reclaim()
    rows.close(index)


def test_a_row_holds_the_update_once_its_client_has_trained(binding):
    rows, theta = UpdateRows(binding, 3), binding.theta.clone()
    assert len(rows) == 3
    assert not any(held(rows, i) for i in range(3))
    rows.open(1)
    assert not held(rows, 1)
    assert torch.equal(binding.layout.flatten(binding.parameters), theta)
    with torch.no_grad():
        binding.parameters[0].add_(1.0)
    rows.close(1)
    assert [held(rows, i) for i in range(3)] == [False, True, False]
    size = binding.parameters[0].numel()
    assert torch.allclose(rows.update(1), torch.cat([-torch.ones(size), torch.zeros(len(theta) - size)]), atol=1e-6)
    assert torch.equal(binding.theta, theta)
    assert binding.parameters[0].data_ptr() == binding.theta.data_ptr()


@pytest.mark.parametrize("opened", [False, True])
def test_what_is_no_update_is_not_given_out(binding, opened):
    rows = UpdateRows(binding, 2)
    if opened:
        rows.received(0)
        rows.open(0)
    with pytest.raises(ValueError, match="row 0 must hold a client's update of this round, found none"):
        rows.update(0)
    with pytest.raises(ValueError, match="row 0 must hold"):
        rows.gathered([0, 1])


def test_gathered_rows_move_to_the_front(binding):
    rows = UpdateRows(binding, 4)
    for index in range(4):
        trained(rows, index, float(index))
    gathered = rows.gathered([0, 2, 3])
    assert gathered.rows.shape == (3, len(binding.theta))
    assert torch.allclose(gathered.rows[:, 0], torch.tensor([0.0, 2.0, 3.0]), atol=1e-5)
    assert gathered.rows.data_ptr() == rows.values.data_ptr()


def test_a_new_round_starts_with_nothing(binding):
    rows = UpdateRows(binding, 2)
    trained(rows, 0, 1.0)
    rows.received(1)
    assert held(rows, 0)
    assert held(rows, 1)
    rows.begin_round()
    assert not any(held(rows, i) for i in range(2))


def test_rows_come_from_the_memory_that_is_given(binding):
    memory = torch.empty(2, len(binding.theta))
    rows = UpdateRows(binding, 2, lambda number, like: memory[:number])
    trained(rows, 1, 1.0)
    assert torch.allclose(memory[1], torch.ones(len(binding.theta)), atol=1e-5)
    assert rows.update(1).data_ptr() == memory[1].data_ptr()


def test_memory_that_is_not_there_is_named():
    with pytest.raises(
        MemoryError, match=r"clients_per_round=1000000000 clients need 40,400,000,000,000 B on cpu: sample fewer"
    ):
        UpdateRows(BoundParameters(nn.Linear(100, 100), "module"), 10**9)
