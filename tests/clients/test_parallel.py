# SPDX-License-Identifier: Apache-2.0
"""Clients in worker processes, or behind requests: the same bits as one after the other."""

from functools import partial
from unittest.mock import patch

import lightning as L
import pytest
import torch
from resuming import ALGORITHMS, Project, SaveAt, assert_equal
from support import Blobs, Classifier, federated_blobs, fresh, quiet_trainer, weights
from torch.utils.data import DataLoader, Dataset
from worker_processes import EXECUTORS, FORKS, HERE, TWO, some

import fl_lightning as fl
from fl_lightning.clients.parallel import ParallelRunner

pytestmark = FORKS


def compare(folder, make_strategy=dict, alone=False, **options):
    """Fits with every executor, in two workers a round unless it has one client alone; the first two outcomes."""
    outcomes, sizes = [], []
    options = {"rounds": 3, "trainer": {}, **options}
    options["trainer"] = {"limit_val_batches": 0, **options["trainer"]}
    dispatch = ParallelRunner.dispatch

    def counted(runner, places):
        dispatch(runner, places)
        sizes.append(len(runner._workers))

    for executor in EXECUTORS:
        project = Project(strategy={**make_strategy(), "executor": executor}, **options)
        with patch.object(ParallelRunner, "dispatch", counted):
            outcomes.append(project.fit(folder))
    for outcome in outcomes[1:]:
        assert_equal(outcome, outcomes[0], 0)
        assert outcome.strategy.executor_fallback is None
    assert sizes == [2] * (0 if alone else outcomes[1].trainer.current_epoch)
    return outcomes[:2]


# ---- the same bits

QUICK = ("FedAvg", "QFedAvg", "FCFL", "SCAFFOLD", "MOON", "Ditto")


@pytest.mark.parametrize("name", some(sorted(ALGORITHMS), QUICK))
def test_every_method_gives_the_same_bits(tmp_path, name):
    compare(tmp_path, algorithm=ALGORITHMS[name], rounds=2, options={"norm": True, "log": True, "dropout": 0.3})


@pytest.mark.parametrize(
    ("server", "client"),
    [
        ("FedLF", "SCAFFOLD"),
        pytest.param("FedHEAL", "MOON", marks=pytest.mark.slow),
        pytest.param("FedHEAL", "Ditto", marks=pytest.mark.slow),
        pytest.param("AFL", "FedProto", marks=pytest.mark.slow),
    ],
)
def test_pairs_give_the_same_bits(tmp_path, server, client):
    halves = lambda: {"client": ALGORITHMS[client]()}  # noqa: E731
    compare(tmp_path, halves, algorithm=ALGORITHMS[server], options={"norm": True}, rounds=2)


STRATEGIES = {
    "kept optimizers": {"client_optimizer_state": "keep"},
    "local steps": {"local_steps": 7},
    "full gradients": {"full_gradients": True},
    "largest buffers": {"buffers": "largest"},
    "attack": {"attack": fl.attacks.RandomUpdates(clients=(0, 1, 4))},
    "drop-outs": {"sampler": fl.data.AvailabilitySampler(0.9, drop_out=0.3), "clients_per_round": 5},
    "server optimizer": {"server_optimizer": partial(fl.optim.FedAdam, lr=0.1)},
    "one client": {"clients_per_round": 1},
}


@pytest.mark.parametrize("name", some(STRATEGIES, ("kept optimizers", "drop-outs", "one client")))
def test_options_of_the_strategy_make_no_difference(tmp_path, name):
    options = {"norm": True, "momentum": 0.9}
    compare(tmp_path, lambda: STRATEGIES[name], options=options, alone=name == "one client")


TRAINERS = {
    "full path": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "max steps": {"max_steps": 20},
    "limits": {"limit_train_batches": 2},
}


@pytest.mark.parametrize("name", some(TRAINERS, ("full path", "max steps")))
def test_options_of_the_trainer_make_no_difference(tmp_path, name):
    one, _ = compare(tmp_path, trainer=TRAINERS[name], options={"log": True})
    assert one.trainer.global_step > 0


