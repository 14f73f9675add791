# SPDX-License-Identifier: Apache-2.0
"""However a project gathers its validation values, they are plain Lightning's, of all clients and of each alone."""

import math
import warnings

import lightning as L
import pytest
from gathering import PATTERNS
from plain_loop import client_batches
from support import federated_blobs, fresh, quiet_trainer, weights
from torch.utils.data import DataLoader

import fl_lightning as fl

IN_STEPS = ("Torchmetrics", "BestSoFar", "Outputs", "ReadsTheTrainer", "RunningInSteps", "ComputesInSteps")
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
@pytest.mark.parametrize("stage", ["val", "test"])
@pytest.mark.parametrize("pattern", PATTERNS)
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
