# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: what is in them, who can read them, and which of them a fit may go on from."""

import os
import signal
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resuming import ALGORITHMS, Project, SaveAt, differences
from support import Blobs, Classifier, federated_blobs, fresh, place_of_client, quiet_trainer, weights
from torch import nn

import fl_lightning as fl
from fl_lightning.lightning.checkpoint_io import AtomicCheckpointIO

# ---- what is in a file


# Every method's files are read with weights_only by tests/fit/test_resume.py, so they need nothing of this package.


@pytest.mark.parametrize("algorithm", [partial(fl.algorithms.AFL, 0.1), partial(fl.algorithms.MMPF, inner_rounds=2)])
def test_a_file_holds_the_model_that_was_evaluated(tmp_path, algorithm):
    """Also where a method trains other parameters than it evaluates; a fit goes on from those that were trained."""
    saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, filename="{epoch}")
    whole = Project(algorithm, callbacks=lambda folder: [saver]).fit(tmp_path, 4)
    scores = [row["val_loss"] for _, row in whole.rows if "val_loss" in row]
    assert len(scores) == 4
    for index, score in enumerate(scores):
        trainer = quiet_trainer(fl.FederatedStrategy(algorithm()))
        path = tmp_path / f"epoch={index}.ckpt"
        (found,) = trainer.validate(fresh(seed=9), federated_blobs(), ckpt_path=path, verbose=False)
        assert found["val_loss"] == pytest.approx(score, abs=1e-6)
    resumed = Project(algorithm).fit(tmp_path, 4, tmp_path / "epoch=1.ckpt")
    assert not differences(resumed.state["weights"], whole.state["weights"])


class Wide(nn.Linear):
    """Most of the weights of the module below."""


class Large(Classifier):
    def __init__(self, **options):
        super().__init__(**options)
        self.net = nn.Sequential(Wide(12, 4000), nn.ReLU(), nn.Linear(4000, 4))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.current_epoch == 1 and batch_idx == 0:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/inside.ckpt")


def test_a_file_is_as_large_as_the_weights_and_the_state(tmp_path):
    hooks = ("on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end")
    weights_size = 4 * (12 * 4000 + 4000 + 4 * 4000 + 4)
    for algorithm, copies in (("FedAvg", 1), ("SCAFFOLD", 1 + 1 + 5)):
        folder = tmp_path / algorithm
        project = Project(ALGORITHMS[algorithm], Large, trainer={"default_root_dir": folder})
        outcome = project.fit(folder, rounds=2, extra=(SaveAt(folder, 1, hooks),))
        outcome.save(folder / "after.ckpt")
        found = {file.stem: file.stat().st_size for file in folder.glob("*.ckpt")}
        assert len(found) == 9
        assert max(found.values()) < copies * weights_size + 40_000, found
        assert min(found.values()) > weights_size


def test_a_stock_trainer_goes_on_from_a_federated_file(tmp_path):
    Project(module=Classifier, callbacks=lambda f: [ModelCheckpoint(f)]).fit(tmp_path, rounds=2)
    (file,) = tmp_path.glob("*.ckpt")
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = Classifier.load_from_checkpoint(file)
    before = weights(module)
    with pytest.warns(UserWarning, match="fl_lightning"):  # Lightning names the callback that is not there
        trainer.fit(module, Blobs(), ckpt_path=file)
    assert trainer.current_epoch == 3
    assert not torch.equal(weights(module), before)


# ---- how a file is written


def test_what_is_no_checkpoint_is_saved_as_it_is(tmp_path):
    fl.FederatedStrategy(fl.algorithms.FedAvg()).save_checkpoint([1], tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt") == [1]


def test_a_save_replaces_a_link_and_not_its_target(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"x": 1}, tmp_path / "best.ckpt")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    io.save_checkpoint({"x": 2}, tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "best.ckpt") == {"x": 1}
    assert io.load_checkpoint(tmp_path / "last.ckpt") == {"x": 2}


def test_remote_paths_and_storage_options_go_lightnings_way(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"x": 3}, "memory://somewhere/a.ckpt")
    assert io.load_checkpoint("memory://somewhere/a.ckpt") == {"x": 3}
    with pytest.raises(TypeError, match="storage_options"):
        io.save_checkpoint({"x": 3}, tmp_path / "a.ckpt", storage_options={"key": 1})


# ---- which file is the newest


def dated(path: Path, seconds: int) -> Path:
    os.utime(path, (seconds, seconds))
    return path


def federated(**more):
    return {"state_dict": {}, "callbacks": {"fl_lightning": {"version": 1}}, **more}


def test_newest_checkpoint(tmp_path, recwarn):
    assert fl.newest_checkpoint(tmp_path) is None
    assert fl.newest_checkpoint(tmp_path / "missing") is None
    io = AtomicCheckpointIO()
    for name, age in (("a.ckpt", 300), ("deep/er/b.ckpt", 200), ("c.txt", 400)):
        io.save_checkpoint(federated(), tmp_path / name)
        dated(tmp_path / name, age)
    assert fl.newest_checkpoint(str(tmp_path)) == tmp_path / "a.ckpt"
    dated(tmp_path / "deep/er/b.ckpt", 301)
    assert fl.newest_checkpoint(tmp_path) == tmp_path / "deep/er/b.ckpt"
    assert not recwarn.list


