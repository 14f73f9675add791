# SPDX-License-Identifier: Apache-2.0
"""Server and clients behind Flower's messages give the bits of ``Trainer(FederatedStrategy(...)).fit``."""

import math

import pytest
import torch

pytest.importorskip("flwr")

from by_hand import CARRIED
from in_process import federation
from resuming import ALGORITHMS, Rows
from support import Adapted, Classifier, federated_blobs, fit, fresh, weights
from watching import Records

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, FedAvg, FedHEAL, FedLF

pytestmark = pytest.mark.filterwarnings(
    "ignore:(FedMDFG|MMPF) asks clients for losses in the middle of a round:UserWarning"
)


def same(one, two):
    """Equal, NaN included."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.isnan(), two.isnan()) and torch.equal(one.nan_to_num(), two.nan_to_num())
    return one == two or (isinstance(one, float) and math.isnan(one) and math.isnan(two))


def compare(tmp_path, method, rounds=3, module=Classifier, options=None, trainer=None, **shared):
    """The same federation in a trainer and over messages: weights, records, evaluations and logged numbers."""
    records, logged, apart_logged = Records(), Rows(), Rows()
    client = shared.pop("client", None)
    inside = fit(
        fresh(module, **(options or {})), rounds, data=federated_blobs(4), callbacks=[records], logger=logged,
        algorithm=method(), client=None if client is None else client(), **shared, **(trainer or {}),
    )  # fmt: skip
    strategy, grid = federation(
        tmp_path, method, rounds, module, options, client=client, trainer={"accelerator": "cpu", **(trainer or {})},
        logger=apart_logged, **shared,
    )  # fmt: skip
    assert torch.equal(weights(strategy.model), weights(inside.module))
    assert len(strategy.records) == rounds
    for ours, theirs in zip(strategy.records, records.rounds, strict=True):
        for name, value in vars(theirs).items():
            if not name.endswith("seconds"):
                assert same(getattr(ours, name), value), name
    theirs, ours = records.evaluations[-1], strategy.last_evaluation
    assert ours.client_ids == theirs.client_ids
    assert ours.sizes.equal(theirs.sizes)
    assert set(ours.values) == set(theirs.values)
    assert all(same(ours.values[name], values) for name, values in theirs.values.items())
    assert (ours.modes, ours.round, ours.undefined) == (theirs.modes, theirs.round, theirs.undefined)
    wanted, found = (_by_step(rows.rows) for rows in (logged, apart_logged))
    assert found.keys() == wanted.keys()
    for step, numbers in found.items():
        own = {name: value for name, value in wanted[step].items() if name.startswith("fed/") or name == "epoch"}
        assert {n for n in numbers if not n.endswith("seconds")} == {n for n in own if not n.endswith("seconds")}
        for name, value in own.items():
            if not name.endswith("seconds"):
                assert same(numbers[name], value) or same(_single(numbers[name]), value), name
    return inside, strategy, grid


def _single(number):
    """As Lightning logs what goes through ``self.log``."""
    return float(torch.tensor(number, dtype=torch.float32))


def _by_step(rows):
    found = {}
    for step, numbers in rows:
        found.setdefault(step, {}).update(numbers)
    return found


@pytest.mark.parametrize("name", CARRIED)
def test_every_method_gives_the_bits_of_a_fit(tmp_path, name):
    compare(tmp_path, ALGORITHMS[name], options={"norm": True, "dropout": 0.3})


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [9, 15], 0.1)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


CASES = {
    "bfloat16": {"method": FedLF, "trainer": {"precision": "bf16-true"}},
    "kept Adam": {"method": FedAvg, "options": {"optimizer": "Adam"}, "client_optimizer_state": "keep"},
    "FedHEAL with SCAFFOLD": {"method": FedHEAL, "client": SCAFFOLD},
    "adapters": {"method": FedAvg, "module": Adapted},
    "guards": {"method": FedLF, "guard": [fl.guards.AdaptiveNormClipping(), fl.guards.TrimmedMean(1, rows="own")]},
}


@pytest.mark.parametrize("name", CASES)
def test_options_make_no_difference(tmp_path, name):
    compare(tmp_path, **CASES[name])


def test_a_client_gets_one_message_per_round(tmp_path):
    _, grid = federation(tmp_path, FedLF, 3)
    kinds = [message.metadata.message_type for message in grid.sent]
    assert kinds == ["query.hello"] * 4 + ["train"] * (3 + 4 + 4 + 4)  # evaluated from the second round on
    for message in grid.sent:
        assert [len(message.content.array_records), len(message.content.config_records)] == [1, 1]
