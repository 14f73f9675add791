# SPDX-License-Identifier: Apache-2.0
"""Updates that are added up as they arrive give the bits of a matrix, and single ones cannot be read."""

import pytest
import torch
from cases import pairwise
from implementations import DTYPES, every

from fl_lightning import ops
from fl_lightning.core import update_sum
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.update_sum import RunningSum, UpdateSum

SIZES = [1, 63, 4096, 10_007]


@every
@pytest.mark.parametrize(("dtype", "n", "m"), pairwise(DTYPES, SIZES, [1, 2, 7, 100]))
def test_a_running_sum_has_the_bits_of_a_combination(call, dtype, n, m, monkeypatch):
    monkeypatch.setattr(update_sum, "_CPU_COLUMNS", 1000)
    monkeypatch.setattr(ops, "layer_combine", lambda *of: call("layer_combine", *of))
    torch.manual_seed(n + m)
    rows = (torch.randn(m, n) * 10.0 ** torch.randint(-6, 3, (m, n))).to(dtype)
    weights = torch.rand(m, dtype=torch.float64)
    running, step = RunningSum(rows[0]), torch.empty(n, dtype=dtype)
    for _ in range(2):  # the second round begins at 0
        running.clear()
        for row, weight in zip(rows, weights.tolist(), strict=True):
            running.add(row, weight)
        running.put(step)
    assert torch.equal(step, call("layer_combine", rows, torch.tensor([0, n]), weights[None]))


def test_a_sum_is_given_out_with_its_own_weights_alone():
    layout = ParamLayout.from_sizes([3])
    step, weights = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.25, 0.75], dtype=torch.float64)
    updates = UpdateSum(step, weights, torch.ones(2, dtype=torch.float64), layout)
    assert (len(updates), updates.dtype, updates.device) == (2, step.dtype, step.device)
    assert updates.combine(weights) is step
    assert updates.norm_of(step) == pytest.approx(14**0.5)
    for read, what in (
        (lambda: updates.rows, "rows"),
        (lambda: updates.gram(), "rows"),
        (lambda: updates.combine(2 * weights), "other sums"),
        (lambda: updates.combine(weights, torch.zeros(3)), "other sums"),
    ):
        with pytest.raises(AttributeError, match=f"found that it reads {what} of the updates: override"):
            read()
