# SPDX-License-Identifier: Apache-2.0
"""What runs a module once more than its author expects leaves no trace in it."""

import pytest
from support import Classifier, federated_blobs, fresh, quiet_trainer

import fl_lightning as fl


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
