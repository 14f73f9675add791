# SPDX-License-Identifier: Apache-2.0
"""The same fit without planned steps and with them."""

import torch
from support import Blobs, Classifier, fresh, train, weights

import fl_lightning as fl

OLD = torch.__version__ < torch.torch_version.TorchVersion("2.10")
"""BatchNorm is a call that no plan can repeat."""


def few_shapes():
    """Five clients with two batches of ten samples and one of five: a plan for every shape takes its time."""
    return fl.FederatedDataModule(Blobs(train=125), fl.data.IID(5), seed=0)


def one_shape():
    """Five clients with two batches of ten samples."""
    return fl.FederatedDataModule(Blobs(train=100), fl.data.IID(5), seed=0)


def both(caplog, module=Classifier, rounds=2, options=None, **strategy):
    """The same fit without plans and with them, and what the second one said about its steps."""
    options = {"log": True, **(options or {})}
    eager = train(fresh(module, **options), rounds, planned_steps=False, **{"data": one_shape(), **strategy})
    caplog.clear()
    with caplog.at_level("INFO"):
        planned = train(fresh(module, **options), rounds, planned_steps=True, **{"data": one_shape(), **strategy})
    return eager, planned, [m for m in caplog.messages if m.startswith("Local steps")]


def agree(eager, planned):
    """Weights, buffers and all that was logged, wall-clock times apart."""
    assert torch.equal(weights(eager.module), weights(planned.module))
    logged, other = (dict(f.trainer.callback_metrics) for f in (eager, planned))
    logged.pop("fed/seconds"), other.pop("fed/seconds")
    assert logged.keys() == other.keys()
    for name, value in logged.items():
        assert torch.equal(value, other[name]) or value != value, name
    assert eager.strategy.last_round.planned_steps == 0
