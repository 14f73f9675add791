# SPDX-License-Identifier: Apache-2.0
"""Device code of the sums over columns, run on the processor: the same bits whoever holds which columns."""

import pytest
import torch
from implementations import gaussian, offsets_of

from fl_lightning.ops import _reference as reference
from fl_lightning.ops.slices import add_tree, slice_columns

WIDTH = 8192


def nodes_of(n, borders):
    """Columns of nodes that begin at these slices."""
    width = slice_columns(n)
    columns = [border * width for border in borders]
    return list(zip(columns, [*columns[1:], n], strict=True))


def check(call, offsets, borders):
    """The sum over one matrix against sums over nodes, each in memory of its own, added along the tree."""
    n = int(offsets[-1])
    spans = nodes_of(n, borders)
    parts = (call(slice(a, b), offsets.clamp(a, b) - a, n) for a, b in spans)
    whole = call(slice(0, n), offsets, None)
    assert torch.equal(add_tree(spans, parts, n), whole)
    return whole


@pytest.mark.parametrize(
    ("m", "dtype", "slices"),
    [(2, torch.float32, 4), (9, torch.bfloat16, 2), (3, torch.float64, 2), (17, torch.float32, 2), (34, torch.half, 2)],
)
def test_gram_of_slices(simt, m, dtype, slices):
    """A layer of one column, a layer across all slices, one whose parts are short in some slices, an empty one."""
    offsets = offsets_of([1, (slices - 1) * WIDTH + 100, 0, WIDTH - 300, 300])
    rows = gaussian(m, int(offsets[-1]), dtype)
    gram = check(lambda at, own, n: simt.layer_gram(rows[:, at].clone(), own, n), offsets, range(slices))
    exact = reference.layer_gram(rows, offsets)
    norms = exact.diagonal(dim1=1, dim2=2).sqrt()
    assert ((gram - exact).abs() <= 3e-7 * norms[:, :, None] * norms[:, None, :]).all()


@pytest.mark.parametrize("borders", [(0, 1), range(9), (0, 16, 32, 34, 35, 36)], ids=str)
def test_more_slices(simt, borders):
    """Up to five times as many chunks as a warp has lanes. Two matrices' chunks are added up as one's are."""
    count = max(borders) + 1
    offsets = offsets_of([3 * WIDTH // 2, 0, 129, (count - 2) * WIDTH])
    rows, others, step = (gaussian(m, int(offsets[-1]), seed=m) for m in (1, 2, 3))
    counts = (step[1] > 0).to(torch.uint8)
    check(lambda at, own, n: simt.layer_gram(rows[:, at].clone(), own, n), offsets, borders)
    check(lambda at, own, n: simt.layer_squares(rows[:, at].clone(), own, n), offsets, borders)
    check(lambda at, own, n: simt.layer_dots(rows[:, at].clone(), step[0, at].clone(), own, n), offsets, borders)
    if count < 6:
        check(
            lambda at, own, n: simt.layer_cross_gram(rows[:, at].clone(), others[:, at].clone(), own, n),
            offsets,
            borders,
        )
    check(lambda at, own, n: simt.puc_track(rows[0, at].clone(), counts[at].clone(), 1, 2, own, n)[1], offsets, borders)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.half])
def test_dots_of_more_rows_than_a_block_takes(simt, dtype):
    """Rows of the second block begin at another alignment than those of the first, in shares they do not."""
    offsets = offsets_of([2 * WIDTH, 501])
    rows = gaussian(10, 2 * WIDTH + 501, dtype)
    step = rows[3] + rows[4]
    check(lambda at, own, n: simt.layer_dots(rows[:, at].clone(), step[at].clone(), own, n), offsets, range(3))


@pytest.mark.parametrize("m", [4, 18])
def test_what_float32_cannot_sum(simt, m):
    """The chunks that need it are summed again in float64, each by itself."""
    offsets = offsets_of([2 * WIDTH + 200, WIDTH - 200])
    rows = gaussian(m, int(offsets[-1]))
    rows[0, WIDTH + 3000 :] *= 1e25
    rows[1, 5] = torch.nan
    got = simt.layer_gram(rows, offsets)
    spans = nodes_of(3 * WIDTH, (0, 1, 2))
    parts = [simt.layer_gram(rows[:, a:b].clone(), offsets.clamp(a, b) - a, 3 * WIDTH) for a, b in spans]
    torch.testing.assert_close(add_tree(spans, parts, 3 * WIDTH), got, rtol=0, atol=0, equal_nan=True)
    want = reference.layer_gram(rows, offsets)
    assert torch.equal(got.isnan(), want.isnan())
    assert got[0, 1].isnan().all()
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e20)
