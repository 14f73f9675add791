# SPDX-License-Identifier: Apache-2.0
"""However a project gathers its validation values, they are plain Lightning's, of all clients and of each alone."""

import math
import warnings

import lightning as L
import pytest
import torch
from cases import in_turn
from gathering import (
    PATTERNS,
    Arrays,
    BestLater,
    BestNumber,
    BestSoFar,
    Counts,
    InBatchEnd,
    MadeAnew,
    Meters,
    Monai,
    Outputs,
    Torchmetrics,
    Unjoinable,
)
from lightning.pytorch.utilities import CombinedLoader
from plain_loop import client_batches
from support import federated_blobs, fit, fresh, quiet_trainer, weights
from torch.utils.data import DataLoader

import fl_lightning as fl

IN_STEPS = (
    "Torchmetrics", "BestSoFar", "Outputs", "ReadsTheTrainer", "RunningInSteps", "ComputesInSteps", "Locked",
)  # fmt: skip
"""Here torch adds up float32 numbers of all clients, in an order that joins clients."""


def plain(module, loader, stage="val"):
    """What a Trainer without any of this library logs."""
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = (trainer.validate if stage == "val" else trainer.test)(module, loader, verbose=False)
    return found


def loaders_of(data, stage):
    """The clients' data in ordinary loaders with the same batches, and all of them in one."""
    loaders = client_batches(stage, data)
    batches = {c: [b for b, _ in loaders.batches(c, seed=None)] for c in range(len(loaders)) if loaders.sizes[c]}
    every = [batch for some in batches.values() for batch in some]
    return {c: DataLoader(some, batch_size=None) for c, some in batches.items()}, DataLoader(every, batch_size=None)


def same(found, expected, pattern):
    tolerance = 1e-6 if pattern.__name__ in IN_STEPS else 0
    if math.isnan(expected):
        return math.isnan(found)
    return found == pytest.approx(expected, rel=tolerance, abs=0)


@pytest.mark.filterwarnings("ignore:.*pytree|The variance of predictions")
@pytest.mark.parametrize(("pattern", "stage"), in_turn(PATTERNS, ["val", "test"]))
def test_values_are_those_of_plain_lightning(pattern, stage):
    module, strategy = fresh(pattern), fl.FederatedStrategy()
    before = weights(module)
    trainer = quiet_trainer(strategy)
    run = trainer.validate if stage == "val" else trainer.test
    (results,) = run(module, federated_blobs(), verbose=False)
    clients, together = loaders_of(federated_blobs(), stage)
    expected = plain(fresh(pattern), together, stage)
    pooled = {name: value for name, value in results.items() if not name.startswith("fed/")}
    assert pooled.keys() == expected.keys()
    for name, value in expected.items():
        assert same(pooled[name], value, pattern), (name, pooled[name], value)
    record = strategy.last_evaluation
    assert record.client_ids == tuple(clients)
    for place, loader in enumerate(clients.values()):
        alone = plain(fresh(pattern), loader, stage)
        for name in expected:
            found = float(record.values[name][place])
            assert same(found, alone.get(name, math.nan), pattern), (name, place, found, alone.get(name))
    assert weights(module).equal(before)


@pytest.mark.parametrize("pattern", [Counts, MadeAnew, Torchmetrics, Unjoinable])
def test_own_models_are_evaluated_alone_too(pattern):
    data = federated_blobs()
    _, strategy, _ = fit(fresh(pattern), 2, algorithm=fl.algorithms.Ditto(), data=data, clients_per_round=1.0)
    clients, _ = loaders_of(federated_blobs(), "val")
    found = strategy.last_evaluation.values["personal/acc"].tolist()
    for place, (client, loader) in enumerate(clients.items()):
        own = fresh(pattern)
        torch.nn.utils.vector_to_parameters(strategy.client_rule.personal_model(client).params, own.parameters())
        assert found[place] == pytest.approx(plain(own, loader)["acc"], rel=1e-6)


@pytest.mark.parametrize("pattern", [BestSoFar, BestNumber, BestLater])
def test_what_evaluations_leave_behind_is_no_clients_own(pattern):
    module, strategy = fresh(pattern), fl.FederatedStrategy()
    trainer, data = quiet_trainer(strategy), federated_blobs()
    (first,) = trainer.validate(module, data, verbose=False)
    before = strategy.last_evaluation
    assert before.values["acc_best"].isfinite().all()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.neg_()
    with pytest.warns(UserWarning, match="no values of their own of acc_best: it depends on what earlier evaluations"):
        (second,) = trainer.validate(module, data, verbose=False)
    record = strategy.last_evaluation
    assert second["acc_best"] == pytest.approx(
        first["acc"] if pattern is BestLater else max(first["acc"], second["acc"])
    )
    assert record.values["acc_best"].isnan().all()
    assert not record.undefined
    assert second["fed/acc_best/clients"] == second["fed/acc_best/undefined"] == 0
    assert record.values["acc"].isfinite().all()
    assert not record.values["acc"].equal(before.values["acc"])


@pytest.mark.parametrize("pattern", [Meters, Counts, Arrays, Monai, Outputs, Torchmetrics])
def test_callbacks_watch_the_value_of_all_clients(pattern, tmp_path):
    """EarlyStopping and ModelCheckpoint decide as they would with the true values, in every round."""
    seen = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if trainer.sanity_checking:
                return
            _, together = loaders_of(federated_blobs(), "val")
            truth = fresh(pattern)
            truth.load_state_dict(pl_module.state_dict())
            seen.append((float(trainer.callback_metrics["acc"]), plain(truth, together)["acc"]))

    stopping = L.pytorch.callbacks.EarlyStopping("acc", mode="max", patience=1)
    keeping = L.pytorch.callbacks.ModelCheckpoint(tmp_path, monitor="acc", mode="max")
    fit(fresh(pattern), 4, callbacks=[Watch(), stopping, keeping], enable_checkpointing=True, num_sanity_val_steps=2)
    found, true = zip(*seen, strict=True)
    assert found == pytest.approx(true, rel=1e-6)
    assert float(keeping.best_model_score) == float(stopping.best_score) == max(found)


def test_plain_evaluations_run_each_step_once(monkeypatch):
    """No second pass where the module carries nothing on."""
    for pattern in (Outputs, Torchmetrics, InBatchEnd):
        steps = []
        add = pattern.add
        monkeypatch.setattr(
            pattern, "add", lambda self, *args, add=add, steps=steps: steps.append(1) or add(self, *args)
        )
        (_, together), data = loaders_of(federated_blobs(), "val"), federated_blobs()
        quiet_trainer(fl.FederatedStrategy()).validate(fresh(pattern), data, verbose=False)
        assert len(steps) == len(together) + 2 * (pattern is Outputs)  # which gathers in a list and logs in steps


class BesideAnother(Counts):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch["own"], batch_idx)
        self.log("step_acc", self.correct / self.total, batch_size=1)


def test_sums_over_loaders_side_by_side_are_no_clients_own():
    strategy, data = fl.FederatedStrategy(), client_batches("val")
    others = DataLoader(torch.arange(80))
    with pytest.warns(UserWarning, match="cannot be told apart with several loaders: correct, total"):
        quiet_trainer(strategy).validate(
            fresh(BesideAnother), CombinedLoader({"other": others, "own": data}, "min_size"), verbose=False
        )
    record = strategy.last_evaluation
    assert record.client_ids == tuple(range(6))
    assert all(values.isnan().all() for values in record.values.values())
