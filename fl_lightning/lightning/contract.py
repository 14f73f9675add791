# SPDX-License-Identifier: Apache-2.0
"""The private names of Lightning that this folder uses, checked before a fit begins."""

from __future__ import annotations

from typing import Any

from fl_lightning.lightning.names import TREE, Trainer, lightning_module

CONTRACT: dict[str, tuple[str, ...]] = {
    "lightning_module": ("_current_fx_name", "_on_before_batch_transfer"),
    "fit_loop": ("epoch_loop", "epoch_progress", "state_dict", "load_state_dict", "_restarting", "_combined_loader",
        "_data_source", "max_batches", "setup_data"),
    "fit_loop.epoch_loop": (
        "val_loop", "batch_progress", "scheduler_progress", "automatic_optimization", "manual_optimization",
        "_results", "_batches_that_stepped", "_skip_next_val", "_restarting", "_build_kwargs", "update_lr_schedulers",
        "_update_learning_rates",
        "_num_ready_batches_reached", "_should_check_val_epoch", "_should_check_val_fx", "restarting", "max_steps",
        "on_save_checkpoint", "on_load_checkpoint",
    ),
    "fit_loop.epoch_loop.automatic_optimization": (
        "run", "optim_progress", "_make_zero_grad_fn", "_on_before_zero_grad", "_optimizer_zero_grad", "_skip_backward",
    ),
    "fit_loop.epoch_loop.manual_optimization": ("run", "optim_step_progress"),
    "fit_loop.epoch_loop.val_loop": (
        "batch_progress", "_results", "restarting", "_on_evaluation_model_train", "_evaluation_step", "_max_batches",
        "_data_source",
    ),
    "validate_loop": ("_evaluation_step", "_max_batches", "_results", "_data_source"),
    "test_loop": ("_evaluation_step", "_max_batches", "_results", "_data_source"),
    "predict_loop": ("_data_source",),
    "_signal_connector": ("received_sigterm", "_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    "strategy": ("_configure_launcher",),
    "_data_connector": ("attach_datamodule", "_datahook_selector"),
    "_logger_connector": (
        "on_batch_start", "on_batch_end", "update_train_step_metrics", "log_metrics", "_callback_metrics",
        "_logged_metrics", "_progress_bar_metrics", "_first_loop_iter", "_current_fx",
    ),
}  # fmt: skip
"""Attributes in use, by the path from the trainer to their owner."""


def check_contract(trainer: Trainer) -> None:
    """Checks that this Lightning still has the private attributes in use, and names those that it lacks."""
    for path, names in CONTRACT.items():
        owner: Any = trainer
        for part in path.split("."):
            owner = getattr(owner, part)
        if owner is None:
            continue  # a trainer without a module yet
        missing = [name for name in names if not hasattr(owner, name)]
        if missing:
            version = lightning_module("").__version__
            raise RuntimeError(
                f"{TREE} {version} is not supported: trainer.{path} lacks {missing}; "
                "fl_lightning was written for lightning 2.5 and 2.6"
            )
