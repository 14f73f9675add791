# SPDX-License-Identifier: Apache-2.0
"""Every implementation of FedHEAL's two passes: bits and counts exactly, weighted means to the last place."""

from itertools import pairwise

import pytest
import torch
from implementations import DTYPES, every, gaussian, offsets_of, random_bits

from fl_lightning.ops import _reference

STEP_ERROR = {torch.float64: 1e-13, torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 31), (10, 20_129), (33, 1_000), (64, 9_003)])
def test_weighted_means_of_kept_coordinates(call, m, n, dtype):
    keep, words = random_bits(m, n)
    rows, weights = gaussian(m, n, dtype), torch.rand(m, generator=torch.Generator().manual_seed(2)) + 0.1
    weight = weights.double()[:, None] * keep
    mass = weight.sum(0)
    want = torch.where(mass > 0, (weight * rows.double()).sum(0) / mass.clamp(min=1e-9), 0.0)
    size = torch.where(mass > 0, (weight * rows.double()).abs().sum(0) / mass.clamp(min=1e-9), 0.0)
    rows[~keep] = float("nan")
    wider = torch.cat([rows, rows], 1)[:, :n]
    tiny = 2**-24 if dtype == torch.float16 else 0
    for given in (rows, wider):
        step = call("puc_combine", given, words, weights)
        assert ((step.double() - want).abs() <= STEP_ERROR[dtype] * want.abs() + 1e-13 * size + tiny).all()
        assert (step[mass == 0] == 0).all()


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count_type", [torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("sizes", [(129, 0, 1, 3, 140_000, 70), (1,), (10, 0, 21), (32, 1), (33, 0, 66)], ids=sum)
def test_tracking_equals_integer_arithmetic(call, sizes, dtype, count_type):
    offsets = offsets_of(sizes)
    n = int(offsets[-1])
    row = torch.randint(-2, 3, (n,), generator=torch.Generator().manual_seed(1)).to(dtype)
    row[::1000] = float("nan")
    for participations, threshold in ((0, 0), (0, 1), (5, 2), (100, 50), (100, 101), (200, 10**12)):
        counts = torch.randint(0, participations + 1, (n,)).to(count_type)
        past, up = counts.long(), row <= 0
        keep = torch.where(up, past, participations - past) >= threshold
        words, squares = call("puc_track", row, counts, threshold, participations, offsets)
        assert torch.equal(counts.long(), past + up)
        assert torch.equal(_reference._unpack(words).bool()[:n], keep)
        assert not _reference._unpack(words).bool()[n:].any()
        kept = torch.where(keep, row.double(), 0.0).square()
        want = torch.stack([kept[a:b].sum() for a, b in pairwise(offsets.tolist())])
        torch.testing.assert_close(squares, want, rtol=1e-12, atol=0, equal_nan=True)


@every
def test_zero_is_an_increase_and_nan_is_not(call):
    """Read by Python's integers: the first coordinate is the lowest bit. Numbers too small for float32 have a sign."""
    row = torch.tensor([0.0, -0.0, float("nan"), -1.0, 1e-300, -1e-300], dtype=torch.float64)
    counts = torch.zeros(6, dtype=torch.int16)
    words, norms = call("puc_track", row, counts, 1, 1, torch.tensor([0, 2, 6]))
    assert counts.tolist() == [1, 1, 0, 1, 0, 1]
    assert words.tolist() == [0b010100]  # no past increase, one past decrease
    assert norms[0] == 0
    assert norms[1].isnan()
