# SPDX-License-Identifier: Apache-2.0
"""What the ops themselves refuse, below the public functions' checks: those vanish under ``torch.compile``.

A compiled kernel's error reaches Python as a RuntimeError: torch's stable interface knows no other.
"""

import pytest
import torch
from implementations import compiled, dispatched, every, samples

from fl_lightning import ops

ERRORS = (ValueError, RuntimeError)
OFFSETS_AT = {
    "layer_gram": 1,
    "layer_cross_gram": 2,
    "layer_chosen_gram": 2,
    "layer_dots": 2,
    "layer_combine": 1,
    "layer_cross_combine": 2,
    "layer_combine_add": 2,
    "puc_track": 4,
}


@every
@pytest.mark.parametrize("op", OFFSETS_AT)
def test_offsets(call, op):
    for offsets in ([0, 16, 49], [0, 51], [1, 50], [-1, 20, 50], [0, -5, 50], [0, 30, 20, 50], [0, 60, 50]):
        arguments = list(samples()[op])
        arguments[OFFSETS_AT[op]] = torch.tensor(offsets)
        with pytest.raises(ERRORS, match=r"offsets must rise from 0 to n = 50 without decreasing, found \["):
            call(op, *arguments)


@every
@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1, 3], [-1, 0, 1]], ids=str)
def test_order(call, order):
    gram, _, keep = samples()["project_conflicts"]
    with pytest.raises(ERRORS, match=r"order must be a permutation of 0..2, found \["):
        call("project_conflicts", gram, torch.tensor(order), keep)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_weights_on_the_cpu(weight):
    rows, keep, weights = samples()["puc_combine"]
    weights[1] = weight
    with pytest.raises(ERRORS, match=r"weights must be positive, found \["):
        dispatched("puc_combine")(rows, keep, weights)


def changed(op, index, change):
    """Arguments of an op, one of which does not fit the others."""
    arguments = list(samples()[op])
    arguments[index] = change(arguments[index])
    return op, arguments


