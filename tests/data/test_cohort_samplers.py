# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.data import (
    AllClients,
    AvailabilitySampler,
    Selection,
    SizeWeightedSampler,
    UniformSampler,
)
from fl_lightning.data.cohort_samplers import cohort_size

SIZES = torch.tensor([10, 20, 30, 40, 0, 50])
SAMPLERS = [UniformSampler(), SizeWeightedSampler(), AvailabilitySampler(0.7, 0.3)]


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(0, 2**62))
@settings(max_examples=30, deadline=None)
def test_pure_functions_of_seed_and_round(sampler, round_index, size, seed):
    first = sampler.select(round_index, size, SIZES, seed)
    torch.manual_seed(0)
    assert first == sampler.select(round_index, size, SIZES, seed)
    assert len(first.client_ids) <= size
    assert list(first.client_ids) == sorted(set(first.client_ids))
    assert set(first.client_ids) <= set(range(6))


@pytest.mark.parametrize("sampler", [UniformSampler(), SizeWeightedSampler(), AvailabilitySampler(1.0)])
def test_rounds_and_seeds_differ(sampler):
    sizes = torch.full((100,), 5)
    draws = {sampler.select(r, 10, sizes, s).client_ids for r in range(5) for s in range(5)}
    assert len(draws) == 25


def test_uniform_frequencies_include_clients_without_data():
    counts = torch.zeros(6)
    for round_index in range(3000):
        counts[list(UniformSampler().select(round_index, 2, SIZES, 0).client_ids)] += 1
    assert (counts / 3000 - 1 / 3).abs().max() < 0.04


def test_size_weighted_frequencies():
    sizes = torch.tensor([1, 2, 3, 4, 0])
    first, pairs = torch.zeros(5), torch.zeros(5)
    for round_index in range(4000):
        first[list(SizeWeightedSampler().select(round_index, 1, sizes, 0).client_ids)] += 1
        pairs[list(SizeWeightedSampler().select(round_index, 2, sizes, 0).client_ids)] += 1
    assert (first / 4000 - sizes / 10).abs().max() < 0.03
    # Inclusion in two successive draws: w_i + sum_j w_j w_i / (1 - w_j).
    w = sizes[:4] / 10
    expected = w + torch.stack([sum(w[j] * w[i] / (1 - w[j]) for j in range(4) if j != i) for i in range(4)])
    assert (pairs[:4] / 4000 - expected).abs().max() < 0.03
    assert pairs[4] == 0


def test_size_weighted_takes_only_clients_with_data():
    sizes = torch.tensor([0, 3, 0, 4])
    assert SizeWeightedSampler().select(0, 4, sizes, 0).client_ids == (1, 3)
    assert SizeWeightedSampler().select(0, 1, torch.zeros(3).long(), 0).client_ids == ()


def test_all_clients():
    assert AllClients().select(9, 6, SIZES, 1) == Selection((0, 1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="cohort_size must be all 6 clients for AllClients, found 2"):
        AllClients().select(0, 2, SIZES, 0)


def test_availability_per_client():
    sampler = AvailabilitySampler([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], [1.0, 0.0, 0.0, 1.0, 0.0, 0.5])
    here, gone = torch.zeros(6), torch.zeros(6)
    for round_index in range(3000):
        selection = sampler.select(round_index, 6, SIZES, 0)
        here[list(selection.client_ids)] += 1
        gone[list(selection.drop_outs)] += 1
    assert (here / 3000 - torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 0.25])).abs().max() < 0.04
    assert (gone / 3000 - torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.125])).abs().max() < 0.03


def test_availability_takes_whoever_is_there():
    sampler = AvailabilitySampler([1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    assert sampler.select(0, 5, SIZES, 0) == Selection((0, 2))
    assert AvailabilitySampler(0.0).select(0, 5, SIZES, 0) == Selection(())
    wide = AvailabilitySampler(0.5).select(3, 6, SIZES, 0).client_ids
    narrow = AvailabilitySampler(0.5).select(3, 1, SIZES, 0).client_ids
    assert set(narrow) <= set(wide), "who is available must not depend on how many are asked"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: AvailabilitySampler(1.5), "availability of AvailabilitySampler must be .*, found 1.5"),
        (lambda: AvailabilitySampler([0.5, 0.5]).select(0, 1, SIZES, 0), r"one per client \(6\), found 2"),
        (lambda: UniformSampler().select(0, 7, SIZES, 0), "cohort_size must lie between 1 and the 6 clients, found 7"),
        (lambda: SizeWeightedSampler().select(0, 0, SIZES, 0), "found 0"),
        (lambda: Selection((1, 1)), "client_ids must be distinct"),
        (lambda: Selection((1, 2), (3,)), "drop_outs must be among"),
    ],
)
def test_refusals(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_clients_that_are_always_there():
    sampler, sizes, seen = UniformSampler(always=(4, 1)), torch.ones(9), set()
    for when in range(40):
        chosen = sampler.select(when, 4, sizes, 0).client_ids
        assert {1, 4} <= set(chosen)
        assert len(set(chosen)) == 4
        seen |= set(chosen)
    assert seen == set(range(9))
    with pytest.raises(ValueError, match="always must name at most 1 clients with ids below 9"):
        sampler.select(0, 1, sizes, 0)
    with pytest.raises(ValueError, match="ids below 4"):
        sampler.select(0, 3, torch.ones(4), 0)


@pytest.mark.parametrize(
    ("clients_per_round", "registered", "size"),
    [
        (1, 7, 1), (7, 7, 7), (1.0, 7, 7), (0.5, 7, 4), (0.1, 30, 3), (0.101, 30, 4), (0.01, 7, 1), (0.07, 100, 7),
        (0.29, 100, 29), (0.7, 10, 7),
    ],
)  # fmt: skip
def test_fractions_of_clients_are_rounded_up_but_for_their_own_rounding(clients_per_round, registered, size):
    assert cohort_size(clients_per_round, registered) == size
