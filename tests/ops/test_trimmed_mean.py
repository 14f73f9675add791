# SPDX-License-Identifier: Apache-2.0
"""Trimmed means and medians, against sorting by hand."""

import pytest
import torch
from implementations import DTYPES, REFERENCE, compiled, every, gaussian


def by_hand(rows, trim):
    """In Python's floats, rounded to the rows' dtype once."""
    m, means = len(rows), []
    for column in rows.double().T.tolist():
        left = sorted(column)[trim : m - trim]
        means.append(sum(left) / len(left))
    return torch.tensor(means, dtype=torch.float64).to(rows.dtype)


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_middle_is_averaged(call, dtype):
    for m, n in ((1, 5), (2, 33), (3, 64), (5, 1), (6, 100), (7, 31), (16, 40), (33, 70), (90, 9)):
        check_middle(call, m, n, dtype)


def check_middle(call, m, n, dtype):
    rows = gaussian(m, n, dtype, seed=m)
    for trim in {0, (m - 1) // 4, (m - 1) // 2}:
        found, expected = call("trimmed_mean", rows, trim), by_hand(rows, trim)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@every
def test_whole_numbers_and_ties_are_exact(call):
    rows = torch.randint(-3, 4, (12, 300), generator=torch.Generator().manual_seed(1)).float()
    for trim in range(6):
        assert torch.equal(call("trimmed_mean", rows, trim), by_hand(rows, trim))


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_seen_and_infinity_is_trimmed(call, dtype):
    rows = gaussian(7, 80, dtype)
    rows[3, 5], rows[0, 40], rows[6, 79] = torch.nan, torch.inf, -torch.inf
    found = call("trimmed_mean", rows, 2)
    assert found.isnan().nonzero().flatten().tolist() == [5]
    assert found.isinf().sum() == 0
    assert call("trimmed_mean", rows, 0)[40] == torch.inf


@every
def test_rows_far_apart_and_rows_that_overlap(call):
    wide = gaussian(5, 500)
    for rows in (wide[:, 3:203], wide[::2], wide[:, ::3], wide[:1].expand(4, -1)):
        torch.testing.assert_close(call("trimmed_mean", rows, 1), by_hand(rows, 1))


@every
@pytest.mark.parametrize("n", [0, 8191, 8192, 8193, 20_000])
def test_any_number_of_columns(call, n):
    rows = gaussian(3, n)
    assert torch.equal(call("trimmed_mean", rows, 1), rows.median(0).values if n else torch.empty(0))


@compiled
@pytest.mark.parametrize("m", [5, 300, 2000])
def test_a_column_does_not_depend_on_the_others(call, m):
    rows = gaussian(m, 700)
    whole = call("trimmed_mean", rows, m // 5)
    parts = [call("trimmed_mean", rows[:, a:b].contiguous(), m // 5) for a, b in ((0, 1), (1, 333), (333, 700))]
    assert torch.equal(torch.cat(parts), whole)
    torch.testing.assert_close(whole, REFERENCE("trimmed_mean", rows, m // 5))
