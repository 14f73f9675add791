# SPDX-License-Identifier: Apache-2.0
"""A program that several processes run together: fits whose weights and logged numbers the tests compare.

``torchrun --nproc_per_node 3 rank_session.py OUT 3 fits 2 FedLF SCAFFOLD`` writes ``OUT/rank-<r>.json``.
"""

import hashlib
import json
import sys
from functools import partial
from pathlib import Path

import lightning as L
import torch
from hand_schedules import HAND_SCHEDULES
from lightning.pytorch.callbacks import ModelCheckpoint
from support import Classifier, federated_blobs
from torch.nn.functional import cross_entropy
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

import fl_lightning as fl

A = fl.algorithms
DROP = 4


class Gathering(Classifier):
    """Gathers in every way that can be divided, in training and in evaluation."""

    def __init__(self, **options):
        super().__init__(**options)
        self.acc, self.loss, self.outputs = MulticlassAccuracy(4), MeanMetric(), []
        both = {"a": MulticlassAccuracy(4), "b": MulticlassPrecision(4)}
        self.both, self.seen = MetricCollection(both), CatMetric()
        self.count, self.last = 0, torch.zeros(3)
        self.val, self.parity = MulticlassAccuracy(4), fl.metrics.DemographicParity()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.acc(logits, batch[1])
        self.loss(loss)
        self.both.update(logits, batch[1])
        self.log("acc", self.acc, on_step=True, on_epoch=True)
        self.log("loss", self.loss)
        self.outputs.append(loss.detach())
        self.count, self.last = self.count + 1, self.last.roll(1)
        self.last[0] = loss.detach()
        return loss * (1 + 0.01 * self.count + 0.01 * self.last.mean())

    def on_train_epoch_end(self):
        self.log("spread", torch.stack(self.outputs).std())
        self.outputs.clear()
        self.log_dict(self.both.compute())
        self.both.reset()

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.val.update(logits, batch[1])
        self.log("val", self.val)
        self.parity.update(logits.argmax(1) < 2, batch[0][:, 0] > 0)
        self.log("parity", self.parity)
        self.seen.update(logits[:, 0])
        self.log("index", float(batch_idx))
        self.log("largest", logits.max(), reduce_fx="max")
        self.log("noisy", cross_entropy(torch.nn.functional.dropout(logits, 0.3), batch[1]), sync_dist=True)
        if bool((batch[1] == batch[1][0]).all()):
            self.log("rare", 1.0)
        # With its newline in one write, or lines of several processes run into each other.
        print(f"STEP {self.trainer.global_rank} {self.trainer.current_epoch}\n", end="", flush=True)

    def on_validation_epoch_end(self):
        self.log("deviation", self.seen.compute().std())
        self.seen.reset()


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.strategy._fits.hooks.work.client_id == DROP:
            raise ValueError("no such client")
        return super().training_step(batch, batch_idx)


class WarmedUp(Classifier):
    """Sets rates by hand, and they stay."""

    def on_train_batch_end(self, *_):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = min(1.3 * group["lr"], 0.5)


class OwnRule(A.FedAvg):
    """Looks at whole rows."""

    def aggregate(self, cohort):
        longest = cohort.updates.rows.abs().sum(1).argmax()
        return super().aggregate(cohort) + 0.1 * cohort.updates.rows[longest]


