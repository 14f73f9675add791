# SPDX-License-Identifier: Apache-2.0
"""Why local steps run through Lightning's own optimization: the hook or the option, and whose it is."""

import logging

import lightning as L
import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from support import Classifier, Manual, fit, fresh


class Watching(L.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        pass


class Hooked(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Clipping(Classifier):
    def clip_gradients(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        pass


REASONS = {
    "Manual optimizes manually": (Manual, {}),
    "Hooked overrides on_train_batch_end": (Hooked, {}),
    "Watching overrides on_before_optimizer_step": (Classifier, {"callbacks": [Watching()]}),
    "Clipping overrides clip_gradients": (Clipping, {"gradient_clip_val": 0.5}),
    "Trainer(detect_anomaly=True)": (Classifier, {"detect_anomaly": True}),
    "Trainer(profiler=SimpleProfiler)": (Classifier, {"profiler": "simple"}),
    "Trainer(precision='bf16-mixed')": (Classifier, {"precision": "bf16-mixed"}),
    "accumulate_grad_batches=2": (Classifier, {"accumulate_grad_batches": 2}),
    "accumulate_grad_batches=4": (Classifier, {"callbacks": [GradientAccumulationScheduler({0: 4})]}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_names_hook_or_option_and_owner(caplog, reason):
    module, options = REASONS[reason]
    with caplog.at_level(logging.INFO):
        fit(fresh(module), 1, limit_val_batches=0, **options)
    said = [record.getMessage() for record in caplog.records]
    assert any(f"full ({reason}) path" in message for message in said), [m for m in said if "path" in m]
