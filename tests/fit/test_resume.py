# SPDX-License-Identifier: Apache-2.0
"""A resumed fit equals the uninterrupted one bit for bit, wherever the checkpoint was taken."""

import inspect
import itertools
from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import resuming
import torch
import torch.nn.functional as F
from cases import in_turn
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, OnExceptionCheckpoint
from resuming import ALGORITHMS, ALL_HOOKS, SaveAt, assert_equal, by_step, differences
from support import Classifier, Manual, federated_blobs, fresh, place_of_client, quiet_trainer
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning as fl
from fl_lightning.core.storage.declared import server_state
from fl_lightning.fit import fit as fits

Project = partial(resuming.Project, samples=120)
EVERY_KIND = ("on_train_batch_end-1", "on_validation_start", "on_validation_end", "on_train_epoch_end")


class Decayed(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Twice(Decayed):
    def configure_optimizers(self):
        [optimizer], schedulers = super().configure_optimizers()
        return [optimizer], [*schedulers, torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)]

    def factor(self, epoch):
        return 0.9**epoch


class Plateau(Classifier):
    """Halves the learning rate every round, as nothing improves by a factor of ten."""

    monitor, frequency = "val_loss", 1

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        options = {"scheduler": scheduler, "monitor": self.monitor, "interval": "epoch", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": options}


class PlateauOnTraining(Plateau):
    monitor = "loss_epoch"


class PlateauEverySecondRound(Plateau):
    frequency = 2


class Measured(Classifier):
    """Logs a metric object and a value per epoch, and adds to them at the end of it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True)
        loss = F.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.log("epochs", float(self.trainer.current_epoch))


class WarmedUp(Classifier):
    """Changes the learning rate within local training, by hand: it moves on by one visit per round."""

    def training_step(self, batch, batch_idx):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
        return super().training_step(batch, batch_idx)


class Planned(Classifier):
    """Adagrad has state before its first step, and ``estimated_stepping_batches`` needs the data before that."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)]


class EverySecondRound(fl.data.CohortSampler):
    """Nobody comes to the others."""

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        clients = tuple(range(cohort_size))
        return fl.data.Selection(clients, clients if round % 2 else ())


class Averaging(fl.algorithms.FedAvg):
    """Evaluates the mean of the iterates, as some methods do."""

    sum = server_state(torch.Tensor)
    count = server_state(0)

    def aggregate(self, cohort):
        step = super().aggregate(cohort)
        new = (cohort.params - step).double()
        self.sum, self.count = new if self.sum is None else self.sum + new, self.count + 1
        return step

    def evaluation_params(self, params):
        return params if self.sum is None else (self.sum / self.count).to(params.dtype)


def check(project, folder, hooks, round_index=1):
    """Saves in the hooks of a round, resumes from each file, and compares."""
    saver = SaveAt(folder, round_index, hooks)
    whole = project.fit(folder / "whole", extra=(saver,))
    assert len(saver.logged) >= len(hooks)
    for name, first_row in saver.logged.items():
        torch.load(folder / f"{name}.ckpt", weights_only=True)
        resumed = project.fit(folder / "resumed", ckpt_path=folder / f"{name}.ckpt")
        assert_equal(resumed, whole, first_row, name)
    return whole


@pytest.mark.parametrize(("algorithm", "hook"), in_turn(ALGORITHMS, EVERY_KIND))
def test_every_algorithm_resumes(tmp_path, algorithm, hook):
    check(Project(ALGORITHMS[algorithm], options={"norm": algorithm == "FedBN"}, rounds=3), tmp_path, (hook,))


def test_saving_changes_nothing_and_every_hook_may_save(tmp_path):
    project = Project(ALGORITHMS["FedLF"], Measured, strategy={"client_optimizer_state": "keep"}, rounds=3)
    plain = project.fit(tmp_path / "plain")
    # Without the end of the epoch: what modules log there comes later than most callbacks, see below.
    saved = check(project, tmp_path, [hook for hook in ALL_HOOKS if hook != "on_train_epoch_end"])
    assert not differences(saved.state, plain.state) + differences(saved.rows, plain.rows)


def server(optimizer, **options):
    return {"server_optimizer": partial(optimizer, **options)}


KEEP = {"client_optimizer_state": "keep"}
VARIATIONS = {
    "momentum on both sides, clipped": Project(
        options={"momentum": 0.9}, strategy={**server(torch.optim.SGD, lr=1.0, momentum=0.9), **KEEP},
        trainer={"gradient_clip_val": 0.1},
    ),
    "Adam on both sides, accumulated": Project(
        options={"optimizer": "Adam", "lr": 0.01}, strategy={**server(torch.optim.Adam, lr=0.05), **KEEP},
        trainer={"accumulate_grad_batches": 2},
    ),
    "FedAdam, full gradients": Project(strategy={**server(fl.optim.FedAdam, lr=0.05), "full_gradients": True}),
    "FedYogi, BatchNorm, dropout": Project(
        options={"norm": True, "dropout": 0.5, "log": True}, strategy=server(fl.optim.FedYogi, lr=0.05),
        trainer={"log_every_n_steps": 2},
    ),
    "decayed, double": Project(
        module=Decayed, callbacks=lambda folder: [LearningRateMonitor("epoch")], trainer={"precision": "64-true"}
    ),
    "plateau": Project(module=Plateau),
    "plateau on training, reloaded": Project(
        module=PlateauOnTraining, trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "early stopping": Project(
        module=Measured,
        callbacks=lambda folder: [
            EarlyStopping("val_loss", patience=1, min_delta=10.0, check_on_train_epoch_end=False),
            LearningRateMonitor(),
        ],
        rounds=6,
        trainer={"min_epochs": 4},
    ),
    "monitors of training": Project(
        module=Measured,
        callbacks=lambda f: [EarlyStopping("train_loss_epoch"), ModelCheckpoint(f, monitor="train_acc", mode="max")],
    ),
    "every second validation": Project(
        module=PlateauEverySecondRound,
        trainer={"check_val_every_n_epoch": 2},
        callbacks=lambda folder: [EarlyStopping("val_loss", patience=5, check_on_train_epoch_end=True, strict=False)],
    ),
    "max_steps": Project(trainer={"max_epochs": -1, "max_steps": 11}),
    "manual": Project(module=Manual, options={"log": True}),
    "own learning rate, local steps": Project(module=WarmedUp, strategy={"local_steps": 5}),
    "planned": Project(module=Planned),
    "iterate averaging, mixed": Project(algorithm=Averaging, trainer={"precision": "bf16-mixed"}),
    "largest, fraction": Project(
        options={"norm": True}, strategy={"buffers": "largest", "clients_per_round": 0.5, "local_epochs": 2}
    ),
    "skipped rounds": Project(
        ALGORITHMS["AFL"], strategy={**server(torch.optim.Adam, lr=0.05), **KEEP, "sampler": EverySecondRound()}
    ),
}  # fmt: skip
if hasattr(L.pytorch.callbacks, "EMAWeightAveraging"):
    average = partial(
        L.pytorch.callbacks.EMAWeightAveraging, decay=0.5, update_every_n_steps=0, update_starting_at_epoch=0
    )
    VARIATIONS["moving average"] = Project(callbacks=lambda folder: [average()])


@pytest.mark.filterwarnings("ignore:round . had no usable report")
@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_resume(tmp_path, name):
    hooks = ("on_train_batch_end-1", "on_validation_end")
    if name.startswith(("decayed", "plateau", "max_steps")):  # there is more to do after the checkpoint
        hooks = (*hooks, "on_train_epoch_end")
    if name == "every second validation":
        hooks = ("on_train_batch_end-1", "on_train_epoch_end")
    if name.startswith("iterate averaging"):
        hooks = ("on_validation_epoch_start", "on_train_end", "on_train_epoch_end")
    check(VARIATIONS[name], tmp_path, hooks, round_index=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:round . had no usable report")
@pytest.mark.parametrize("round_index", [0, 1, 2, 3])
@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_resume_from_anywhere(tmp_path, name, round_index):
    project = VARIATIONS[name]
    hooks = set(ALL_HOOKS)
    if project.module is Measured:
        hooks -= {"on_train_epoch_end"}
    if name == "every second validation":
        if round_index % 2 == 0:
            hooks = {hook for hook in hooks if "validation" not in hook}
        if round_index == project.rounds - 1:  # saved before EarlyStopping looks, which no later round makes up for
            hooks -= {"on_train_epoch_end"}
    if name == "skipped rounds" and round_index % 2:
        hooks = {hook for hook in hooks if "batch" not in hook}
    if name == "moving average":  # that callback swaps the weights while it validates
        hooks = {"on_train_batch_end", "on_validation_end", "on_train_epoch_end"}
        if round_index == project.rounds - 1:  # and sets them when training ends: nothing is left to end after that
            hooks -= {"on_train_epoch_end"}
    if name == "early stopping":  # a fit that has stopped goes on for a round, see below
        hooks -= {"on_train_end"} | ({"on_validation_end"} if round_index == 3 else set())
    check(project, tmp_path, tuple(hooks), round_index)


@pytest.mark.slow
@pytest.mark.parametrize("round_index", [0, 1, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_resume_from_anywhere(tmp_path, algorithm, round_index):
    options = {"momentum": 0.5, "norm": True, "dropout": 0.2, "log": True}
    project = Project(ALGORITHMS[algorithm], options=options, trainer={"num_sanity_val_steps": 2})
    # From a finished epoch Lightning runs the sanity check again. If no round is left, its counters are what is left.
    finished = {"on_train_end"} | ({"on_train_epoch_end"} if round_index == project.rounds - 1 else set())
    check(project, tmp_path, tuple(hook for hook in ALL_HOOKS if hook not in finished), round_index)


# ---- where ModelCheckpoint saves


SAVERS = {
    "default": lambda folder: ModelCheckpoint(folder, save_top_k=-1),
    "best": lambda folder: ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True),
    "on validation end": lambda folder: ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=False),
    "in a round": lambda folder: ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1),
    "last": lambda folder: ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_epochs=1),
    "linked": lambda folder: ModelCheckpoint(folder, save_top_k=1, save_last="link"),
}


@pytest.mark.parametrize("kind", SAVERS)
def test_model_checkpoint_may_save_anywhere(tmp_path, kind):
    project = Project(module=Measured, callbacks=lambda folder: [EarlyStopping("val_loss"), SAVERS[kind](folder)])
    whole = project.fit(tmp_path / "whole")
    project.fit(tmp_path / "first", rounds=2)
    files = sorted((tmp_path / "first").glob("*.ckpt")) or pytest.fail("nothing was saved")
    if kind == "in a round":
        files = files[1::2]
    for file in files:
        resumed = project.fit(tmp_path / "resumed", ckpt_path=file)
        assert len(resumed.rows) >= 2 * 6  # two rounds: their clients, validation, the epoch
        assert_equal(resumed, whole, name=file.name)


def test_after_the_fit(tmp_path):
    project = Project(ALGORITHMS["SCAFFOLD"], Decayed)
    whole = project.fit(tmp_path)
    project.fit(tmp_path, rounds=2).save(tmp_path / "later.ckpt")
    resumed = project.fit(tmp_path, ckpt_path=tmp_path / "later.ckpt")
    assert_equal(resumed, whole)
    assert len(resumed.rows) == 2 * 3  # two rounds: their record, their clients, validation


@pytest.mark.parametrize("limits", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 5}])  # a round counts as 3
def test_the_last_round_still_ends(tmp_path, limits):
    # Lightning stops at once when a checkpoint has reached a limit: learning rate and rows of the round would be lost.
    hooks = ("on_train_batch_end-2", "on_validation_start", "on_validation_end", "on_train_epoch_end")
    whole = check(Project(module=Plateau, trainer=limits), tmp_path, hooks)
    assert whole.trainer.current_epoch == 2


