# SPDX-License-Identifier: Apache-2.0
import dataclasses

import numpy as np
import pytest
import torch
from remote_device import RemoteDevice

import fl_lightning as fl
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix

LAYOUT = ParamLayout.from_sizes([3, 2])
ROWS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


def cohort(**changes):
    fields = {
        "params": torch.zeros(5), "updates": UpdateMatrix(ROWS, LAYOUT), "losses": torch.tensor([0.5, 1.0, 1.5, 2.0]),
        "sizes": torch.tensor([10, 20, 30, 40]), "client_ids": (7, 3, 9, 1), "round": 0,
    }  # fmt: skip
    return fl.Cohort(**{**fields, **changes})


def test_vectors_become_float64():
    made = cohort(
        losses=[0.1, 0.2, 0.3, 0.4], sizes=[1, 2, 3, 4], extras={"acc": [1, 0, 1, 1], "map": torch.ones(4, 2, 2)}
    )
    assert (
        made.losses.dtype == made.sizes.dtype == made.extras["acc"].dtype == made.extras["map"].dtype == torch.float64
    )
    assert made.losses.tolist() == [0.1, 0.2, 0.3, 0.4], "not rounded through float32"
    assert made.extras["map"].shape == (4, 2, 2)
    assert len(made) == 4
    assert made.known_losses is made.losses
    learned = torch.ones(4, requires_grad=True)
    assert not cohort(losses=learned).losses.requires_grad


def test_losses_and_sizes_lie_on_the_cpu():
    device = RemoteDevice()
    with device:
        rows, numbers = device.put(torch.zeros(2, 3)), device.put(torch.tensor([1, 2]))
        cohort = fl.Cohort(
            device.put(torch.zeros(3)), UpdateMatrix(rows, ParamLayout.from_sizes([3])), numbers, [3, 4], (0, 1), 0,
            extras={"accuracy": [0.5, 1.0]},
        )  # fmt: skip
        assert cohort.losses.is_cpu
        assert cohort.sizes.is_cpu
        assert cohort.extras["accuracy"].device == rows.device
    assert cohort.losses.tolist() == [1.0, 2.0]
    assert device.reads == ["aten._to_copy.default"]


def test_ids_of_any_integer_type_become_ints():
    for ids in ([7, 3, 9, 1], np.array([7, 3, 9, 1]), torch.tensor([7, 3, 9, 1])):
        made = cohort(client_ids=ids)
        assert made.client_ids == (7, 3, 9, 1)
        assert all(type(i) is int for i in made.client_ids)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        cohort().round = 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("params", torch.zeros(4)),
        ("params", torch.zeros(1, 5)),
        ("params", torch.zeros(5, device="meta")),
        ("updates", UpdateMatrix(torch.zeros(0, 5), LAYOUT)),
        ("client_ids", (1, 2, 3)),
        ("client_ids", (1, 2, 3, 3)),
        ("client_ids", (1, 2, 3, 4.5)),
        ("client_ids", ("a", "b", "c", "d")),
        ("losses", torch.zeros(3)),
        ("losses", torch.zeros(4, 1)),
        ("losses", [0.1, 0.2, float("nan"), 0.3]),
        ("losses", [0.1, 0.2, float("inf"), 0.3]),
        ("sizes", [1, 2, 3]),
        ("sizes", [1, 2, 0, 3]),
        ("sizes", [1, 2, -5, 3]),
        ("sizes", [1, 2, float("nan"), 3]),
        ("round", -1),
        ("client_lr", float("nan")),
        ("client_lr", -0.1),
        ("num_clients", 3),
        ("extras", {"acc": torch.zeros(3)}),
        ("extras", {"acc": torch.tensor(1.0)}),
        ("companions", {"control": UpdateMatrix(torch.zeros(3, 5), LAYOUT)}),
        ("companions", {"control": UpdateMatrix(torch.zeros(4, 2), ParamLayout.from_sizes([2]))}),
    ],
)
def test_each_error_names_its_field(field, value):
    with pytest.raises((TypeError, ValueError), match=rf"^{field}") as error:
        cohort(**{field: value})
    if isinstance(value, dict):
        assert repr(next(iter(value))) in str(error.value)


def test_losses_that_nobody_gave_are_asked_for_by_name():
    with pytest.raises(ValueError, match="losses must be given"):
        _ = cohort(losses=None).known_losses
