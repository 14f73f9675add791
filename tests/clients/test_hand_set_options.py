# SPDX-License-Identifier: Apache-2.0
"""Rates written by hand: one client is plain Lightning, and each of several has its rates."""

from math import ceil
from types import SimpleNamespace

import pytest
import torch
from hand_schedules import HAND_SCHEDULES, RATE, DecayInSteps
from plain_loop import client_batches, federate
from schedules import Ordered, final_rate, one_client_fit, plain_fit
from support import fresh, train, weights
from torch.nn.functional import cross_entropy

import fl_lightning as fl
from fl_lightning.clients.schedules import HandSetOptions
from fl_lightning.core.seeding import derive_seed

ROUNDS = 3
each = pytest.mark.parametrize("module", HAND_SCHEDULES)


@each
def test_one_client_is_plain_lightning_bit_for_bit(module):
    plain, ours = fresh(module), fresh(module)
    expected, found = plain_fit(plain, Ordered(), ROUNDS), one_client_fit(ours, Ordered(), ROUNDS)
    assert ours.seen.after == plain.seen.after
    assert len(set(plain.seen.after)) > 2
    assert torch.equal(weights(ours), weights(plain))
    assert found.optimizers[0].param_groups[0].keys() == expected.optimizers[0].param_groups[0].keys()
    assert final_rate(found) == final_rate(expected)


@each
def test_several_clients_have_the_rates_of_plain_lightning_one_after_the_other_and_in_workers(module):
    # Three equal clients of three batches: a plain fit on as much data has the length of a visit.
    plain, data = fresh(module), fl.FederatedDataModule(Ordered(60), fl.data.IID(3))
    expected = plain_fit(plain, Ordered(20), ROUNDS)
    options = [plain.seen.after[2 * index :][:2] for index in range(ROUNDS)]
    fits = [train(fresh(module), ROUNDS, data=data, executor=executor) for executor in (None, fl.executors.Parallel(2))]
    assert fits[1].strategy.executor_fallback is None
    seen = fits[0].module.seen.after
    assert [seen[place : place + 2] for place in range(0, len(seen), 2)] == [o for o in options for _ in range(3)]
    assert torch.equal(*(weights(fit.module) for fit in fits))
    assert {final_rate(fit.trainer) for fit in fits} == {final_rate(expected)}

    def by_hand(model, batches, index):
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for (x, y), (rate, momentum) in zip(batches, options[index], strict=True):
            optimizer.param_groups[0].update(lr=rate, momentum=momentum)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    assert torch.allclose(
        weights(fits[0].module), weights(federate(fresh(module), ROUNDS, by_hand, data=data)), atol=1e-6
    )


def test_options_move_on_as_in_the_visit_of_the_client_with_most_samples():
    found = train(fresh(DecayInSteps), 2, clients_per_round=2, seed=5)
    sizes, steps, differ = client_batches().sizes, 0, False
    for index in range(2):
        chosen = fl.data.UniformSampler().select(index, 2, sizes, derive_seed(5, "sampler")).client_ids
        visits = {int(sizes[client]): ceil(sizes[client] / 10) for client in chosen}
        differ |= len(set(visits.values())) == 2
        steps += visits[max(visits)]
    assert differ
    assert final_rate(found.trainer) == pytest.approx(RATE * 0.95**steps)


def test_a_number_that_becomes_a_list_is_set_by_hand_and_a_list_that_stays_is_not():
    group = {"lr": 0.5, "betas": [0.9, 0.99]}
    optimizer = SimpleNamespace(param_groups=[group])
    options = HandSetOptions(SimpleNamespace(all=[optimizer], settable=lambda group: list(group)))
    options.begin()
    group["lr"] = [0.5]
    assert options.end() == [[{"lr": [0.5]}]]
