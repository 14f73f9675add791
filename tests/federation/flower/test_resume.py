# SPDX-License-Identifier: Apache-2.0
"""The server's checkpoint: written after every round, gone on from bit for bit, refused by name."""

import re

import pytest
import torch

pytest.importorskip("flwr")
from functools import partial

from in_process import federation
from resuming import differences
from support import Classifier, weights

from fl_lightning.algorithms import SCAFFOLD, Ditto, FedAvg, FedLF

pytestmark = pytest.mark.filterwarnings(
    "ignore:(FedMDFG|MMPF) asks clients for losses", "ignore:the fit goes on with other settings"
)


def state_of(strategy):
    return strategy.server.state_dict()


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)]


CASES = {
    "SCAFFOLD": {"method": SCAFFOLD},
    "Ditto": {"method": Ditto, "options": {"norm": True}},
    "kept Adam": {"method": FedAvg, "options": {"optimizer": "Adam"}, "client_optimizer_state": "keep"},
    "momentum of the server": {"method": FedAvg, "server_optimizer": partial(torch.optim.SGD, momentum=0.9)},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_goes_on_gives_the_bits_of_one_that_was_not_interrupted(tmp_path, name):
    case = dict(CASES[name])
    method = case.pop("method")
    federation(tmp_path / "cut", method, 2, **case)
    # The run is asked for four rounds from the start: the server ends after two, as if it had been killed.
    resumed, _ = federation(tmp_path / "cut", method, 4, **case)
    whole, _ = federation(tmp_path / "whole", method, 4, **case)
    assert len(resumed.records) == 2
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert not differences(state_of(resumed), state_of(whole))
    assert not differences(dict(resumed.last_evaluation.values), dict(whole.last_evaluation.values))


def test_clients_join_and_leave_between_runs(tmp_path):
    run = partial(federation, tmp_path, SCAFFOLD, clients_per_round=1.0)
    before = dict(run(2, clients=3)[0].server.client_rule.c_i)
    joined = run(3, clients=4)[0].server
    assert joined.last_round.client_ids == (0, 1, 2, 3)
    assert joined.client_rule.c_i.keys() == {0, 1, 2, 3}
    left = run(4, clients=2)[0].server
    assert left.last_round.client_ids == (0, 1)
    assert torch.equal(left.state_dict()["client_rule"]["c_i"][3], joined.client_rule.c_i[3])
    assert not torch.equal(joined.client_rule.c_i[0], before[0])


class Killed(BaseException):
    pass


def test_a_server_killed_while_clients_train_runs_the_round_again(tmp_path):
    def kill(order, reply):
        if order.metadata.group_id == "2" and order.metadata.message_type == "train":
            raise Killed  # clients have trained and kept what they would keep
        return [reply]

    with pytest.raises(Killed):
        federation(tmp_path / "cut", Ditto, 4, lose=kill)
    resumed, _ = federation(tmp_path / "cut", Ditto, 4)
    whole, _ = federation(tmp_path / "whole", Ditto, 4)
    assert [record.round for record in resumed.records] == [2, 3]
    assert not differences(state_of(resumed), state_of(whole))


def test_a_run_that_is_over_trains_nothing_more(tmp_path):
    first, _ = federation(tmp_path, FedLF, 2)
    again, _ = federation(tmp_path, FedLF, 2)
    assert again.records == []
    assert torch.equal(weights(first.model), weights(again.model))
    assert not differences(dict(first.last_evaluation.values), dict(again.last_evaluation.values))


def test_a_fresh_federation_leaves_the_states_of_others_alone(tmp_path):
    federation(tmp_path, Ditto, 2)
    (tmp_path / "run" / "last.ckpt").rename(tmp_path / "run" / "kept.ckpt")
    federation(tmp_path, Ditto, 1)  # its clients begin anew, beside those of the first
    (tmp_path / "run" / "kept.ckpt").rename(tmp_path / "run" / "last.ckpt")
    resumed, _ = federation(tmp_path, Ditto, 3)
    whole, _ = federation(tmp_path / "whole", Ditto, 3)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert not differences(dict(resumed.last_evaluation.values), dict(whole.last_evaluation.values))
    assert len(list((tmp_path / "state").iterdir())) == 2


def test_an_object_starts_once(tmp_path):
    strategy, grid = federation(tmp_path, FedAvg, 1)
    with pytest.raises(ValueError, match="start can be called once"):
        strategy.start(grid, 2)


# ---- what a run leaves to read


def test_both_sides_say_how_the_round_goes(tmp_path, caplog):
    with caplog.at_level("INFO"):
        federation(tmp_path, FedLF, 2, clients_per_round=4)
    said = "\n".join(record.getMessage() for record in caplog.records)
    for words in (
        r"FedLF needs every client's update in clear",
        r"client 2 has introduced itself, and waits for the server",
        r"client 2 is connected",
        r"round 0 \(1 of 2\): 4 of 4 clients train",
        r"round 0: client 1 trained on 45 samples for 5 steps \(",
        r"after 2 rounds: validation of client 1 on 18 samples: val_loss [\d.]+, val_acc [\d.]+ \(",
        r"round 0 \(1 of 2\): 4 clients; training loss [\d.]+; \d in conflict with the step; [\d.]+ s, of these",
        r"evaluation after 2 rounds: 4 clients; val_loss mean .*val_acc mean [\d.]+, worst 10 % [\d.]+; fairness angle",
    ):
        assert re.search(words, said), words
