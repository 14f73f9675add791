# SPDX-License-Identifier: Apache-2.0
"""Device code of ``common_descent``, run on the processor."""

import pytest
import torch
from descent_cases import BOUNDS
from ops import test_common_descent_kernel as every

from fl_lightning.ops import _gram_problems as reference


@pytest.mark.parametrize("given", [False, True], ids=["equal", "scaled"])
@pytest.mark.parametrize("online", [1, 2, 4])
def test_directions_are_those_of_the_vectors(call, online, given):
    every.test_directions_are_those_of_the_vectors(call, online, given)


@pytest.mark.parametrize(
    "test",
    [
        every.test_rows_count_beside_the_lower_median_of_the_others,
        every.test_fair_rows_are_as_long_as_the_mean_or_left_out,
        every.test_bounds_of_directions,
        every.test_a_direction_is_measured_by_the_root_of_the_mean_square,
        every.test_only_online_rows_have_to_fall_and_to_be_there,
        every.test_what_is_not_finite_marks_its_own_matrix,
        every.test_numbers_too_large_for_the_hull_are_marked,
        every.test_matrices_that_are_not_quite_symmetric_count_by_their_symmetric_part,
    ],
    ids=lambda test: test.__name__.removeprefix("test_"),
)
def test_as_every_implementation(call, test):
    test(call)


def test_a_row_counts_beyond_its_share_of_the_median(simt):
    equal = torch.ones(1, 4, 4, dtype=torch.float64)  # four equal rows: each is as long as the median
    assert simt.common_descent(equal, 4, None, None, 0.999, 1e-4, 0.0)[0].sum() == 1
    assert simt.common_descent(equal, 4, None, None, 1.0, 1e-4, 0.0)[0].sum() == 0


@pytest.mark.parametrize("k", [1, 3, 33, 76, 139])
def test_it_agrees_with_the_reference(simt, k):
    """76 rows take more shared memory than a launch has without asking, 139 more than this device has."""
    generator = torch.Generator().manual_seed(k)
    rows = torch.randn(2, k, k + 5, generator=generator, dtype=torch.float64) + 0.3
    gram, online = rows @ rows.mT, max(1, 2 * k // 3)
    weights = torch.randn(online, generator=generator, dtype=torch.float64)
    scale = torch.rand(2, k, generator=generator, dtype=torch.float64) * (torch.arange(k) % 4 != 3)
    cases = ((None, weights), (scale, None)) if k > 40 else ((None, None), (None, weights), (scale, weights))
    for given, fair in cases:
        found = simt.common_descent(gram, online, given, fair, *BOUNDS)
        wanted = reference.common_descent(gram, online, given, fair, *BOUNDS)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("k", [75])
def test_it_has_the_same_bits_under_every_schedule(kernels, k):
    rows = torch.randn(2, k, k // 2, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    arguments = (rows @ rows.mT, k // 2, None, torch.linspace(-1, 1, k // 2, dtype=torch.float64), *BOUNDS)
    want = kernels.schedule("forward").common_descent(*arguments)
    for name in ("reverse", "random", "low_warp", "high_warp"):
        assert all(map(torch.equal, kernels.schedule(name, 1).common_descent(*arguments), want)), name
