# SPDX-License-Identifier: Apache-2.0
"""Outputs too large for the caches, which kernels write past them: every number arrives, wherever layers begin.

One row stands for all: a matrix counts by its size, and rows that lie in the same place are cheap.
"""

import pytest
import torch
from implementations import DTYPES, compiled, offsets_of

ROWS, BYTES = 63, 1 << 25  # of rows and output together: from here on outputs are streamed


def large_rows(dtype):
    """Small whole numbers, so that sums are exact in every format."""
    n = BYTES // (ROWS + 1) // dtype.itemsize + 1000
    row = torch.randint(-3, 4, (1, n), generator=torch.Generator().manual_seed(0)).to(dtype)
    return row.expand(ROWS, n), row[0]


def leave_garbage(like):
    """NaN where the next tensor of this size will probably lie."""
    torch.full_like(like, torch.nan)


@compiled
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combinations(call, dtype, first):
    rows, row = large_rows(dtype)
    offsets = offsets_of((first, len(row) - first))
    coeff = torch.zeros(2, ROWS, dtype=torch.float64)
    coeff[:, [0, 7, -1]] = torch.tensor([[1.0, 1.0, -4.0], [2.0, -1.0, 4.0]], dtype=torch.float64)
    leave_garbage(row)
    step = call("layer_combine", rows, offsets, coeff)
    want = torch.cat([-2 * row[:first], 5 * row[first:]])
    assert torch.equal(step, want)
    leave_garbage(row)
    both = call("layer_cross_combine", rows, rows[:2], offsets, torch.cat([coeff, torch.ones(2, 2)], 1))
    assert torch.equal(both, want + 2 * row)


@compiled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kept_means(call, dtype):
    rows, row = large_rows(dtype)
    words = torch.zeros(ROWS, (len(row) + 31) // 32, dtype=torch.int32)
    words[:3] = -1
    words[:, 100:200] = 0
    leave_garbage(row)
    step = call("puc_combine", rows, words, torch.ones(ROWS))
    want = row.clone()
    want[3200:6400] = 0
    assert torch.equal(step, want)