@compiled
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (changed("layer_gram", 0, lambda rows: rows[None]), r"rows must have shape \[m, n\]"),
        (changed("layer_gram", 0, lambda rows: rows.to(torch.int32)), "rows must be float64, float32"),
        (changed("layer_gram", 1, lambda offsets: offsets.double()), "offsets has the wrong dtype"),
        (changed("layer_gram", 1, lambda offsets: offsets[:1]), r"offsets must be a CPU vector of L \+ 1"),
        (changed("layer_cross_gram", 1, lambda others: others[:, :49]), r"others must have shape \[any, 50\]"),
        (
            changed("layer_chosen_gram", 3, lambda chosen: chosen + 1),
            r"chosen must lie between 0 and 2, found \[3, 1\]",
        ),
        (
            changed("layer_chosen_gram", 3, lambda chosen: chosen - 1),
            r"chosen must lie between 0 and 2, found \[1, -1\]",
        ),
        (changed("layer_dots", 1, lambda step: step[:49]), r"step must have shape \[50\]"),
        (changed("layer_combine", 2, lambda coeff: coeff[:2]), r"coeff must have shape \[3, 3\]"),
        (changed("layer_cross_combine", 1, lambda others: others[:, :49]), r"others must have shape \[any, 50\]"),
        (changed("layer_cross_combine", 1, lambda others: others.double()), "others must have the rows' dtype"),
        (changed("layer_cross_combine", 3, lambda coeff: coeff[:2]), r"coeff must have shape \[3, 5\]"),
        (changed("layer_combine_add", 0, lambda out: out[:49]), r"out must have shape \[50\]"),
        (changed("project_conflicts", 0, lambda gram: gram[0]), r"gram must have shape \[B, m, m\]"),
        (changed("project_conflicts", 0, lambda gram: gram.float()), "gram has the wrong dtype"),
        (changed("project_conflicts", 1, lambda order: order[:2]), r"order must have shape \[3\]"),
        (changed("project_conflicts", 2, lambda keep: keep[:2]), r"keep must have shape \[3\]"),
        (changed("min_norm", 0, lambda gram: gram[:, :2]), r"gram must have shape \[B, k, k\]"),
        (changed("common_descent", 0, lambda gram: gram[:, :2]), r"gram must have shape \[B, k, k\]"),
        (changed("common_descent", 1, lambda online: online + 2), "online must be between 1 and 3, found 4"),
        (changed("common_descent", 1, lambda online: online - 2), "online must be between 1 and 3, found 0"),
        (changed("common_descent", 2, lambda _: torch.ones(2, 3)), r"scale must have shape \[3, 3\]"),
        (changed("common_descent", 3, lambda weights: weights[:1]), r"weights must have shape \[2\]"),
        (changed("puc_track", 1, lambda counts: counts[:49]), r"counts must have shape \[50\]"),
        (changed("puc_track", 1, lambda counts: counts.to(torch.int8)), "counts must be uint8, int16 or int32"),
        (changed("puc_combine", 1, lambda keep: keep[:, :1]), r"keep must have shape \[3, 2\]"),
        (changed("puc_combine", 2, lambda weights: weights[:2]), r"weights must have shape \[3\]"),
        (changed("layer_combine", 2, lambda coeff: coeff.T.reshape(-1)), r"coeff must have shape \[3, 3\]"),
        (changed("layer_cross_combine", 3, lambda coeff: coeff.T), r"coeff must have shape \[3, 5\]"),
        (changed("layer_combine_add", 3, lambda coeff: coeff[None]), r"coeff must have shape \[3, 3\]"),
        (changed("layer_dots", 1, lambda step: step[None]), "step must be a vector"),
        (changed("puc_track", 1, lambda counts: counts[None]), r"counts must have shape \[50\]"),
        (changed("puc_track", 3, lambda _: 255), r"participations must be in 0..254, found 255"),
        (changed("puc_combine", 1, lambda keep: keep.reshape(-1)), r"keep must have shape \[3, 2\]"),
        (changed("common_descent", 3, lambda weights: weights.bool()), "weights must be float64"),
        (changed("trimmed_mean", 1, lambda _: 2), "trim must be below half of the 3 rows"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_sizes_that_memory_safety_depends_on(call, case, message):
    """A compiled kernel reads and writes by these sizes."""
    op, arguments = case
    with pytest.raises(ERRORS, match=message):
        call(op, *arguments)


ROWS, OFF = torch.ones(2, 8), torch.tensor([0, 3, 8])
ROW, COUNTS, LAST = torch.ones(40), torch.zeros(40, dtype=torch.uint8), torch.tensor([0, 40])
KEEP = torch.zeros(2, 2, dtype=torch.int32)


def descent(online=2, zero_row=1e-8, zero_direction=1e-4, rounding=0.0, **options):
    bounds = {"zero_row": zero_row, "zero_direction": zero_direction, "rounding": rounding}
    return ops.common_descent(torch.eye(2).double()[None], online, **options, **bounds)


def projections(**changes):
    given = {"gram": torch.eye(2).double()[None], "order": torch.arange(2), "keep": torch.zeros(2, dtype=torch.bool)}
    return ops.project_conflicts(**given | changes)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: projections(gram=torch.eye(2).double()), ValueError, r"gram must have shape \[B, k, k\]"),
        (lambda: projections(gram=torch.eye(2)[None]), TypeError, "gram must be float64"),
        (lambda: projections(order=torch.tensor([0, 0])), ValueError, r"permutation of 0..1, found \[0, 0\]"),
        (lambda: projections(order=torch.arange(2).int()), TypeError, "order must be int64"),
        (lambda: projections(keep=torch.tensor([0, 1])), TypeError, "keep must be bool"),
        (lambda: projections(keep=torch.tensor([True])), ValueError, r"keep must have shape \[2\]"),
        (lambda: ops.layer_cross_gram(ROWS, ROWS, OFF, torch.tensor([3])), ValueError, r"between 0 and 1, found \[3\]"),
        (lambda: ops.min_norm(torch.ones(2, 0, 0).double()), ValueError, r"\[B, k, k\] with k >= 1, found \[2, 0, 0\]"),
        (lambda: descent(online=3), ValueError, "online must be an integer from 1 to 2, found 3"),
        (lambda: descent(scale=torch.ones(1, 2)), TypeError, "scale must be float64, found torch.float32"),
        (lambda: descent(weights=torch.ones(3).double()), ValueError, r"weights must have shape \[2\], found \[3\]"),
        (lambda: descent(rounding=-1e-9), ValueError, "rounding must be a finite number from 0 on, found -1e-09"),
        (lambda: ops.layer_gram(torch.ones(8), OFF), ValueError, "rows must have shape"),
        (lambda: ops.layer_gram(torch.ones(0, 8), OFF), ValueError, "at least one row"),
        (lambda: ops.layer_gram(ROWS.long(), OFF), TypeError, "rows must be float64, .* found torch.int64"),
        (lambda: ops.layer_gram(ROWS.numpy(), OFF), TypeError, "rows must be a tensor"),
        (lambda: ops.layer_gram(ROWS, [0, 3, 8]), TypeError, "offsets must be a tensor, found list"),
        (lambda: ops.layer_gram(ROWS, OFF.int()), TypeError, "offsets must be int64"),
        (lambda: ops.layer_gram(ROWS, OFF[None]), ValueError, "offsets must have shape"),
        (lambda: ops.layer_gram(ROWS, OFF[:1]), ValueError, "at least two entries"),
        (lambda: ops.layer_gram(ROWS, OFF.to("meta")), ValueError, "offsets must be on the CPU"),
        (lambda: ops.layer_gram(ROWS, OFF + 1), ValueError, r"rise from 0 to n = 8 .* found \[1, 4, 9\]"),
        (lambda: ops.layer_gram(ROWS, torch.tensor([0, 7])), ValueError, "rise from 0 to n = 8"),
        (lambda: ops.layer_gram(ROWS, torch.tensor([0, 5, 3, 8])), ValueError, "without decreasing"),
        (lambda: ops.layer_cross_gram(ROWS, torch.ones(2, 7), OFF), ValueError, r"others must have shape \[any, 8\]"),
        (lambda: ops.layer_cross_gram(ROWS, ROWS.to("meta"), OFF), ValueError, "others must be on the rows' device"),
        (lambda: ops.layer_dots(ROWS, torch.ones(7), OFF), ValueError, r"step must have shape \[8\]"),
        (lambda: ops.layer_dots(ROWS, torch.ones(8).int(), OFF), TypeError, "step must be float64"),
        (lambda: ops.layer_combine(ROWS, OFF, torch.ones(3, 2)), ValueError, r"coeff must have shape \[2, 2\]"),
        (lambda: ops.layer_combine(ROWS, OFF, torch.ones(2, 2).to("meta")), ValueError, "coeff must be on the CPU or"),
        (lambda: ops.layer_combine(ROWS, OFF, torch.ones(2, 2), torch.ones(9)), ValueError, "out must have shape"),
        (lambda: ops.puc_track(ROW[None], COUNTS, 0, 0, LAST), ValueError, "row must have shape"),
        (lambda: ops.puc_track(ROW, COUNTS[:3], 0, 0, LAST), ValueError, r"counts must have shape \[40\]"),
        (lambda: ops.puc_track(ROW, COUNTS.long(), 0, 0, LAST), TypeError, "counts must be uint8 or int16 or int32"),
        (lambda: ops.puc_track(ROW, COUNTS.to("meta"), 0, 0, LAST), ValueError, "counts must be on the row's device"),
        (lambda: ops.puc_track(ROW, COUNTS, -1, 0, LAST), ValueError, "threshold must be an integer from 0 on"),
        (lambda: ops.puc_track(ROW, COUNTS, 0, -1, LAST), ValueError, r"participations must be an integer from 0 on"),
        (lambda: ops.puc_track(ROW, COUNTS, 0, 255, LAST), ValueError, r"participations must be in 0..254"),
        (lambda: ops.puc_track(ROW, COUNTS, 0, 0, torch.tensor([0, 39])), ValueError, "rise from 0 to n = 40"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP[:, :1], torch.ones(2)), ValueError, r"shape \[2, 2\]"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP.long(), torch.ones(2)), TypeError, "keep must be int32"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP, torch.ones(3)), ValueError, "weights must have shape"),
        (lambda: ops.puc_combine(torch.ones(2, 40), KEEP, torch.zeros(2)), ValueError, "weights must be positive"),
        (lambda: ops.trimmed_mean(torch.ones(4, 3), 2), ValueError, "trim must be below half of the 4 rows, found 2"),
        (lambda: ops.trimmed_mean(torch.ones(5, 3), 3), ValueError, "trim must be below half of the 5 rows, found 3"),
        (lambda: ops.trimmed_mean(torch.ones(5, 3), -1), ValueError, "trim must be an integer from 0 on, found -1"),
        (lambda: ops.trimmed_mean(torch.ones(5, 3), 1.0), TypeError, "trim must be an integer"),
        (lambda: ops.trimmed_mean(torch.ones(0, 3), 0), ValueError, "rows must have at least one row"),
        (lambda: ops.trimmed_mean(torch.ones(3, 2, dtype=torch.int64), 0), TypeError, "rows must be"),
    ],
)
def test_public_functions_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
