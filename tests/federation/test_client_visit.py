# SPDX-License-Identifier: Apache-2.0
"""One visit of a client elsewhere: what it begins with, and what it leaves behind."""

from contextlib import nullcontext
from typing import ClassVar

import lightning as L
import pytest
import torch
from support import Classifier, federated_blobs, fit, fresh
from test_federated_client import message, one_client
from test_module_state import Gathers, inside, made, one_round

import fl_lightning as fl
from fl_lightning.algorithms import ClientReport, ClientRule, FedLF
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import plain
from fl_lightning.federation.messages import federation_mean_visit
from fl_lightning.lightning.round_clock import MeanVisit

pytestmark = pytest.mark.filterwarnings("ignore:what training gathers in .* goes to the server")


class Evaluated(L.LightningDataModule):
    """The blobs' batches, all of them one client's."""

    def __init__(self):
        super().__init__()
        self.all = federated_blobs(1)

    def train_dataloader(self):
        return self._of(self.all.train_dataloader())

    def val_dataloader(self):
        return self._of(self.all.val_dataloader())

    def test_dataloader(self):
        return self._of(self.all.test_dataloader())

    def _of(self, loaders):
        return torch.utils.data.DataLoader(loaders.dataset, batch_size=loaders.batch_size)


class Limits(L.Callback):
    """Notes the trainer's limit when a fit is over."""

    def __init__(self):
        self.found = None

    def on_fit_end(self, trainer, pl_module):
        self.found = trainer.limit_train_batches


def test_every_stage_has_a_limit_of_its_own():
    limits, over = {"limit_train_batches": 2, "limit_val_batches": 3, "limit_test_batches": 4}, Limits()
    client = one_client(Evaluated(), trainer={"accelerator": "cpu", "callbacks": [over], **limits})
    assert client.train(message()).steps == over.found == 2
    assert [int(client.evaluate(message(1), stage).sizes) for stage in ("val", "test")] == [30, 40]


class Partly(Classifier):
    """Trains its last layer alone, though the first could be trained as well."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[-1].parameters(), lr=0.1)


def test_a_module_that_trains_a_part_is_evaluated_with_that_part():
    server = fl.FederatedServer(fresh(Partly, 7), fl.FederatedStrategy(seed=5), 4)
    told = server.evaluation_message(1)
    assert told.params.numel() == 36
    found = one_client(Evaluated(), module=fresh(Partly, 7)).evaluate(told)
    whole = one_client(Evaluated(), module=fresh(Partly, 7)).evaluate(fl.ServerMessage(1, 2 * told.params))
    assert not torch.equal(found.values["val_loss"], whole.values["val_loss"])


def test_the_module_s_parameters_are_its_own_again():
    module = fresh()
    for _ in range(2):
        one_client(module=module).train(message())
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


class Draws(Classifier):
    """Draws random numbers where it is evaluated, and may then fail."""

    fails = False

    def validation_step(self, batch, batch_idx):
        torch.rand(1)
        if self.fails:
            raise LookupError("no such sample")
        super().validation_step(batch, batch_idx)


def test_an_evaluation_that_fails_leaves_generators_as_others_do():
    drawn = []
    for fails in (False, True):
        module = fresh(Draws)
        module.fails = fails
        client = one_client(Evaluated(), module=module)
        torch.manual_seed(1)
        with pytest.raises(LookupError, match="no such sample") if fails else nullcontext():
            client.evaluate(message(1))
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


class AtEnd(Gathers):
    """Notes where schedules stand when a round is over; its loss depends on that."""

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.heat *= 1 + self.global_step / 100 + self.trainer.optimizers[0].param_groups[0]["lr"]

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class AtEndByHand(Gathers):
    """The same with manual optimization, whose steps the visit tells."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        self.heat *= 1 + self.global_step / 100


@pytest.mark.filterwarnings("ignore:what a client leaves in AtEnd")
@pytest.mark.parametrize("make", [AtEnd, AtEndByHand])
def test_a_hook_after_the_round_sees_the_clock_of_a_fit(make):
    whole = inside(make)
    server, clients = made(make)
    for _ in range(3):
        one_round(server, clients)
    server.finish()
    assert server.module.heat == whole.heat != 0.125
    assert torch.equal(server.module.w, whole.w)


