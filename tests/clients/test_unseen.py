# SPDX-License-Identifier: Apache-2.0
from collections import defaultdict, deque

import pytest
import torch
from support import Classifier, federated_blobs, fresh, quiet_trainer
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning as fl
from fl_lightning.clients.module_isolation import ModuleIsolation


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.calls, self.inner.log = 0, ["a"]
        self.outputs, self.seen = [1], {"train": [1], "val": deque([2])}
        self.alias, self.cache = self.outputs, None
        self.metric = MulticlassAccuracy(3)


def test_attributes_and_metric_states_come_back():
    module = Keeping()
    outputs, train = module.outputs, module.seen["train"]
    weight = module.inner.weight
    with ModuleIsolation(module).unseen(evaluate=False):
        module.outputs.append(2)
        module.seen["train"].append(2)
        module.seen["new"] = [3]
        module.seen = {"other": []}
        module.outputs = []
        module.inner.calls += 1
        module.inner.log.append("b")
        module.cache = torch.ones(2)
        module.added, module.groups = 1, defaultdict(list)
        module.metric.update(torch.tensor([1, 1]), torch.tensor([1, 0]))
        handle = module.inner.register_forward_hook(print)
    assert module.outputs is outputs
    assert module.alias is outputs
    assert outputs == [1]
    assert module.seen["train"] is train
    assert module.seen == {"train": [1], "val": deque([2])}
    assert (module.inner.calls, module.inner.log) == (0, ["a"])
    assert handle.id not in module.inner._forward_hooks
    assert module.cache is None
    assert not hasattr(module, "added")
    assert not hasattr(module, "groups")
    assert module.inner.weight is weight
    assert module.metric._update_count == 0
    assert module.metric.tp.sum() == 0


class Collecting(Classifier):
    """Collects what its steps return, as projects do since epoch-end hooks no longer receive it."""

    def __init__(self):
        super().__init__()
        self.training_step_outputs, self.lengths, self.steps = [], [], 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append(loss.detach())
        self.steps += 1
        return loss

    def on_train_epoch_end(self):
        self.lengths.append(len(self.training_step_outputs))
        self.training_step_outputs.clear()


@pytest.mark.parametrize("algorithm", [fl.algorithms.FedAvg, fl.algorithms.FedLF, fl.algorithms.FedMDFG])
@pytest.mark.fit
def test_losses_at_the_global_model_leave_no_trace(algorithm):
    data = federated_blobs()
    module, trainer = fresh(Collecting), quiet_trainer(fl.FederatedStrategy(algorithm()))
    trainer.fit(module, data)
    loaders = data.train_dataloader()
    steps = [loaders.num_batches(client) for client in range(len(loaders))]
    assert module.lengths == [sum(steps)] * 3
    assert module.steps == 3 * max(steps)  # one visit of the largest client per round