# ---- what hooks of a round's start change


class StartsRounds(Classifier):
    """Whatever the hook of a round's start changes, it changes once more when the round is trained again."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("rounds", torch.zeros(1))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)
        self.teacher = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.interrupts = False

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    def on_train_epoch_end(self):
        self.rounds += 0.5

    def on_train_epoch_start(self):
        self.rounds += 1
        self.unsaved += 1
        with torch.no_grad():
            self.teacher += 1
            for parameter in self.net.parameters():
                parameter *= 0.9
        for group in self.trainer.optimizers[0].param_groups:
            group["momentum"] += 0.1
        self.trainer.lr_scheduler_configs[0].scheduler.step()

    def training_step(self, batch, batch_idx):
        if self.interrupts and self.trainer.current_epoch == 1 and place_of_client(self.trainer) == 1:
            self.interrupts = False
            raise RuntimeError("interrupted here")
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"rounds": self.rounds, "unsaved": self.unsaved, "teacher": self.teacher[0]})
        return loss


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_hook_of_a_rounds_start_counts_once(tmp_path):
    project = Project(module=StartsRounds)
    whole = check(project, tmp_path, ("on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"))
    module = fresh(StartsRounds)
    trainer = quiet_trainer(fl.FederatedStrategy(clients_per_round=3, seed=5), 4)
    module.interrupts = True
    with pytest.raises(RuntimeError, match="interrupted here"):
        trainer.fit(module, federated_blobs(train=120))
    trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert_equal(project.fit(tmp_path, ckpt_path=tmp_path / "later.ckpt"), whole)
    assert (float(module.rounds), float(module.unsaved), float(module.teacher[0])) == (1.5, 1, 1)


# ---- inside a client


class SavesInside(Classifier):
    """Saves while a client trains, with BatchNorm statistics and a learning rate that are the client's."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5
        path = self.trainer.default_root_dir
        if self.trainer.current_epoch == 1 and batch_idx == 1 and place_of_client(self.trainer) == 1:
            self.trainer.save_checkpoint(f"{path}/inside.ckpt")