class Saved(L.Callback):
    """Saves after each of two rounds under the same name, and elsewhere."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, pl_module):
        for name in ("same", f"round-{trainer.current_epoch}"):
            trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")
        if trainer.current_epoch == 1:
            trainer.strategy.remove_checkpoint(f"{self.folder}/round-0.ckpt")


# Enough columns for three ranks: they are divided in slices of 8192.
OPTIONS = {"dropout": 0.3, "norm": True, "momentum": 0.5, "log": True, "hidden": 2000}
FITS = {
    "FedAvg": (Classifier, A.FedAvg, {}),
    "FedLF": (Classifier, A.FedLF, {}),
    "SCAFFOLD with FedLF": (Classifier, A.FedLF, {"client": A.SCAFFOLD}),
    "FedDyn": (Classifier, A.FedDyn, {}),
    "Ditto": (Classifier, A.Ditto, {}),
    "MOON": (Classifier, A.MOON, {}),
    "FedProto": (Classifier, A.FedProto, {}),
    "FedMDFG": (Classifier, A.FedMDFG, {}),
    "FedFV": (Classifier, A.FedFV, {}),
    "FedHEAL": (Classifier, A.FedHEAL, {}),
    "FedHEAL with SCAFFOLD": (Classifier, A.FedHEAL, {"client": A.SCAFFOLD}),
    "FedPW behind a guard": (Classifier, A.FedPW, {"guard": partial(fl.guards.CentredClipping, 0.5)}),
    "AFL": (Classifier, A.AFL, {}),
    "MMPF": (Classifier, A.MMPF, {}),
    "FedFa": (Classifier, A.FedFa, {}),
    "own rule": (Classifier, OwnRule, {}),
    "FCFL": (Classifier, A.FCFL, {}),
    "full gradients": (Classifier, A.FedAvg, {"full_gradients": True}),
    "kept optimizers": (
        WarmedUp, A.FedAvg,
        {"client_optimizer_state": "keep", "server_optimizer": partial(torch.optim.Adam, lr=0.01)},
    ),
    "gathering": (Gathering, A.FedLF, {}),
    "failing client": (Fails, A.FedAvg, {"on_client_error": "drop"}),
    **{f"by hand: {kind.__name__}": (kind, A.FedAvg, {}) for kind in HAND_SCHEDULES},
}  # fmt: skip


def trained(case, devices, rounds=3, nodes=1, resume=None, callbacks=(), module=None, data=None, trainer=None, **more):
    """One fit, then a test; returns a digest of the weights and everything that was logged.

    Args:
        trainer: further arguments of the Trainer.
        **more: further arguments of the strategy.
    """
    choices = dict(trainer or {})
    rounds = choices.pop("rounds", rounds)
    kind, method, options = FITS[case]
    options = {name: value() if name in ("client", "guard") else value for name, value in options.items()} | more
    strategy = fl.FederatedStrategy(method(), **{"clients_per_round": 5, **options})
    torch.manual_seed(1)
    module = (module or kind)(**OPTIONS)
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy, callbacks=list(callbacks),
        **{"max_epochs": rounds, "logger": False, "enable_checkpointing": saves, "enable_progress_bar": False,
           "enable_model_summary": False, **choices},
    )  # fmt: skip
    data = federated_blobs(7) if data is None else data
    trainer.fit(module, data, ckpt_path=resume)
    found = {name: repr(float(value)) for name, value in trainer.callback_metrics.items() if name != "fed/seconds"}
    record = strategy.last_evaluation
    if record is not None:
        found |= {f"client {name}": repr(values.tolist()) for name, values in record.values.items()}
    if kind is Classifier:
        found |= {name: repr(value) for name, value in trainer.test(module, data, verbose=False)[0].items()}
    tensors = [*module.parameters(), *module.buffers()]
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    return trainer, hashlib.sha256(flat.numpy().tobytes()).hexdigest(), found


class Watched(Classifier):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        print(f"STEP {self.trainer.global_rank}", flush=True)


def evaluated_alone(devices):
    """Validates and tests twice each, then predicts, without a fit."""
    strategy = fl.FederatedStrategy()
    torch.manual_seed(1)
    module, data = Watched(**OPTIONS), federated_blobs(7)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    found = []
    for evaluate in (trainer.validate, trainer.test) * 2:
        logged = evaluate(module, data, verbose=False)
        values = {name: values.tolist() for name, values in strategy.last_evaluation.values.items()}
        found += [logged, values, strategy.last_evaluation.sizes.tolist()]
    found.append([batch.tolist() for batch in trainer.predict(module, data)])
    return trainer, found


def written(out, trainer, results):
    (Path(out) / f"rank-{trainer.global_rank}.json").write_text(json.dumps(results))


def main(out, devices, what, *cases):
    devices = int(devices)
    if what == "fits":
        results, (rounds, *cases) = {}, cases
        for case in cases or FITS:
            trainer, *results[case] = trained(case, devices, int(rounds))
        written(out, trainer, results)
    elif what == "nodes":
        trainer, *result = trained("FedLF", 1, nodes=devices)
        written(out, trainer, {"FedLF": result})
    elif what == "save":
        trainer, *_ = trained(cases[0], devices, rounds=2, callbacks=[Saved(out)])
        trainer.save_checkpoint(f"{out}/after-2.ckpt")
    elif what == "resume":
        trainer, *result = trained(cases[0], devices, rounds=4, resume=f"{out}/after-2.ckpt")
        written(out, trainer, {cases[0]: result})
    elif what == "alone":
        written(out, *evaluated_alone(devices))
    elif what == "again":
        trainer, *_ = trained("FedLF", devices, rounds=2)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(trainer.lightning_module, federated_blobs(7))
        weights = [parameter.tolist() for parameter in trainer.lightning_module.parameters()]
        written(out, trainer, {"round": trainer.current_epoch, "weights": weights})


if __name__ == "__main__":
    main(*sys.argv[1:])
