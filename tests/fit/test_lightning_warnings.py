# SPDX-License-Identifier: Apache-2.0
"""Lightning's warnings and errors: what is kept or replaced (docs/refused.md) is provoked, beside Lightning."""

import logging
import warnings
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.utilities import data as data_utilities
from support import Blobs, Classifier, Manual, blobs, fit, fresh, on_path, quiet_trainer, weights
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import fl_lightning as fl


def doing(hook, act, base=Classifier):
    """A module that does something first in a hook."""

    def method(self, *args, **kwargs):
        given = act(self)
        own = getattr(super(kind, self), hook)
        return given if given is not None else own(*args, **kwargs)

    kind = type(f"Doing{base.__name__}", (base,), {hook: method})
    return kind


def made(base=Classifier, **members):
    """A module or data with other members."""
    return type("Made", (base,), members)


def without(hook):
    return made(**{hook: getattr(L.LightningModule, hook)})


def logging_in(hook, *args, times=((),), **kwargs):
    def act(module):
        for more in times:
            module.log(*args, **kwargs, **dict(more))

    return doing(hook, act)


def optimizing(change):
    """A module whose optimizer comes with something else."""
    return made(configure_optimizers=lambda self: change(Classifier.configure_optimizers(self)))


def plateau(strict, optimizer):
    scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "nothing", "strict": strict}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def loaders(**given):
    """The blobs with other loaders."""
    return lambda: type("Changed", (Blobs,), {name: lambda self, make=make: make() for name, make in given.items()})()


def empty():
    return DataLoader(TensorDataset(torch.zeros(0, 12), torch.zeros(0, dtype=torch.long)))


def guessed(samples):
    """Tensors of different lengths, of which the first is not the batch's."""
    return [torch.zeros(3), *torch.utils.data.default_collate(samples)]


