# SPDX-License-Identifier: Apache-2.0
"""What a step reads besides its batch, in fits: read anew when it changes, as ``torch.compile`` checks it."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from planned_fits import OLD, agree, both, few_shapes, one_shape
from support import Classifier, fresh, train, weights

import fl_lightning as fl
from fl_lightning.algorithms.base import ClientRule


class Reads(Classifier):
    """Reads something that changes, and must not be planned with an old value."""

    what = ""
    factor = 1.0
    table: ClassVar = {"factor": 1.0}

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * getattr(self, self.what)(batch, batch_idx)

    def attribute(self, batch, index):
        return self.factor

    def class_table(self, batch, index):
        return Reads.table["factor"]

    def epoch(self, batch, index):
        return 1 + self.current_epoch

    def number_of_batch(self, batch, index):
        return 2.0 if index % 2 else 1.0

    def last_batch(self, batch, index):
        return 3.0 if self.trainer.is_last_batch else 1.0

    def step(self, batch, index):
        return 2.0 if self.trainer.global_step % 8 > 4 else 1.0

    def learning_rate(self, batch, index):
        return self.trainer.optimizers[0].param_groups[0]["lr"]

    def tensor(self, batch, index):
        return self.tensor_factor

    def after_short_batches(self, batch, index):
        if len(batch[0]) < 9:
            self.factor *= 0.9
        return self.factor

    def set_by_a_callback(self, batch, index):
        return getattr(type(self), "of_client", 1.0)

    def from_an_iterator(self, batch, index):
        return next(self.factors)

    def on_train_epoch_start(self):
        if self.what != "after_short_batches":
            self.factor = 1.0 + self.current_epoch
        Reads.table["factor"] = self.factor
        self.tensor_factor = torch.tensor(self.factor)
        self.factors = iter([1.0 + 0.01 * number for number in range(1000)])


class ForOneClient(Callback):
    """Gives the class an attribute for every second client, and takes it back for the next."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % 2:
            type(pl_module).of_client = 3.0
        elif hasattr(type(pl_module), "of_client"):
            del type(pl_module).of_client


@pytest.mark.parametrize("what", [name for name in vars(Reads) if callable(vars(Reads)[name]) and "train" not in name])
def test_what_python_reads_is_read_anew(what, caplog, monkeypatch):
    monkeypatch.setattr(Reads, "what", what)
    short = what == "after_short_batches"
    fits = {"local_epochs": 1, "data": few_shapes()} if short else {"local_epochs": 2, "data": one_shape()}
    eager, planned, _ = both(caplog, Reads, callbacks=[ForOneClient()], **fits)
    agree(eager, planned)
    plain = train(fresh(log=True), 2, planned_steps=False, **fits)
    assert not torch.equal(weights(planned.module), weights(plain.module))


def test_a_value_that_changes_with_every_round_is_planned_for_ever(caplog, monkeypatch):
    monkeypatch.setattr(Reads, "what", "attribute")
    data = fl.FederatedDataModule(torch.utils.data.TensorDataset(torch.randn(60, 12), torch.randint(0, 4, (60,))),
                                  fl.data.IID(3), batch_size=2)  # fmt: skip
    eager, planned, said = both(caplog, Reads, rounds=10, data=data, clients_per_round=3)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps == 3 * 10 - 1
    assert len(said) == 11  # eight recordings, and then all anew


class Watched(Classifier):
    """Has a hook on a layer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []
        self.net[0].register_forward_hook(lambda *_: self.seen.append(1))


def test_hooks_are_run(caplog):
    eager, planned, said = both(caplog, Watched)
    agree(eager, planned)
    assert len(planned.module.seen) == len(eager.module.seen) > 0
    assert said == ["Local steps: eager from now on, because net.0 has hooks"]


class OwnLog(Classifier):
    """Its ``log`` changes what the rest of the step reads."""

    factor = 1.0

    def log(self, *args, **kwargs):
        super().log(*args, **kwargs)
        self.factor += 0.1

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


def test_a_log_of_the_modules_own_is_called_in_the_step(caplog):
    eager, planned, said = both(caplog, OwnLog)
    agree(eager, planned)
    assert len(said) == 1
    assert "eager from now on, because self.log is the module's own" in said[0]


class FreshTensor(ClientRule):
    """Gives the module another tensor for every batch."""

    def begin_batch(self, work, batch, batch_idx):
        self.kept = [*getattr(self, "kept", []), torch.ones(()) + batch_idx]
        work.module.factor = self.kept[-1]


class Scaled(Classifier):
    factor = torch.ones(())

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.factor


def test_tensors_that_move_in_memory_are_read_where_they_are(caplog):
    eager, planned, said = both(caplog, Scaled, client=FreshTensor(), algorithm=fl.algorithms.FedAvg(), rounds=4)
    agree(eager, planned)
    assert all("planned" in message for message in said)


@pytest.mark.skipif(OLD, reason="steps with BatchNorm are not planned")
def test_buffers_and_parameters_of_kept_optimizers_are_planned(caplog):
    *_, said = both(caplog, options={"norm": True}, rounds=8, client_optimizer_state="keep")
    assert all("planned" in message for message in said)


class Gathers(Classifier):
    """Keeps running values in tensors that are no buffers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.mean, self.sums = torch.zeros(()), [torch.zeros(2)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.mul_(0.9).add_(loss.detach())
        self.sums[0][1] += loss.detach()
        return loss / (1 + self.mean + self.sums[0][1])


def test_steps_that_compare_leave_nothing_in_tensors_that_are_no_buffers(caplog):
    eager, planned, said = both(caplog, Gathers)
    agree(eager, planned)
    assert planned.strategy.last_round.planned_steps > 0
    assert all("planned" in message for message in said)
    for name in ("mean", "sums"):
        assert repr(getattr(planned.module, name)) == repr(getattr(eager.module, name))