class Talkative(Classifier):
    """Logs in every way, uses hooks, a scheduler, the counters and global random numbers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.scale = 1.0

    def on_train_epoch_start(self):
        self.scale = 1.0 + 0.1 * (self.current_epoch // 2)  # workers need a new copy then

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("size", float(len(batch[1])), on_step=True, on_epoch=True, prog_bar=True)

    def training_step(self, batch, batch_idx):
        self.cache += 1
        loss = self.scale * super().training_step(batch, batch_idx) * (1 + 0.01 * (self.global_step % 7))
        self.log_dict({"largest": loss, "noise": torch.rand(())}, reduce_fx="max")
        self.log("sum", 1.0 + self.trainer.fit_loop.epoch_loop.batch_progress.current.ready, reduce_fx=torch.sum)
        self.log("epoch", torch.tensor(float(self.current_epoch)), batch_size=3)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def test_logs_counters_hooks_and_schedulers(tmp_path):
    one, other = compare(tmp_path, module=Talkative, options={"log": True}, trainer={"limit_val_batches": 1.0})
    assert {"size_epoch", "largest", "noise", "sum", "epoch"} <= set(one.trainer.callback_metrics)
    assert other.trainer.global_step == one.trainer.global_step > 0


class Counting(Dataset):
    """No tensors behind it, and a setting that may change."""

    def __init__(self):
        self.x, self.y = torch.randn(60, 12, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4
        self.strength = 1.0

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.strength * self.x[index] + 0.1 * torch.randn(12), self.y[index]


class Curriculum(Blobs):
    def __init__(self, workers):
        super().__init__()
        self.dataset, self.workers = Counting(), workers

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=5, shuffle=True, num_workers=self.workers)


class Strengthen(L.Callback):
    def __init__(self, data):
        self.data = data

    def on_train_epoch_start(self, trainer, module):
        self.data.dataset.strength = 1.0 + trainer.current_epoch // 2


@pytest.mark.parametrize("loaders", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_datasets_without_tensors_that_change(loaders):
    found = []
    for executor in (None, TWO):
        module, data = fresh(), Curriculum(loaders)
        strategy = fl.FederatedStrategy(clients_per_round=3, seed=5, executor=executor)
        trainer = quiet_trainer(strategy, 3, callbacks=[Strengthen(data)], limit_val_batches=0)
        trainer.fit(module, fl.FederatedDataModule(data, fl.data.Dirichlet(4, 1.0), seed=0))
        found.append(weights(module))
    assert torch.equal(*found)


# ---- resuming


def test_resume_across_executors_in_the_middle_of_a_round(tmp_path):
    project = {"algorithm": ALGORITHMS["SCAFFOLD"], "options": {"norm": True, "log": True}, "rounds": 3}
    project["trainer"] = {"limit_val_batches": 0}
    whole = Project(strategy={"executor": None}, **project).fit(tmp_path)
    for first, then in ((TWO, HERE), (HERE, TWO)):
        save = SaveAt(tmp_path, 1, ("on_train_batch_end", "on_train_epoch_end"))
        Project(strategy={"executor": first}, **project).fit(tmp_path, extra=(save,))
        for hook in ("on_train_batch_end-1", "on_train_epoch_end"):
            resumed = Project(strategy={"executor": then}, **project).fit(tmp_path, ckpt_path=tmp_path / f"{hook}.ckpt")
            assert_equal(resumed, whole, save.logged[hook], (hook, first, then))


@pytest.mark.parametrize("executor", [TWO, HERE])
def test_one_executor_serves_several_fits(executor):
    found = []
    for _ in range(2):
        module = fresh(norm=True)
        quiet_trainer(fl.FederatedStrategy(clients_per_round=3, executor=executor), 2).fit(module, federated_blobs())
        found.append(weights(module))
    assert torch.equal(*found)