class Stops(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = True


class Half(Classifier):
    def training_step(self, batch, batch_idx):
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class Transfers:
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class TransferringModule(Transfers, Classifier):
    pass


class EvalMode(Classifier):
    def __init__(self):
        super().__init__()
        self.net[0].eval()


def case(said, module=Classifier, data=Blobs, here=None, do="fit", **trainer):
    """What Lightning says (a part of it), what is said here if it is something else, and what provokes both."""
    return said, here or said, module, data, do, trainer


CASES = {
    "modules in eval mode when training begins": [case("Found 1 module(s) in eval mode", EvalMode)],
    "`validation_step` without data, or data without it": [
        case("no `val_dataloader`", data=made(Blobs, val_dataloader=L.LightningDataModule.val_dataloader)),
        case("have no `validation_step`", without("validation_step")),
    ],
    "a missing `training_step` or `configure_optimizers`, a hook that Lightning has removed": [
        case("No `training_step()` method", without("training_step")),
        case("No `configure_optimizers()` method", without("configure_optimizers")),
        case("Support for `training_epoch_end` has been removed", made(training_epoch_end=lambda self, outputs: None)),
    ],
    "clipping or accumulation with manual optimization, several optimizers without it": [
        case("gradient clipping is not supported for manual", Manual, gradient_clip_val=1.0),
        case("gradient accumulation is not supported for manual", Manual, accumulate_grad_batches=2),
        case("multiple optimizers is only supported with manual", optimizing(lambda one: [one, one])),
    ],
    "`configure_optimizers` that returns None, unknown keys or an odd interval": [
        case("this fit will run with no optimizer", optimizing(lambda one: None)),
        case("unsupported keys in the optimizer configuration", optimizing(lambda one: {"optimizer": one, "more": 1})),
        case(
            "A `OneCycleLR` scheduler is using 'interval': 'epoch'",
            optimizing(lambda one: ([one], [{"scheduler": OneCycleLR(one, 0.1, total_steps=9)}])),
        ),
    ],
    "ReduceLROnPlateau without its metric": [
        case("ReduceLROnPlateau conditioned on metric nothing", optimizing(partial(plateau, True))),
        case("strict is set to `False`", optimizing(partial(plateau, False))),
    ],
    "`self.log` in a wrong place, twice in different ways, or of what is no number": [
        case("You can't `self.log()` inside `on_fit_start`", logging_in("on_fit_start", "a", 1.0)),
        case("is not useful", logging_in("training_step", "a", 1.0, on_step=False, on_epoch=False)),
        case("twice in `training_step`", logging_in("training_step", "a", 1.0, times=({}, {"on_epoch": True}))),
        case("twice in `validation_step`", logging_in("validation_step", "a", 1.0, times=({}, {"on_step": True}))),
        case("values cannot be logged", logging_in("training_step", "a", "text")),
        case("must have a single element", logging_in("training_step", "a", torch.zeros(3))),
    ],
    "`self.log` of an integer over an epoch, or with `logger=True` and no logger": [
        case("needs to be floating", logging_in("training_step", "a", torch.tensor(3), on_epoch=True)),
        case("have no logger configured", logging_in("training_step", "a", 1.0, logger=True)),
    ],
    "a batch size that it must guess": [
        case(
            "infer the `batch_size` from an ambiguous collection",
            doing("validation_step", lambda module: module.log("a", 1.0) or 0),
            loaders(val_dataloader=lambda: DataLoader(blobs(60), batch_size=10, collate_fn=guessed)),
        )
    ],
    "a transfer hook that the module has beside a data module": [
        case("in both `LightningModule` and", TransferringModule, type("TransferringData", (Transfers, Blobs), {})),
        case("in `LightningModule` but have passed", TransferringModule),
    ],
    "`optimizer_step` that leaves out its closure, another result than a tensor with manual optimization": [
        case("The closure hasn't been executed", doing("optimizer_step", lambda module: 0)),
        case("must either return a Tensor or have no return", doing("training_step", lambda module: 3, Manual)),
    ],
    "a stop before `min_epochs` or `min_steps`": [
        case("`min_epochs=2` or `min_steps=None` has not been met", min_epochs=2, callbacks=[Stops()])
    ],
    "evaluation data of length zero": [case("across ranks is zero", data=loaders(val_dataloader=empty))],
    "`predict_step` that returns None": [
        case("predict returned None", made(predict_step=lambda *_: None), do="predict")
    ],
    "`training_step` that returns None": [
        case(
            "`training_step` returned `None`",
            Half,
            here="4 of 8 batches of client 0 trained nothing, because Half.training_step returned None",
        )
    ],
    "a loader that gives None for a batch": [
        case(
            "train_dataloader yielded None",
            data=loaders(train_dataloader=lambda: DataLoader(blobs(60), batch_size=10, collate_fn=lambda _: None)),
            here="2 of 2 batches of client 0 trained nothing",
        )
    ],
    "`training_step` that returns a dict without `loss`, or no tensor": [
        case("'loss' key needs to be present", doing("training_step", lambda _: {"x": 1}), here="a dict with ['x']"),
        case("must return a Tensor, a dict, or None", doing("training_step", lambda _: 3), here="found int"),
    ],
    "fewer batches than `log_every_n_steps`, which counts clients": [
        case(
            "is smaller than the logging interval",
            logging_in("training_step", "a", 1.0),
            here="log_every_n_steps=50 counts clients, of which a round has 3: loggers get a from one in 50",
            logger=True,
            log_every_n_steps=50,
        )
    ],
    "training data of length zero": [
        case("No training batches", data=loaders(train_dataloader=empty), here="the 0 samples")
    ],
    "the argument `dataloader_iter`": [
        case(
            "`dataloader_iter` step flavor",
            made(training_step=lambda self, dataloader_iter: None),
            here="must take a batch, found dataloader_iter",
        )
    ],
    "shuffling with `overfit_batches`": [
        case("You requested to overfit", overfit_batches=2, here="overfit_batches is not supported")
    ],
}  # fmt: skip


def said(federated, module, data, do, trainer, folder, caplog):
    """All warnings, log lines and errors of a fit, in one text."""
    for cached in (Closure, data_connector, result, data_utilities):
        cached.warning_cache.clear()
    caplog.clear()
    errors = []
    options = {**trainer, "logger": CSVLogger(folder)} if "logger" in trainer else trainer
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        try:
            given = data()
            given = fl.FederatedDataModule(given, fl.data.IID(3)) if federated else given
            fitted = quiet_trainer(fl.FederatedStrategy() if federated else "auto", 2, **options)  # type: ignore[arg-type]
            getattr(fitted, do)(fresh(module), given)
        except Exception as error:
            errors.append(str(error))
    return "\n".join([*errors, *(str(one.message) for one in warned), *caplog.messages])


@pytest.mark.parametrize("what", CASES)
def test_what_is_kept_or_replaced_is_said(what, tmp_path, caplog):
    for lightnings, ours, *provoked in CASES[what]:
        assert lightnings in said(False, *provoked, tmp_path, caplog)
        assert ours in said(True, *provoked, tmp_path, caplog)


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "full"])
def test_batches_that_train_nothing_are_named_once_and_left_out(lean):
    class Picky(Classifier):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def some(samples):
        return None if len(samples) < 10 else torch.utils.data.default_collate(samples)

    def fitted(module, samples, collate=None):
        loader = DataLoader(blobs(45) if samples is None else samples, batch_size=10, collate_fn=collate)
        data = fl.FederatedDataModule(loader, fl.data.IID(1))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            fit(module, 2, data=data, clients_per_round=1, **on_path(lean))
        return [text for text in (str(one.message) for one in warned) if "trained nothing" in text]

    kept = TensorDataset(*(torch.cat([t[:10], t[20:40]]) for t in blobs(45).tensors))
    picky, plain = fresh(Picky), fresh()
    assert fitted(picky, None, some) == [
        "2 of 5 batches of client 0 trained nothing, because Picky.training_step returned None, or collate_fn in place "
        "of a batch: return the loss, or ignore this if such batches are left out on purpose"
    ]
    assert fitted(plain, kept) == []
    assert torch.equal(weights(picky), weights(plain))


def test_methods_that_need_all_data_refuse_a_loader_that_gives_none():
    data = fl.FederatedDataModule(DataLoader(blobs(60), batch_size=10, collate_fn=lambda samples: None), fl.data.IID(3))
    with pytest.raises(fl.ClientError, match=r"collate_fn must return a batch of all samples of client \d"):
        fit(data=data, algorithm=fl.algorithms.QFedAvg())
