# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of trimmed means, run on the processor."""

import pytest
import torch
from implementations import DTYPES, gaussian
from simt_library import KernelError

from fl_lightning.ops import _reference as reference


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n"),
    [(1, 3), (2, 32), (4, 33), (5, 70), (8, 64), (11, 9), (19, 100), (25, 30), (33, 31), (64, 40), (65, 33), (128, 19)],
)
def test_the_middle_is_averaged(simt, m, n, dtype):
    rows = gaussian(m, n, dtype, m)
    for trim in {0, (m - 1) // 3, (m - 1) // 2}:
        expected = reference.trimmed_mean(rows, trim)
        torch.testing.assert_close(simt.trimmed_mean(rows, trim), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("m", [10, 13])
def test_every_column_of_zeros_and_ones(simt, m):
    """A network that sorts these sorts everything."""
    numbers = torch.arange(2**m)
    rows = torch.stack([numbers >> row & 1 for row in range(m)]).float()
    ones = rows.sum(0)
    for trim in range((m + 1) // 2):
        left = m - 2 * trim
        assert torch.equal(simt.trimmed_mean(rows, trim), (ones - trim).clamp(0, left).div(left))


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33])
@pytest.mark.parametrize(("m", "lead", "beyond"), [(3, 1, 3), (6, 2, 5), (20, 1, 0), (40, 3, 4), (40, 3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_at_any_distance(simt, dtype, m, lead, beyond, n):
    rows = gaussian(m, lead + n + beyond, dtype)[:, lead : lead + n]
    assert torch.equal(simt.trimmed_mean(rows, 1), reference.trimmed_mean(rows, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [7, 40, 70, 130])
def test_nan_is_seen_wherever_it_is_sorted_to(simt, m, dtype):
    rows = gaussian(m, 40, dtype)
    for row in range(7):
        rows[row, row] = torch.nan
    rows[0, 20], rows[1, 21] = torch.inf, -torch.inf
    found = simt.trimmed_mean(rows, 2)
    assert found.isnan().nonzero().flatten().tolist() == list(range(7))
    assert not found.isinf().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_many_rows_leave_room_for_few_columns(simt, dtype):
    rows = gaussian(700, 40, dtype)
    torch.testing.assert_close(simt.trimmed_mean(rows, 100), reference.trimmed_mean(rows, 100))


def test_more_rows_than_fit_are_refused(simt):
    with pytest.raises(KernelError, match="trimmed_mean takes at most 6144 rows on CUDA"):
        simt.trimmed_mean(torch.zeros(6145, 2, dtype=torch.float64), 1)
