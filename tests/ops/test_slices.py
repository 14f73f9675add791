# SPDX-License-Identifier: Apache-2.0
"""Sums over columns have the same bits whoever holds which columns: slices, added along a binary tree."""

from itertools import pairwise

import cases
import pytest
import torch
from implementations import DTYPES, every, gaussian, offsets_of, random_bits

from fl_lightning import ops
from fl_lightning.ops.slices import add_tree, slice_columns, subtrees

WIDTH = 8192
SHARES = (1, 2, 3, 4, 5, 7, 8, 16)


class Named(str):
    """Says how it was added up."""

    def __add__(self, other):
        return Named(f"({self!s}{other!s})")


@pytest.mark.parametrize(
    ("columns", "width"),
    [(0, WIDTH), (1, WIDTH), (256 * WIDTH, WIDTH), (256 * WIDTH + 1, 2 * WIDTH), (10**9, 512 * WIDTH)],
)
def test_width_of_slices(columns, width):
    assert slice_columns(columns) == width
    assert columns <= 256 * width


@pytest.mark.parametrize(
    ("slices", "spans", "order"),
    [
        (1, [1], "0"),
        (7, [1] * 7, "(((01)(23))((45)6))"),
        (7, [4, 3], "(01)"),
        (7, [4, 2, 1], "(0(12))"),
        (6, [1, 1, 2, 1, 1], "(((01)2)(34))"),
        (9, [1] * 9, "((((01)(23))((45)(67)))8)"),
    ],
)
def test_the_tree(slices, spans, order):
    total = slices * WIDTH - 5
    borders = [min(sum(spans[:i]) * WIDTH, total) for i in range(len(spans) + 1)]
    spans = list(pairwise(borders))
    assert add_tree(spans, (Named(i) for i in range(len(spans))), total) == order


@pytest.mark.parametrize(
    ("begin", "end", "nodes"),
    [
        (0, 7, [(0, 7)]),
        (0, 6, [(0, 4), (4, 6)]),
        (1, 7, [(1, 2), (2, 4), (4, 7)]),
        (3, 6, [(3, 4), (4, 6)]),
        (6, 7, [(6, 7)]),
        (5, 5, []),
    ],
)
def test_the_largest_nodes_of_a_run(begin, end, nodes):
    total = 7 * WIDTH - 5
    columns = [(a * WIDTH, min(b * WIDTH, total)) for a, b in nodes]
    assert subtrees(begin * WIDTH, min(end * WIDTH, total), total) == columns


def test_runs_and_spans_that_are_none():
    for begin, end in ((1, WIDTH), (0, 5), (WIDTH, 0), (0, 9 * WIDTH), (-WIDTH, WIDTH)):
        with pytest.raises(ValueError, match="begin and end must be multiples of 8192 or the end of 60000 columns"):
            subtrees(begin, end, 60_000)
    for spans in ([], [(0, WIDTH), (2 * WIDTH, 60_000)]):
        with pytest.raises(ValueError, match="spans must follow one another"):
            add_tree(spans, [torch.ones(1)] * len(spans), 60_000)


