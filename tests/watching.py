# SPDX-License-Identifier: Apache-2.0
"""A callback that notes a fit's weights."""

from lightning.pytorch.callbacks import Callback
from support import weights


class Watcher(Callback):
    """Notes the weights at chosen moments."""

    def __init__(self):
        self.validated, self.started, self.ended = [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.started.append(weights(pl_module))

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validated.append(weights(pl_module))

    def on_train_epoch_end(self, trainer, pl_module):
        self.ended.append(weights(pl_module))