def test_a_checkpoint_from_inside_a_client_holds_the_global_model(tmp_path):
    project = Project(
        ALGORITHMS["SCAFFOLD"], SavesInside, {"norm": True, "momentum": 0.5}, trainer={"default_root_dir": tmp_path}
    )
    before = project.fit(tmp_path, rounds=1)
    whole = project.fit(tmp_path)
    content = torch.load(tmp_path / "inside.ckpt", weights_only=True)
    assert not differences(dict(content["state_dict"]), before.state["weights"])
    assert content["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1 * 0.5**3  # moved on by a visit
    resumed = project.fit(tmp_path, ckpt_path=tmp_path / "inside.ckpt")
    assert_equal(resumed, whole)


class FailsOnce(L.Callback):
    failed = False

    def on_before_zero_grad(self, trainer, module, optimizer):
        if trainer.current_epoch == 1 and place_of_client(trainer) == 1 and not self.failed:
            self.failed = True
            raise RuntimeError("the machine caught fire")


EXCEPTION_SAVERS = {"OnExceptionCheckpoint": OnExceptionCheckpoint}
if "save_on_exception" in inspect.signature(ModelCheckpoint).parameters:
    EXCEPTION_SAVERS["ModelCheckpoint"] = partial(ModelCheckpoint, save_on_exception=True)


@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but there is no last')
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.parametrize("saver", EXCEPTION_SAVERS.values(), ids=EXCEPTION_SAVERS)
def test_a_checkpoint_saved_on_an_exception(tmp_path, saver):
    project = Project(ALGORITHMS["FedLF"], Decayed)
    whole = project.fit(tmp_path)
    failing = replace(project, callbacks=lambda folder: [FailsOnce(), saver(folder)])
    with pytest.raises(RuntimeError, match=r"client \d in round 1: RuntimeError: the machine caught fire"):
        failing.fit(tmp_path / "failed")
    resumed = project.fit(tmp_path, ckpt_path=fl.newest_checkpoint(tmp_path / "failed"))
    assert_equal(resumed, whole)
    assert resumed.rows[0][1]["epoch"] == 1


@pytest.mark.filterwarnings('ignore:.fit.ckpt_path="last". is set, but there is no last')
@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.parametrize(("owner", "name", "calls"), [(fits, "merge_module_changes", 1), (Twice, "factor", 2)])
def test_a_checkpoint_of_a_round_that_cannot_be_closed_holds_no_step(tmp_path, monkeypatch, owner, name, calls):
    project = Project(ALGORITHMS["SCAFFOLD"], Twice)
    whole = project.fit(tmp_path)
    real, count = getattr(owner, name), itertools.count()

    def raises(*args):
        if next(count) == calls:
            raise RuntimeError("no memory left")
        return real(*args)

    monkeypatch.setattr(owner, name, raises)
    with pytest.raises(RuntimeError, match="no memory left"):
        project.fit(tmp_path, extra=(OnExceptionCheckpoint(tmp_path / "failed"),))
    monkeypatch.undo()
    resumed = project.fit(tmp_path, ckpt_path=fl.newest_checkpoint(tmp_path / "failed"))
    assert_equal(resumed, whole)


# ---- what a checkpoint does not bring back, in Lightning as here


def test_a_stopped_fit_goes_on_for_a_round_when_it_is_resumed(tmp_path):
    # trainer.should_stop is not in checkpoints: EarlyStopping decides again after the next round.
    project = Project(callbacks=lambda f: [EarlyStopping("val_loss", patience=1, min_delta=10.0)], rounds=6)
    stopped = project.fit(tmp_path, extra=(ModelCheckpoint(tmp_path),))
    assert stopped.trainer.current_epoch == 2
    resumed = project.fit(tmp_path, ckpt_path=fl.newest_checkpoint(tmp_path))
    assert resumed.trainer.current_epoch == 3


def test_hooks_of_an_epochs_end_that_came_after_the_checkpoint_are_not_called(tmp_path):
    # ModelCheckpoint saves after the module's hook. A callback that saves before it gives up what that would log.
    project = Project(module=Measured)
    saver = SaveAt(tmp_path, 1, ("on_train_epoch_end",))
    whole = project.fit(tmp_path, extra=(saver,))
    resumed = project.fit(tmp_path, ckpt_path=tmp_path / "on_train_epoch_end.ckpt")
    found = by_step(whole.rows[: saver.logged["on_train_epoch_end"]] + resumed.rows)
    assert by_step(whole.rows).keys() - found.keys() == {(5, "epochs")}
    assert not differences(resumed.state, whole.state)
