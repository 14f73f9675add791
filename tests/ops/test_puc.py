# SPDX-License-Identifier: Apache-2.0
"""FedHEAL's two passes against loops over single coordinates."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import every

from fl_lightning import ops


def bits(words, n):
    """Keep bits as a list of bools, read with python's integers."""
    return [bool((int(words[i // 32]) & 0xFFFFFFFF) >> (i % 32) & 1) for i in range(n)]


def by_hand(row, counts, threshold, participations):
    keep, after = [], []
    for value, count in zip(row.tolist(), counts.tolist(), strict=True):
        increase = value <= 0
        keep.append((count if increase else participations - count) >= threshold)
        after.append(count + increase)
    return keep, after


@every
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 100),
    participations=st.integers(0, 200),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32]),
    seed=st.integers(0, 2**16),
)
def test_track_equals_a_loop(call, n, participations, share, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(-2, 3, (n,), generator=generator).float()
    counts = torch.randint(0, participations + 1, (n,), generator=generator).to(dtype)
    threshold = round(share * participations)
    keep, after = by_hand(row, counts, threshold, participations)
    offsets = torch.tensor([0, n // 3, n // 3, n])
    words, norms = call("puc_track", row, counts, threshold, participations, offsets)
    assert words.shape == ((n + 31) // 32,)
    assert words.dtype == torch.int32
    assert bits(words, 32 * len(words)) == keep + [False] * (32 * len(words) - n)
    assert counts.tolist() == after
    kept = (row * torch.tensor(keep)).double().square()
    assert norms.tolist() == [kept[: n // 3].sum().item(), 0.0, kept[n // 3 :].sum().item()]


@every
def test_many_blocks(call):
    n = 600_001
    row = torch.randn(n, generator=torch.Generator().manual_seed(0))
    counts = (torch.arange(n) % 6).to(torch.uint8)
    keep, after = by_hand(row, counts, 2, 5)
    words, norms = call("puc_track", row, counts, 2, 5, torch.tensor([0, 1, 300_000, n]))
    mask = torch.tensor(keep)
    shifts = torch.arange(32, dtype=torch.int32)
    assert torch.equal(((words[:, None] >> shifts) & 1).bool().flatten()[:n], mask)
    assert counts.tolist() == after
    want = (row.double() * mask).square()
    torch.testing.assert_close(norms, torch.stack([want[:1].sum(), want[1:300_000].sum(), want[300_000:].sum()]))


@every
@pytest.mark.parametrize("rule", ["code", "paper"])
def test_thresholds_give_the_published_rules(call, rule):
    """Sign histories kept as exact fractions decide the same as integer counts and a threshold."""
    tau, n = Fraction("0.3"), 40
    generator = torch.Generator().manual_seed(1)
    counts = torch.zeros(n, dtype=torch.uint8)
    increases = [0] * n
    for t in range(15):
        row = torch.randn(n, generator=generator)
        want = []
        for i in range(n):
            up = row[i].item() <= 0
            if rule == "code":
                share = Fraction(increases[i] if up else t - increases[i], t) if t else Fraction(1)
                want.append(share > tau)
            else:
                included = increases[i] + up
                want.append(Fraction(included if up else t + 1 - included, t + 1) >= tau)
            increases[i] += up
        code = 0 if t == 0 else math.floor(tau * t) + 1
        threshold = code if rule == "code" else math.ceil(tau * (t + 1)) - 1
        words, _ = call("puc_track", row, counts, threshold, t, torch.tensor([0, n]))
        assert bits(words, n) == want
    assert not all(want)


@every
def test_zero_is_an_increase_and_nan_is_not(call):
    row = torch.tensor([0.0, -0.0, float("nan"), -1.0, 1.0])
    counts = torch.zeros(5, dtype=torch.int16)
    words, norms = call("puc_track", row, counts, 1, 1, torch.tensor([0, 5]))
    assert counts.tolist() == [1, 1, 0, 1, 0]
    assert bits(words, 5) == [False, False, True, False, True]  # no past increase, one past decrease
    assert norms.isnan().all()


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_combine_equals_a_loop(call, dtype):
    m, n = 4, 70
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-4, 5, (m, n), generator=generator).to(dtype)
    mask = torch.rand(m, n, generator=generator) < 0.5
    mask[:, 5] = False
    weights = torch.tensor([0.5, 0.25, 1.0, 0.25])
    shifts = 2 ** (torch.arange(96) % 32)
    padded = torch.zeros(m, 96, dtype=torch.int64)
    padded[:, :n] = mask
    keep = (padded * shifts).view(m, 3, 32).sum(2).to(torch.int32)
    rows[~mask] = float("nan")  # what is not kept must not matter
    step = call("puc_combine", rows, keep, weights)
    assert step.dtype == dtype
    for i in range(n):
        total = sum(
            w * r for w, r, k in zip(weights.tolist(), rows[:, i].tolist(), mask[:, i].tolist(), strict=True) if k
        )
        mass = sum(w for w, k in zip(weights.tolist(), mask[:, i].tolist(), strict=True) if k)
        want = torch.tensor(total / mass if mass else 0.0, dtype=torch.float64).to(dtype)
        torch.testing.assert_close(step[i], want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    assert step[5] == 0


@every
def test_combine_over_many_blocks_with_tracked_bits(call):
    m, n = 3, 200_003
    rows = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
    counts = [torch.full((n,), c, dtype=torch.uint8) for c in (0, 1, 2)]
    tracked = [call("puc_track", row, c, 1, 2, torch.tensor([0, n])) for row, c in zip(rows, counts, strict=True)]
    keep = torch.stack([words for words, _ in tracked])
    mask = torch.stack([torch.where(rows[0] <= 0, False, True), torch.ones(n, dtype=torch.bool), rows[2] <= 0])
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    want = (weights[:, None] * rows * mask).sum(0) / (weights[:, None] * mask).sum(0)
    torch.testing.assert_close(call("puc_combine", rows, keep, weights).double(), want, rtol=1e-6, atol=1e-7)


ROW, COUNTS, OFF = torch.ones(40), torch.zeros(40, dtype=torch.uint8), torch.tensor([0, 40])
KEEP = torch.zeros(2, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.puc_track(ROW[None], COUNTS, 0, 0, OFF), ValueError, "row must have shape"),
        (lambda: ops.puc_track(ROW, COUNTS[:3], 0, 0, OFF), ValueError, r"counts must have shape \[40\]"),
        (lambda: ops.puc_track(ROW, COUNTS.long(), 0, 0, OFF), TypeError, "counts must be uint8 or int16 or int32"),
        (lambda: ops.puc_track(ROW, COUNTS.to("meta"), 0, 0, OFF), ValueError, "counts must be on the row's device"),
        (lambda: ops.puc_track(ROW, COUNTS, -1, 0, OFF), ValueError, "threshold must be an integer from 0 on"),
        (lambda: ops.puc_track(ROW, COUNTS, 0, -1, OFF), ValueError, r"participations must be an integer from 0 on"),
        (lambda: ops.puc_track(ROW, COUNTS, 0, 255, OFF), ValueError, r"participations must be in 0..254"),
        (lambda: ops.puc_track(ROW, COUNTS, 0, 0, torch.tensor([0, 39])), ValueError, "rise from 0 to n = 40"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP[:, :1], torch.ones(2)), ValueError, r"shape \[2, 2\]"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP.long(), torch.ones(2)), TypeError, "keep must be int32"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP, torch.ones(3)), ValueError, "weights must have shape"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP, torch.zeros(2)), ValueError, "weights must be positive"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
