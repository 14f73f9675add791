# SPDX-License-Identifier: Apache-2.0
"""Device code of ``project_conflicts``, ``min_norm`` and FedHEAL's passes, run on the processor."""

import numpy as np
import pytest
import torch
from implementations import DTYPES, offsets_of
from ops import test_gram_kernels, test_min_norm_kernel, test_puc_kernels
from qp_cases import enumerate_supports, families, objective, relative_gap
from simt_library import ALIGNED, ODD, generator

from fl_lightning import ops
from fl_lightning.ops import _gram_problems
from fl_lightning.ops import _reference as reference

COUNTS = (torch.uint8, torch.int16, torch.int32)


@pytest.mark.parametrize("m", [1, 2, 3, 8, 11, 33, 40, 257])
def test_project_conflicts(simt, m):
    rows = torch.randn(1 if m > 99 else 3, m, m // 2 + 1, generator=generator(m), dtype=torch.float64)
    gram, order = rows @ rows.mT, torch.randperm(m, generator=generator(0))
    keep = torch.rand(m, generator=generator(1)) < (0.95 if m > 99 else 0.3)
    got, want = simt.project_conflicts(gram, order, keep), _gram_problems.project_conflicts(gram, order, keep)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (got != torch.eye(m, dtype=torch.float64)).any() or m == 1


def test_project_conflicts_on_orthogonal_and_zero_rows(simt):
    rows = torch.randint(-2, 3, (40, 6, 3), generator=generator(2)).double()
    rows[:, 2] = 0
    gram, order, keep = rows @ rows.mT, torch.arange(6), torch.zeros(6, dtype=torch.bool)
    got, want = simt.project_conflicts(gram, order, keep), _gram_problems.project_conflicts(gram, order, keep)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert (got[:, [0, 1, 3, 4, 5], 2] == 0).all()


def test_project_conflicts_with_a_bad_order(simt):
    gram, keep = torch.eye(3, dtype=torch.float64)[None], torch.zeros(3, dtype=torch.bool)
    assert simt.project_conflicts(gram, torch.tensor([0, 7, -1]), keep).isnan().all()


@pytest.mark.parametrize(
    "test",
    [
        test_gram_kernels.test_projections_without_matrices_and_with_a_zero_update,
        test_gram_kernels.test_a_nan_in_one_matrix_shows_there_and_nowhere_else,
        test_gram_kernels.test_no_matrices_and_all_zeros,
        test_puc_kernels.test_zero_is_an_increase_and_nan_is_not,
        test_min_norm_kernel.test_one_and_two_rows,
        test_min_norm_kernel.test_ties_fall_to_the_lowest_index,
        test_min_norm_kernel.test_a_zero_row_is_optimal,
        test_min_norm_kernel.test_only_the_symmetric_part_counts,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_as_every_implementation(call, test):
    test(call)


def judge(gram, lam, gap):
    gram, lam, gap = gram.numpy(), lam.numpy(), gap.numpy()
    assert (lam >= 0).all()
    assert np.abs(lam.sum(-1) - 1).max() <= 1e-12
    assert relative_gap(gram, lam).max() <= 1e-10
    np.testing.assert_allclose(gap, np.maximum(relative_gap(gram, lam), 0), atol=1e-14)


@pytest.mark.parametrize("k", [3, 4, 11, 24])
def test_min_norm(simt, k):
    batches = families(np.random.default_rng(k), 1, k).values()
    gram = torch.from_numpy(np.concatenate([batch * 10.0 ** (i % 5 * 6 - 12) for i, batch in enumerate(batches)]))
    lam, gap = simt.min_norm(gram)
    judge(gram, lam, gap)
    for matrix, point in zip(gram.numpy(), lam.numpy(), strict=True):
        if k < 5:
            mean = np.trace(matrix) / k
            assert abs(objective(matrix, point) - enumerate_supports(matrix)) <= 1e-9 * max(mean, 1e-300)


# The last number of rows whose search fits, by the shared memory of a block: 64 KB, 163 KB and 227 KB.
MOST_IN_SHARED_MEMORY = {7: 85, 8: 139, 9: 165}


@pytest.mark.parametrize("major", MOST_IN_SHARED_MEMORY)
def test_searches_are_in_shared_memory_as_far_as_the_device_has_it(kernels, major):
    try:
        kernels.schedule("low_warp").capability(major)
        for k in (73, 74, MOST_IN_SHARED_MEMORY[major], MOST_IN_SHARED_MEMORY[major] + 1):
            gram = torch.from_numpy(families(np.random.default_rng(k), 1, k)["shared direction"])
            judge(gram, *kernels.min_norm(gram))
            wanted = 8 * ((k + 1) ** 2 + 8 * (k + 1)) if k <= MOST_IN_SHARED_MEMORY[major] else 0
            assert kernels.shared_bytes() == wanted, k
    finally:
        kernels.capability(8)


def test_a_search_has_the_same_bits_wherever_its_numbers_are(kernels):
    gram = torch.from_numpy(families(np.random.default_rng(1), 1, 86)["independent"])
    want = kernels.schedule("random", 3).min_norm(gram)
    try:
        assert all(map(torch.equal, kernels.capability(7).min_norm(gram), want))
        assert kernels.shared_bytes() == 0
    finally:
        kernels.capability(8)


def test_min_norm_of_indefinite_matrices(simt):
    rows = np.random.default_rng(0).standard_normal((3, 20, 3)).astype(np.float32)
    gram = torch.from_numpy((rows @ rows.swapaxes(1, 2)).astype(np.float64))
    lam, gap = simt.min_norm(gram)
    assert (gap <= 1e-6).all()
    np.testing.assert_allclose(gap, np.maximum(relative_gap(gram.numpy(), lam.numpy()), 0), atol=1e-14)
    noise = np.random.default_rng(0).standard_normal((6, 8, 8))
    for diagonal in (0, 1, 2):
        gram = torch.from_numpy(noise + noise.swapaxes(1, 2) + diagonal * np.eye(8))
        lam, gap = simt.min_norm(gram)
        assert (lam >= 0).all()
        assert ((lam.sum(1) - 1).abs() <= 1e-12).all()
        assert gap.max() > 1e-3  # far from every minimum, and so it says
        np.testing.assert_allclose(gap, np.maximum(relative_gap(gram.numpy(), lam.numpy()), 0), rtol=1e-9, atol=1e-14)
        # The same attempts with the same ridges as on the processor.
        torch.testing.assert_close(lam, ops.min_norm(gram)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("k", [74])
def test_min_norm_has_the_same_bits_under_every_schedule(kernels, k):
    gram = torch.from_numpy(families(np.random.default_rng(1), 1, k)["shared direction"])
    want = kernels.schedule("forward").min_norm(gram)
    for name in ("random", "high_warp"):
        assert all(map(torch.equal, kernels.schedule(name).min_norm(gram), want))


SIZES = (0, 1, 3, 129, 1000, 0, 33, 31, 2100, 7)
OFFSETS = offsets_of(SIZES)
N = int(OFFSETS[-1])


def check_track(simt, row, counts, threshold, participations, offsets, total=None, rtol=0.0):
    """Bits, counts and norms against the reference; counts are changed."""
    theirs = counts.clone()
    keep, norms = simt.puc_track(row, counts, threshold, participations, offsets, total)
    want = reference.puc_track(row, theirs, min(threshold, 2**31 - 1), participations, offsets)
    assert torch.equal(keep, want[0])
    assert torch.equal(counts, theirs)
    torch.testing.assert_close(norms, want[1], rtol=rtol, atol=0, equal_nan=True)
    return keep


def whole_row(n, dtype=torch.float32, lead=0):
    return torch.randint(-3, 4, (n + lead,), generator=generator(1)).to(dtype)[lead:]


def past(n, participations, counts=torch.uint8):
    return torch.randint(0, participations + 1, (n,), generator=generator(2)).to(counts)


@pytest.mark.parametrize(("threshold", "participations"), [(0, 0), (3, 7), (8, 7), (1 << 40, 7)])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_puc_track(simt, dtype, counts, threshold, participations):
    row = whole_row(N, dtype, lead=threshold % 4)
    check_track(simt, row, past(N, participations, counts), threshold, participations, OFFSETS)


def test_puc_track_with_many_layers(simt):
    offsets = torch.cat([offsets_of((5 * i) % 11 for i in range(299)), torch.tensor([3000])])
    row = torch.randn(3000, generator=generator(300))
    check_track(simt, row, past(3000, 4), 2, 4, offsets, rtol=1e-14)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("total", "n"), [(1 << 24, 9000), (1 << 25, 16384)])
@pytest.mark.parametrize("begin", [ALIGNED, ODD])
def test_puc_track_of_a_large_row(simt, begin, total, n, dtype, counts):
    """Its chunks are so wide that a thread takes several of its runs, or even has to come back for more."""
    offsets = torch.tensor([0, 5000, 5001, 5009, n])
    check_track(simt.outputs(begin), whole_row(n, dtype), past(n, 5, counts), 2, 5, offsets, total)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
def test_puc_of_any_size(simt, n):
    row, weights = whole_row(n), torch.tensor([2.0])
    words = check_track(simt, row, torch.ones(n, dtype=torch.uint8), 1, 1, torch.tensor([0, n]))[None]
    rows = row[None]
    assert torch.equal(simt.puc_combine(rows, words, weights), reference.puc_combine(rows, words, weights))


@pytest.mark.parametrize("lead", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 4, 8, 19])
def test_puc_combine(simt, m, dtype, lead):
    n = 1100 + lead
    rows = torch.full((m, n + lead), float("nan"), dtype=dtype)[:, lead:]
    rows.copy_(torch.randint(-4, 5, (m, n), generator=generator(m)))
    mask = torch.rand(m, n, generator=generator(m + 1)) < 0.4
    rows.masked_fill_(~mask, float("nan"))  # must have no effect
    words = torch.zeros(m, (n + 31) // 32 * 32, dtype=torch.int64)
    words[:, :n] = mask
    keep = (words.view(m, -1, 32) << torch.arange(32)).sum(2).to(torch.int32)
    weights = torch.rand(m, generator=generator(m + 2)) + 0.1
    got, want = simt.puc_combine(rows, keep, weights), reference.puc_combine(rows, keep, weights)
    assert got.isfinite().all()
    assert (got[~mask.any(0)] == 0).all()
    tolerance = {"rtol": 1e-14, "atol": 1e-14} if dtype == torch.float64 else {}
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lead", [0, 1])
def test_puc_combine_with_as_many_columns_as_a_block_has(simt, dtype, lead):
    n = 128 * 16 // dtype.itemsize
    rows = torch.ones(2, n + lead, dtype=dtype)[:, lead:]
    keep = torch.full((2, n // 32), -1, dtype=torch.int32)
    assert (simt.puc_combine(rows, keep, torch.ones(2)) == 1).all()
