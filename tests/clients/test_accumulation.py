# SPDX-License-Identifier: Apache-2.0
"""``accumulate_grad_batches``: groups of batches begin anew in each pass, as in each epoch of plain Lightning."""

import lightning as L
import pytest
import torch
from algorithms.client_rounds import Net, Rounds, client_data
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from schedules import one_client_fit, plain_fit
from support import on_path, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning as fl
from fl_lightning import algorithms


class Line(L.LightningModule):
    """One weight and numbers that floating point adds and halves without rounding, in whatever order."""

    def __init__(self, momentum=0.5, lr=0.25):
        super().__init__()
        self.w, self.options = nn.Parameter(torch.zeros((), dtype=torch.float64)), {"lr": lr, "momentum": momentum}

    def training_step(self, batch, batch_idx):
        return (batch[0] * self.w).mean()

    def configure_optimizers(self):
        return torch.optim.SGD([self.w], **self.options)


class Numbers(L.LightningDataModule):
    def __init__(self, values):
        super().__init__()
        self.values = torch.tensor(values, dtype=torch.float64)

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.values), batch_size=1)


SEVEN = [1.0, 12.0, 144.0, 1.0, 24.0, 240.0, 8.0]


def by_hand(window, passes, steps=None):
    """The weight, and how many steps it took."""
    w = velocity = gradient = taken = 0
    for _ in range(passes):
        for index, x in enumerate(SEVEN):
            gradient = x / window if index % window == 0 else gradient + x / window
            if taken != steps and ((index + 1) % window == 0 or index + 1 == len(SEVEN)):
                velocity = 0.5 * velocity + gradient
                w, taken = w - 0.25 * velocity, taken + 1
    return w, taken


@pytest.mark.parametrize(("path", "window"), [(True, 1), (True, 2), (True, 3), (True, 4), (False, 3)])
def test_passes_of_a_visit_are_epochs_of_plain_lightning(window, path):
    for passes in (1, 2, 5):
        plain, ours = Line(), Line()
        epochs = plain_fit(plain, Numbers(SEVEN), passes, accumulate_grad_batches=window, callbacks=[])
        visit = one_client_fit(
            ours, Numbers(SEVEN), 1, {"local_epochs": passes}, accumulate_grad_batches=window, **on_path(path)
        )
        expected, steps = by_hand(window, passes)
        assert ours.w.item() == plain.w.item() == pytest.approx(expected, rel=1e-12)
        assert visit.global_step == epochs.global_step == steps
    for steps in (3, 5, 8):
        ours = Line()
        trainer = one_client_fit(
            ours, Numbers(SEVEN), 1, {"local_steps": steps}, accumulate_grad_batches=window, **on_path(path)
        )
        assert (ours.w.item(), trainer.global_step) == (pytest.approx(by_hand(window, 9, steps)[0], rel=1e-12), steps)


@pytest.mark.parametrize("passes", [2, 4, 10])
def test_a_group_that_a_pass_leaves_incomplete_loses_nothing(passes):
    module = Line(momentum=0.0, lr=1.0)
    data = fl.FederatedDataModule(
        DataLoader(TensorDataset(torch.tensor([1.0, 10.0, 100.0])), shuffle=True), fl.data.IID(1)
    )
    _, strategy, _ = train(module, 1, data=data, clients_per_round=1, local_epochs=passes, accumulate_grad_batches=2)
    assert module.w.item() == -55.5 * passes
    assert strategy.last_round.local_steps == 2 * passes


def test_a_missing_first_batch_of_a_group_keeps_no_gradients_of_others():
    def but_ones(samples):
        return None if samples[0][0] == 1 else torch.utils.data.default_collate(samples)

    module, values = Line(momentum=0.0, lr=1.0), TensorDataset(torch.tensor(SEVEN))
    data = fl.FederatedDataModule(DataLoader(values, collate_fn=but_ones), fl.data.IID(1))
    with pytest.warns(UserWarning, match="4 of 14 batches of client 0 trained nothing"):
        train(module, 1, data=data, clients_per_round=1, local_epochs=2, accumulate_grad_batches=2)
    assert module.w.item() == -2 * ((12 + 24 + 240 + 8) / 2)  # as in Lightning, no step follows a missing last batch


class Trained(Net, L.LightningModule):
    """The network of rounds without a Trainer, in a Trainer."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


class Joined(L.LightningDataModule):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def train_dataloader(self):
        x, y = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        return DataLoader(TensorDataset(x, y), batch_size=len(self.batches[0][1]))


METHODS = {
    "SCAFFOLD": algorithms.SCAFFOLD,
    "FedDyn": algorithms.FedDyn,
    "FedProx": lambda: algorithms.FedProx(0.5),
    "MOON": algorithms.MOON,
    "FedProto": algorithms.FedProto,
    "FedProc": lambda: algorithms.FedProc(rounds=2),
    "FedCKA": algorithms.FedCKA,
    "PropFair": algorithms.PropFair,
    "FedISM": algorithms.FedISM,
    "Ditto": lambda: algorithms.Ditto(0.5),
    "FedRep": lambda: algorithms.FedRep(("head",), head_epochs=1),
    "FA": lambda: algorithms.FA(torch.eye(5), sigma=4.0),
}


@pytest.mark.parametrize("method", METHODS)
def test_client_rules_see_the_groups_of_a_loop_by_hand(method):
    make, data = METHODS[method], client_data(clients=1)
    rule = make()
    rounds = Rounds(rule, rule.client_rule(), data, Net(norm=False), epochs=2, window=2)
    ours = Trained(norm=False)
    for _ in range(2):
        rounds.round([0])
    train(
        ours, 2, data=fl.FederatedDataModule(Joined(data[0]), fl.data.IID(1)), algorithm=make(), clients_per_round=1,
        local_epochs=2, accumulate_grad_batches=2, precision="64-true",
    )  # fmt: skip
    torch.testing.assert_close(nn.utils.parameters_to_vector(ours.parameters()), rounds.params, rtol=0, atol=1e-12)


def test_the_training_loss_is_that_of_a_batch():
    losses = []
    for window in (1, 3):
        module = Line(lr=0.0)
        module.w.data.fill_(1.0)
        one_client_fit(module, Numbers(SEVEN), 1, accumulate_grad_batches=window)
        losses.append(module.trainer.strategy.last_round.train_loss)
    assert losses == [pytest.approx(sum(SEVEN) / 7)] * 2


@pytest.mark.parametrize("factors", [{1: 3}, {0: 2, 2: 4}])
def test_factors_that_change_are_refused(factors):
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler must have one factor.*the factors \["):
        train(callbacks=[GradientAccumulationScheduler(factors)], max_steps=16)


def test_a_callback_that_changes_the_factor_is_refused():
    class Later(Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.accumulate_grad_batches = 1 + trainer.current_epoch

    with pytest.raises(ValueError, match=r"accumulate_grad_batches must stay .* found 2 in round 1 after 1"):
        train(callbacks=[Later()])