def borders_of(total, shares):
    """Borders of shares with as equal numbers of slices as can be."""
    width = slice_columns(total)
    slices = -(-total // width)
    return [min(slices * share // shares * width, total) for share in range(shares + 1)]


def tracked(call, rows, others, offsets, total):
    counts = (others[0] > 0).to(torch.uint8)
    return call("puc_track", rows[0].clone(), counts, 1, 2, offsets, total)[1]


SUMS = {
    "layer_gram": lambda call, rows, others, offsets, total: call("layer_gram", rows, offsets, total),
    "layer_cross_gram": lambda call, *arguments: call("layer_cross_gram", *arguments),
    "layer_chosen_gram": lambda call, rows, others, offsets, total: call(
        "layer_chosen_gram", rows, others, offsets, torch.tensor([2, 0, 4]), total
    ),
    "layer_dots": lambda call, rows, others, offsets, total: call(
        "layer_dots", rows, others[0].to(rows.dtype), offsets, total
    ),
    "puc_track": tracked,
}
SIZES = {
    "one layer": (8 * WIDTH + 1000,),
    "layers across slices": (5000, 0, 20_000, 1, 4 * WIDTH + 7, 300, 2 * WIDTH, 3000),
    "a layer that ends with a slice": (3 * WIDTH, 0, WIDTH, WIDTH // 2, WIDTH // 2, 3, 9000),
    "many short layers": (0, *(100,) * 600, 0),
    "less than a slice": (40, 200),
}


def check_shares(call, op, rows, others, offsets, shares):
    """One matrix against shards of its columns, each in memory of its own."""
    n = rows.shape[1]
    whole = SUMS[op](call, rows, others, offsets, None)
    assert torch.equal(SUMS[op](call, rows, others, offsets, n), whole)
    for count in shares:
        borders = borders_of(n, count)
        spans = [span for a, b in pairwise(borders) for span in subtrees(a, b, n)]
        parts = (
            SUMS[op](call, rows[:, a:b].clone(), others[:, a:b].clone(), offsets.clamp(a, b) - a, n) for a, b in spans
        )
        assert torch.equal(add_tree(spans, parts, n), whole), count


@every
@pytest.mark.parametrize(("op", "m", "dtype"), cases.pairwise(SUMS, [1, 2, 3, 10, 40], DTYPES))
def test_any_number_of_shares(call, op, m, dtype):
    for place, sizes in enumerate(SIZES.values()):
        offsets = offsets_of(sizes)
        n = int(offsets[-1])
        other = dtype if op == "layer_dots" or place % 2 else torch.bfloat16
        shares = SHARES if m == 3 else SHARES[1 + (m + place) % 3 :: 3]
        check_shares(call, op, gaussian(m, n, dtype), gaussian(5, n, other, seed=1), offsets, shares)


@every
@pytest.mark.parametrize("op", SUMS)
def test_slices_of_more_columns(call, op):
    offsets = offsets_of((7, 2_000_000, 300, 400_000))
    n = int(offsets[-1])
    assert slice_columns(n) == 2 * WIDTH
    check_shares(call, op, gaussian(2, n), gaussian(5, n, seed=1), offsets, (2, 7))


@every
@pytest.mark.parametrize("op", ["layer_gram", "layer_cross_gram", "layer_dots"])
def test_numbers_beyond_the_range_of_float32_and_nan(call, op):
    """Where float32 does not do, one part of a layer is summed another way; which one does not depend on the share."""
    offsets = offsets_of((3 * WIDTH + 100, 200, 2 * WIDTH))
    rows, others = gaussian(6, int(offsets[-1])), gaussian(5, int(offsets[-1]), seed=1)
    rows[0, 2 * WIDTH :] *= 1e25
    others[0, 2 * WIDTH + 50 :] *= 1e25
    rows[1, : 2 * WIDTH] *= 1e-25
    check_shares(call, op, rows, others, offsets, (2, 3, 6))
    rows[2, WIDTH + 1] = torch.nan
    whole = SUMS[op](call, rows, others, offsets, None)
    assert whole[0, 2].isnan().all()
    assert whole[1:].isfinite().all()


@every
def test_no_sum_is_minus_zero(call):
    """Or adding the nothing of another share would change a bit."""
    rows = torch.tensor([[-1e-200] * 3, [1e-200] * 3], dtype=torch.float64)
    for columns in (rows, rows.repeat(1, WIDTH)):
        offsets = offsets_of((columns.shape[1],))
        for sums in (
            call("layer_gram", columns, offsets),
            call("layer_cross_gram", columns, -columns, offsets),
            call("layer_dots", columns, columns[0].clone(), offsets),
        ):
            assert (sums == 0).all()
            assert not sums.signbit().any()


@every
def test_bits_and_counts_of_shares(call):
    n, offsets = 5 * WIDTH + 77, offsets_of((3 * WIDTH + 5, 2 * WIDTH + 72))
    row, past = gaussian(1, n)[0], random_bits(1, n)[0][0].to(torch.uint8)
    counts = past.clone()
    words, _ = call("puc_track", row, counts, 1, 2, offsets)
    found, after = [], []
    for a, b in ((0, 4 * WIDTH), (4 * WIDTH, n)):
        own = past[a:b].clone()
        found.append(call("puc_track", row[a:b], own, 1, 2, offsets.clamp(a, b) - a, n)[0])
        after.append(own)
    assert torch.equal(torch.cat(found), words)
    assert torch.equal(torch.cat(after), counts)


def test_columns_that_are_no_node_of_the_tree():
    offsets = torch.tensor([0, 2 * WIDTH])
    rows = torch.ones(1, 2 * WIDTH)
    assert ops.layer_gram(rows, offsets, total_columns=5 * WIDTH + 3).item() == 2 * WIDTH
    assert ops.layer_gram(rows[:, :0], offsets[:1].repeat(2), total_columns=WIDTH).item() == 0
    for n, total in ((2 * WIDTH, WIDTH), (3 * WIDTH, 5 * WIDTH), (WIDTH + 3, 2 * WIDTH + 3), (5, 6)):
        rows, offsets = torch.ones(1, n) if n > 2 * WIDTH else rows[:, :n], torch.tensor([0, n])
        counts = torch.zeros(n, dtype=torch.uint8)
        for call in (
            lambda a=rows, o=offsets, t=total: ops.layer_gram(a, o, total_columns=t),
            lambda a=rows, o=offsets, t=total: ops.layer_cross_gram(a, a, o, total_columns=t),
            lambda a=rows, o=offsets, t=total: ops.layer_dots(a, a[0], o, total_columns=t),
            lambda a=rows, o=offsets, t=total, c=counts: ops.puc_track(a[0], c, 0, 0, o, total_columns=t),
        ):
            with pytest.raises(ValueError, match=f"total_columns must be .* {n} columns are a node .* found {total}"):
                call()
