# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on (seed, round, client) and on nothing else."""

import random
from itertools import product

import numpy as np
import pytest
import torch

from fl_lightning.core.seeding import derive_seed, isolated, seed_all

CPU = torch.device("cpu")
GOLDEN = {
    (0,): 4246866556266386882,
    (0, "client", 0, 0): 334956284927609729,
    (5, "shuffle", 12, 345, 6): 4148597622910866598,
    (-1, "sampler"): 2018401561886870034,
    (2**70, "loss", 1, 2): 5391206447367347039,
}


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def interrupted(drawn):
    with isolated(3, CPU):
        drawn += [draws() for _ in range(3)]
        raise KeyboardInterrupt


@pytest.mark.parametrize("parts", GOLDEN, ids=str)
def test_seeds_are_the_same_for_ever(parts):
    # A change here silently changes every published run.
    assert derive_seed(*parts) == GOLDEN[parts]


def test_seeds_differ_by_seed_purpose_round_and_client():
    purposes = ("client", "loss", "shuffle")
    seeds = [derive_seed(*parts) for parts in product(range(4), purposes, range(20), range(20))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Neither do parts run into each other.
    assert derive_seed(1, 23) != derive_seed(12, 3)
    # Nor do the low bits, all that numpy takes, fall together.
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)


def test_isolated_seeds_all_generators_and_restores_them():
    seed_all(11, CPU)
    expected = [draws() for _ in range(3)]
    seed_all(11, CPU)
    found = [draws()]
    with isolated(3, CPU):
        inside = [draws() for _ in range(2)]
        with isolated(4, CPU):
            assert draws() != inside[0]
        inside.append(draws())
    found.append(draws())
    with pytest.raises(KeyboardInterrupt):
        interrupted(again := [])
    found.append(draws())
    assert found == expected
    assert inside == again
    assert len(set(inside)) == 3


def test_isolated_does_not_depend_on_what_ran_before():
    found = []
    for before in (0, 17):
        torch.manual_seed(before)
        torch.rand(before), torch.randn(before)  # a half-used pair of normal numbers is state too
        np.random.seed(before)
        np.random.randn(before)
        random.seed(before)
        random.gauss(0, 1)
        with isolated(9, CPU):
            found.append((draws(), float(torch.randn(())), float(np.random.randn()), random.gauss(0, 1)))
    assert found[0] == found[1]


@pytest.mark.parametrize("used", [0, 1, 2, 3])
def test_half_a_pair_of_normal_numbers_outside_survives(used):
    expected = np.random.RandomState(5).randn(8)
    np.random.seed(5)
    found = list(np.random.randn(used))
    while len(found) < 8:
        with isolated(3, CPU):
            np.random.randn(1)
            with isolated(4, CPU):
                np.random.randn(1)
        found.append(np.random.randn())
    assert found == list(expected)


def test_another_generator_outside_comes_back():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        expected = np.random.RandomState(np.random.PCG64(7)).randn(4)
        found = [np.random.randn()]
        inside = []
        for _ in range(2):
            with isolated(9, CPU):
                inside.append(list(np.random.rand(3)))
        assert found + list(np.random.randn(3)) == list(expected)
    finally:
        np.random.set_bit_generator(before)
    assert inside[0] == inside[1] == list(np.random.RandomState(np.random.PCG64(9)).rand(3))


def test_every_generator_takes_seeds_of_63_bits():
    found = []
    for seed in (0, 2**32 - 1, 2**63 - 1 - 5):
        seed_all(seed, CPU)
        found.append(draws())
    assert all(len(set(drawn)) == 3 for drawn in zip(*found, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_isolated_on_a_gpu():
    device = torch.device("cuda", 0)
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state(device)
    with isolated(5, device):
        first = torch.rand(4, device=device)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    with isolated(5, device):
        assert torch.equal(torch.rand(4, device=device), first)