class Keeps(ClientRule):
    """Keeps its first model for good."""

    own = at_clients()

    def __init__(self):
        self.begun = []

    def begin_fit(self, federation):
        self.told = federation.num_clients, federation.rounds

    def begin_client(self, work):
        self.begun.append(None if (own := self.own.get(work.client_id)) is None else own.params.clone())

    def end_client(self, work):
        if self.own.get(work.client_id) is not None:
            return ClientReport()
        model = Snapshot(work.row.cpu(), packed_buffers(work.module, torch.device("cpu")))
        return ClientReport(local_state={"own": plain(model)})


def test_what_a_client_had_stays_where_a_visit_keeps_nothing(tmp_path):
    first, *_ = sent = [
        one_client(client=Keeps(), folder=tmp_path).train(message(index, counted=index - 1 if index else None))
        for index in range(4)
    ]
    client = one_client(client=Keeps(), folder=tmp_path)
    client.train(message(4, counted=3, rounds=6))
    rule = client._options.client_rule
    (own,) = rule.begun
    assert rule.told == (4, 6)
    assert own.shape == first.update.shape
    assert [answer.round for answer in sent] == [0, 1, 2, 3]
    stored = [torch.load(path, weights_only=True)["rule"] for path in sorted((tmp_path / "client-000001").iterdir())]
    assert all(torch.equal(rule["own"]["params"], own) for rule in stored)


class Counts(Classifier):
    """Counts the steps that it is asked for where nobody puts them back, and draws random numbers in them."""

    asked: ClassVar[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.asked.append(batch_idx)
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()))


def test_a_loss_is_that_of_its_round_and_trains_nothing():
    options = {"norm": True, "dropout": 0.3}
    client, asked = one_client(module=fresh(Counts, **options), algorithm=FedLF()), told(2, **options)
    Counts.asked.clear()
    alone = client.loss(asked)
    measured = len(Counts.asked)
    assert alone == client.train(asked).loss
    assert measured < len(Counts.asked) - measured
    assert alone != client.loss(told(0, **options))


def told(when, **options):
    module = fresh(**options)
    layout = fl.ParamLayout.from_module(module)
    return fl.ServerMessage(when, layout.flatten(layout.parameters(module)))


def test_a_client_without_data_is_named():
    data = fl.FederatedDataModule(federated_blobs(4).train_dataloader().dataset, [range(9), range(0)], batch_size=10)
    with pytest.raises(ValueError, match="client 1 must have training data, found none"):
        one_client(data).train(message())


OWN = MeanVisit(steps=4, batches=7, pass_batches=7, window=2)


@pytest.mark.parametrize(
    ("given", "has_all", "epochs", "full", "expected"),
    [
        (None, True, 1, False, OWN),
        (4, True, 1, False, OWN),
        (None, False, 1, False, None),
        (5, False, 1, False, MeanVisit(5, 10, 10, 2)),
        (5, False, 2, False, MeanVisit(5, 10, 5, 2)),
        (5, False, 3, False, MeanVisit(5, 10, 4, 2)),
        (1, False, 1, True, MeanVisit(1, 7, 7, 2)),
    ],
)
def test_the_clock_of_a_federation(given, has_all, epochs, full, expected):
    found = federation_mean_visit(message(steps_per_round=given), OWN, has_all, epochs, full)
    assert found == expected


class Reads(Classifier):
    """Its loss depends on the clock."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.global_step / 10)


def test_full_gradients_take_one_step_of_the_clock_a_round():
    """At a client that has the data of all, and knows the clock by them."""
    inside = fit(fresh(Reads), 3, data=federated_blobs(4), algorithm=FedLF(), full_gradients=True)
    assert inside.trainer.global_step == 3
    steps = []

    class Told(Reads):
        def training_step(self, batch, batch_idx):
            steps.append(self.global_step)
            return super().training_step(batch, batch_idx)

    one_client(federated_blobs(4), module=fresh(Told), full_gradients=True).train(message(2))
    assert set(steps) == {2}
