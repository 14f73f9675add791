# SPDX-License-Identifier: Apache-2.0
"""FedFV's sequential projection in coefficient space against the same steps on vectors."""

import pytest
import torch

from fl_lightning import ops


def test_two_conflicting_updates():
    updates = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    gram = (updates @ updates.T)[None]
    coeff = ops.project_conflicts(gram, torch.tensor([0, 1]), torch.tensor([False, False]))[0]
    # u0 loses its part along u1, u1 its part along u0: (1/2, 1/2) and (0, 1).
    assert torch.equal(coeff @ updates, torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=torch.float64))
    kept = ops.project_conflicts(gram, torch.tensor([0, 1]), torch.tensor([True, True]))[0]
    assert torch.equal(kept, torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gram": torch.eye(2, dtype=torch.float64)}, ValueError, r"gram must have shape \[B, k, k\]"),
        ({"gram": torch.eye(2)[None]}, TypeError, "gram must be float64"),
        ({"order": torch.tensor([0, 0])}, ValueError, r"permutation of 0..1, found \[0, 0\]"),
        ({"order": torch.tensor([0, 1], dtype=torch.int32)}, TypeError, "order must be int64"),
        ({"keep": torch.tensor([0, 1])}, TypeError, "keep must be bool"),
        ({"keep": torch.tensor([True])}, ValueError, r"keep must have shape \[2\]"),
    ],
)
def test_wrong_arguments_are_named(changes, error, message):
    arguments = {
        "gram": torch.eye(2, dtype=torch.float64)[None],
        "order": torch.tensor([0, 1]),
        "keep": torch.tensor([False, False]),
    }
    with pytest.raises(error, match=message):
        ops.project_conflicts(**{**arguments, **changes})
