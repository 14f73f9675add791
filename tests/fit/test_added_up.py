# SPDX-License-Identifier: Apache-2.0
"""Updates that nobody reads are added up as they arrive: the same fit without a matrix, and without conflicts."""

import functools
import logging

import pytest
import torch
from cases import in_turn
from resuming import ALGORITHMS, Project, SaveAt, assert_equal, differences
from support import fresh, train, weights

import fl_lightning as fl
from fl_lightning.algorithms import FedAvg
from fl_lightning.data import CohortSampler, Selection
from fl_lightning.fit import options as fit_options

SUMS = (
    "FedAvg", "FedProx", "FedBN", "FedPer", "FedRep", "FedCKA", "FedProc", "FedProto", "Ditto", "FA", "MOON",
    "PropFair",
)  # fmt: skip
"""Methods whose steps are means with weights from the numbers of samples, and that keep no updates."""


class Leaving(CohortSampler):
    """Another client drops out in each round."""

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return Selection((0, 2, 3, 5), drop_outs=((0, 2, 3, 5)[round],))


OPTIONS = {
    "plain": {},
    "drop-outs": {"sampler": Leaving(), "clients_per_round": 4},
    "Adam": {"server_optimizer": functools.partial(torch.optim.Adam, lr=0.01), "client_optimizer_state": "keep"},
    "bfloat16": {"precision": "bf16-true"},
    "float64": {"precision": "64-true"},
    "all": {"clients_per_round": 1.0},
}


def test_the_methods_whose_updates_are_added_up():
    chosen = {name: fl.FederatedStrategy(make()).options for name, make in ALGORITHMS.items()}
    assert {k for k, v in chosen.items() if v.adds_up(2**30 + 1)} == set(SUMS)
    assert not any(v.adds_up(2**30) for v in chosen.values())


@pytest.mark.parametrize(("name", "option"), in_turn(SUMS, OPTIONS))
def test_the_bits_are_those_of_a_matrix(name, option):
    one, two = (
        train(fresh(norm=True, momentum=0.9), algorithm=ALGORITHMS[name](), count_conflicts=counts, **OPTIONS[option])
        for counts in (False, True)
    )
    summed, counted = one.strategy.last_round, two.strategy.last_round
    assert "one update, and the sum of" in str(one.strategy.memory_plan)
    assert torch.equal(weights(one.module), weights(two.module))
    assert not differences(one.strategy._fits.states(), two.strategy._fits.states())
    assert (summed.conflicts, summed.layer_conflicts) == (None, {})
    assert torch.equal(summed.update_norms, counted.update_norms)
    assert torch.equal(summed.weights, counted.weights)
    assert (summed.step_norm, summed.dropped) == (counted.step_norm, counted.dropped)
    gone = two.trainer.callback_metrics.keys() - one.trainer.callback_metrics.keys()
    assert gone == {"fed/conflicts", *(f"fed/conflicts_in/{layer}" for layer in counted.layer_conflicts)}


@pytest.mark.parametrize(
    "options",
    [
        {"on_client_error": "drop"},
        {"guard": fl.guards.NormClipping(1.0)},
        {"attack": fl.attacks.ZeroUpdates(clients=(1,))},
        {"client": fl.algorithms.SCAFFOLD(weighting="samples")},
        {"executor": fl.executors.Parallel(2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_fits_hold_a_matrix_and_count_on_demand(options):
    found = train(rounds=1, count_conflicts=False, **options)
    assert found.strategy.last_round.conflicts is None
    assert any(name.startswith("update matrix") for name in found.strategy.memory_plan)


def test_conflicts_are_counted_unless_a_large_matrix_would_be_for_them_alone(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    monkeypatch.setattr(fit_options, "_COUNTED", 3 * 140 * 4)
    assert train(rounds=1).strategy.last_round.conflicts is not None
    monkeypatch.setattr(fit_options, "_COUNTED", 3 * 140 * 4 - 1)
    assert train(rounds=1, count_conflicts=True).strategy.last_round.conflicts is not None
    with caplog.at_level("INFO"):
        found = train(rounds=1)
    assert found.strategy.last_round.conflicts is None
    assert found.strategy.memory_plan["one update, and the sum of 3"] == 4 * 144 + 8 * 140
    assert "Updates are added up as they arrive, so nobody counts conflicts (count_conflicts)." in caplog.text


def test_a_round_that_was_broken_off_is_trained_again(tmp_path):
    project = Project(strategy={"count_conflicts": False}, rounds=3)
    save = SaveAt(tmp_path, 1, ("on_train_batch_end",))
    whole = project.fit(tmp_path, extra=(save,))
    resumed = project.fit(tmp_path, ckpt_path=tmp_path / "on_train_batch_end-1.ckpt")
    assert_equal(resumed, whole, save.logged["on_train_batch_end-1"])


class Twice(FedAvg):
    reads, known_weights = "sums", FedAvg.known_weights

    def aggregate(self, cohort):
        return cohort.updates.combine(2 * self.known_weights(cohort.sizes))


class Own(FedAvg):
    reads = "sums"

    def aggregate(self, cohort):
        return 2 * super().aggregate(cohort)


def test_a_step_with_other_weights_is_refused_and_a_method_of_ones_own_says_that_it_knows_them():
    with pytest.raises(AttributeError, match="found that it reads other sums"):
        train(algorithm=Twice(), count_conflicts=False)
    assert Own().known_weights(torch.ones(2)) is None
    assert "update matrix (3 x 140)" in train(algorithm=Own(), rounds=1, count_conflicts=False).strategy.memory_plan