@pytest.mark.parametrize("kind", ["cut short", "empty", "text", "a folder", "plain", "weights only", "a number"])
def test_newest_checkpoint_skips_what_a_fit_cannot_go_on_from(tmp_path, kind):
    io = AtomicCheckpointIO()
    io.save_checkpoint(federated(x=torch.zeros(10_000)), tmp_path / "good.ckpt")
    content = dated(tmp_path / "good.ckpt", 100).read_bytes()
    bad = tmp_path / "bad.ckpt"
    if kind == "a folder":
        bad.mkdir()
    elif kind in ("plain", "weights only", "a number"):
        file = {"plain": {"state_dict": {}, "callbacks": {}}, "weights only": {"state_dict": {}}, "a number": 3}[kind]
        io.save_checkpoint(file, bad)
    else:
        bad.write_bytes({"cut short": content[: len(content) // 2], "empty": b"", "text": b"epoch,step\n"}[kind])
    reason = "holds no federated fit" if kind in ("plain", "weights only", "a number") else "does not load"
    with pytest.warns(UserWarning, match=f"skipping checkpoint .*bad.ckpt: it {reason}"):
        assert fl.newest_checkpoint(tmp_path) == tmp_path / "good.ckpt"


def test_newest_checkpoint_passes_over_links_to_nothing(tmp_path):
    AtomicCheckpointIO().save_checkpoint(federated(), tmp_path / "good.ckpt")
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    assert fl.newest_checkpoint(tmp_path) == tmp_path / "good.ckpt"


def test_newest_checkpoint_with_other_objects_in_it(tmp_path):
    AtomicCheckpointIO().save_checkpoint(federated(hyper_parameters={"path": Path("a")}), tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="does not load"):
        assert fl.newest_checkpoint(tmp_path) is None
    assert fl.newest_checkpoint(tmp_path, weights_only=False) == tmp_path / "a.ckpt"


# ---- interrupted without a file


class Interrupted(Classifier):
    """Fails once, in the second round."""

    where: str
    error: type[BaseException]

    def fail(self, where):
        if where == self.where and self.trainer.current_epoch == 1 and not self.trainer.sanity_checking:
            type(self).where = "nowhere"
            raise self.error("interrupted here")

    def training_step(self, batch, batch_idx):
        if place_of_client(self.trainer) == 1 and batch_idx == 1:
            self.fail("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.fail("validation")
        return super().validation_step(batch, batch_idx)


class FailingRule(fl.algorithms.FedLF):
    def aggregate(self, cohort):
        if self.module is not None:
            self.module.fail("rule")
        return super().aggregate(cohort)

    module: Interrupted | None = None


class FailingCallback(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            module.fail("client end")

    def on_validation_end(self, trainer, module):
        module.fail("validation end")

    def on_train_epoch_end(self, trainer, module):
        module.fail("epoch end")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """States after so many rounds."""
    project = Project(FailingRule, Classifier, {"norm": True, "dropout": 0.2})
    folder = tmp_path_factory.mktemp("uninterrupted")
    return {rounds: project.fit(folder, rounds).state for rounds in (1, 2, 4)}


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("training", RuntimeError), ("training", KeyboardInterrupt), ("client end", RuntimeError),
        ("rule", RuntimeError), ("rule", KeyboardInterrupt), ("validation", RuntimeError),
        ("validation", KeyboardInterrupt), ("validation end", RuntimeError), ("epoch end", RuntimeError),
    ],
)  # fmt: skip
def test_interruptions_cost_no_finished_round(uninterrupted, where, error):
    module_class = type("Failing", (Interrupted,), {"where": where, "error": error})
    module = fresh(module_class, norm=True, dropout=0.2)
    rule = FailingRule()
    rule.module = module
    strategy = fl.FederatedStrategy(rule, clients_per_round=3, seed=5)
    limits = {"limit_train_batches": 100, "limit_val_batches": 50, "limit_test_batches": 0.9}
    trainer = quiet_trainer(strategy, 4, callbacks=[FailingCallback()], **limits)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit if error is KeyboardInterrupt else RuntimeError):
            trainer.fit(module, federated_blobs())
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C from then on

    finished, whole = uninterrupted[1 if where in ("training", "client end", "rule") else 2], uninterrupted[4]
    assert not differences(dict(module.state_dict()), finished["weights"])
    assert module.training
    assert {p.untyped_storage().nbytes() for p in module.parameters()} == {4 * p.numel() for p in module.parameters()}
    assert {name: getattr(trainer, name) for name in limits} == limits

    trainer.fit(module, federated_blobs())
    assert not differences(dict(module.state_dict()), whole["weights"])
    for name in ("global_step", "current_epoch"):
        assert getattr(trainer, name) == whole[name]
    assert not differences(strategy._fits.states()["algorithm"], whole["rules"]["algorithm"])
    progress = trainer.fit_loop.epoch_progress
    assert progress.total == progress.current
    assert {progress.total.ready, progress.total.started, progress.total.processed, progress.total.completed} == {4}
    assert trainer.fit_loop.epoch_loop._batches_that_stepped == whole["counters"]["epoch_loop.state_dict"]
