# SPDX-License-Identifier: Apache-2.0
"""FedHEAL's two passes: what is an increase, and what the functions refuse; test_puc_kernels.py has the numbers."""

import pytest
import torch
from implementations import every

from fl_lightning import ops


def bits(words, n):
    """Keep bits as a list of bools, read with python's integers."""
    return [bool((int(words[i // 32]) & 0xFFFFFFFF) >> (i % 32) & 1) for i in range(n)]


@every
def test_zero_is_an_increase_and_nan_is_not(call):
    row = torch.tensor([0.0, -0.0, float("nan"), -1.0, 1.0])
    counts = torch.zeros(5, dtype=torch.int16)
    words, norms = call("puc_track", row, counts, 1, 1, torch.tensor([0, 5]))
    assert counts.tolist() == [1, 1, 0, 1, 0]
    assert bits(words, 5) == [False, False, True, False, True]  # no past increase, one past decrease
    assert norms.isnan().all()


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
