# SPDX-License-Identifier: Apache-2.0
"""Schedules that step within visits, at clients on their own."""

import pytest
import torch
from hand_schedules import InEpochs, WarmUp
from schedules import ByHand, Counted, Glue, Inner, Noam, OneCycle, Rated, Wrapped
from support import federated_blobs, fresh, train
from test_federated_client import compare, message, one_client

import fl_lightning as fl

pytestmark = pytest.mark.filterwarnings("ignore:what training gathers in .* goes to the server.*seen")


class Warm(Rated):
    """SGD, whose rate SCAFFOLD needs."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Epochs(Rated):
    """Steps every second round."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.3), "frequency": 2}]


class ByHandOfAutomatic(Rated):
    """Steps its scheduler itself, beside Lightning."""

    def on_train_batch_end(self, *_):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)]


@pytest.mark.parametrize(
    ("method", "module", "options"),
    [
        (fl.algorithms.FedAvg, Glue, {}),
        (fl.algorithms.FedAvg, OneCycle, {"client_optimizer_state": "keep"}),
        (fl.algorithms.SCAFFOLD, Warm, {}),
        (fl.algorithms.QFedAvg, Warm, {"local_epochs": 2}),
        (fl.algorithms.FedLF, Wrapped, {"trainer": {"gradient_clip_val": 1.0}}),
        (fl.algorithms.FedAvg, Noam, {"full_gradients": False}),
        (fl.algorithms.FedAvg, Inner, {}),
        (fl.algorithms.FedAvg, Counted, {}),
        (fl.algorithms.FedAvg, Epochs, {"trainer": {"accumulate_grad_batches": 2}}),
    ],
)
def test_clients_apart_give_the_bits_of_a_fit(method, module, options):
    """Nobody sends schedules: a client knows them by the round, whatever others say of theirs."""
    compare(method, module, **options)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (ByHand, "ExponentialLR is stepped"),
        (ByHandOfAutomatic, "ExponentialLR is stepped"),
        (WarmUp, "'lr' of param_groups is set"),
        (InEpochs, "'momentum' of param_groups is set"),
    ],
)
def test_rates_that_a_module_moves_itself_are_refused(module, what):
    with pytest.raises(ValueError, match=f"{what} by hand, and a client alone does not know how far"):
        one_client(module=fresh(module)).train(message(steps_per_round=4, rounds=3))


class Reading(Rated):
    """Its loss depends on the clock."""

    def training_step(self, batch, batch_idx):
        progress = self.global_step / (self.trainer.num_training_batches * self.trainer.max_epochs)
        return super().training_step(batch, batch_idx) * (1 + progress)


def test_a_client_that_cannot_know_the_length_of_rounds_asks_for_it():
    with pytest.raises(ValueError, match=r"depends on the whole federation.*send steps_per_round and rounds"):
        one_client(module=fresh(Glue)).train(message())
    with pytest.raises(ValueError, match=r"the server must send rounds in"):
        one_client(module=fresh(Glue)).train(message(steps_per_round=4))
    with pytest.raises(ValueError, match=r"SequentialLR steps within visits.*steps_per_round"):
        one_client(module=fresh(Wrapped)).train(message())
    assert one_client(module=fresh(Glue)).train(message(steps_per_round=4, rounds=3)).steps > 0


def test_a_client_with_all_data_knows_it():
    client = one_client(federated_blobs(4), module=fresh(Wrapped))
    steps = train(fresh(), 1, data=federated_blobs(4)).strategy.fit_description.steps_per_round
    sent = client.train(message(2))
    assert torch.equal(sent.update, client.train(message(2, steps_per_round=steps)).update)
    with pytest.raises(ValueError, match=f"steps_per_round must be that of the federation, {steps}, found {steps + 1}"):
        client.train(message(steps_per_round=steps + 1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rounds": 0}, "rounds of ServerMessage must be None or an integer from 1 to 1e\\+07, found 0"),
        (
            {"steps_per_round": 0},
            "steps_per_round of ServerMessage must be None or an integer from 1 to 1e\\+07, found 0",
        ),
        ({"when": 2, "rounds": 2}, "rounds must be None or more than round 2, found 2"),
    ],
)
def test_clocks_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        message(**fields)
