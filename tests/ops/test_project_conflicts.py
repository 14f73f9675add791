# SPDX-License-Identifier: Apache-2.0
"""FedFV's sequential projection in coefficient space against the same steps on vectors."""

import pytest
import torch

from fl_lightning import ops


def on_vectors(updates, order, keep):
    """The projection carried out on the vectors themselves."""
    result = updates.clone()
    for i in range(len(updates)):
        if keep[i]:
            continue
        for j in order:
            square = updates[j] @ updates[j]
            if j != i and square > 0 and result[i] @ updates[j] < 0:
                result[i] -= (result[i] @ updates[j]) / square * updates[j]
    return result


@pytest.mark.parametrize(("m", "n"), [(2, 3), (3, 2), (6, 4), (10, 40)])
def test_equals_the_projection_of_vectors(m, n):
    generator = torch.Generator().manual_seed(m)
    updates = torch.randn(5, m, n, generator=generator, dtype=torch.float64)
    gram = updates @ updates.mT
    order = torch.randperm(m, generator=generator)
    keep = torch.rand(m, generator=generator) < 0.3
    coeff = ops.project_conflicts(gram, order, keep)
    assert coeff.shape == (5, m, m)
    for batch in range(5):
        want = on_vectors(updates[batch], order.tolist(), keep.tolist())
        torch.testing.assert_close(coeff[batch] @ updates[batch], want, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ops.project_conflicts(gram[batch : batch + 1], order, keep)[0], coeff[batch])


def test_two_conflicting_updates():
    updates = torch.tensor([[1.0, 0.0], [-1.0, 1.0]], dtype=torch.float64)
    gram = (updates @ updates.T)[None]
    coeff = ops.project_conflicts(gram, torch.tensor([0, 1]), torch.tensor([False, False]))[0]
    # u0 loses its part along u1, u1 its part along u0: (1/2, 1/2) and (0, 1).
    assert torch.equal(coeff @ updates, torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=torch.float64))
    kept = ops.project_conflicts(gram, torch.tensor([0, 1]), torch.tensor([True, True]))[0]
    assert torch.equal(kept, torch.eye(2, dtype=torch.float64))


def test_the_order_matters():
    updates = torch.tensor([[1.0, 0.2], [-1.0, 0.1], [0.1, -1.0]], dtype=torch.float64)
    gram, keep = (updates @ updates.T)[None], torch.zeros(3, dtype=torch.bool)
    forward = ops.project_conflicts(gram, torch.tensor([0, 1, 2]), keep)
    backward = ops.project_conflicts(gram, torch.tensor([2, 1, 0]), keep)
    assert not torch.allclose(forward, backward)


def test_a_zero_update_is_never_projected_on():
    updates = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    gram = (updates @ updates.T)[None]
    gram[0, 0, 1] = gram[0, 1, 0] = -1e-30  # rounding of a zero product
    coeff = ops.project_conflicts(gram, torch.tensor([1, 0, 2]), torch.zeros(3, dtype=torch.bool))[0]
    assert coeff.isfinite().all()
    assert (coeff[[0, 2], 1] == 0).all()


def test_nan_shows():
    gram = torch.eye(3, dtype=torch.float64)[None].clone()
    gram[0, 0, 1] = gram[0, 1, 0] = float("nan")
    coeff = ops.project_conflicts(gram, torch.arange(3), torch.zeros(3, dtype=torch.bool))[0]
    assert coeff[0].isnan().any()
    assert coeff[1].isnan().any()


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
