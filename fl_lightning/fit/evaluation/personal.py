# SPDX-License-Identifier: Apache-2.0
"""Evaluates a client's own model on its data, beside the global one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.core.layout import LayerSpec, ParamLayout, layout_difference, layout_fingerprint, names_in
from fl_lightning.core.model_snapshot import ModelPart, Snapshot, standing_in
from fl_lightning.core.modules import trained_parameters
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.fit.evaluation.one_client import Alone
from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.module.state_copy import StateCopy
from fl_lightning.lightning.names import Trainer, TrainerFn, rank_zero_warn

PREFIX = "personal/"


class PersonalModels(NamedTuple):
    """The clients' own models: ``of`` gives a client's, ``trained`` names the parameters that they have."""

    of: Callable[[int], Snapshot | ModelPart | None]
    trained: Sequence[str] | None


def models_to_evaluate(
    trainer: Trainer,
    rule: ClientRule,
    loaded: Mapping[str, Any] | None,
    layers: LayerSpec,
    trained: Sequence[str] | None,
) -> PersonalModels | None:
    """The clients' own models that belong to the global one, or ``None`` where there are none to evaluate.

    Those of the rule, or, if ``validate`` or ``test`` loads a checkpoint, that checkpoint's. Warns if it has none that
    this rule can take, rather than evaluate those of another time.

    Args:
        trainer: the trainer whose evaluation is running.
        rule: the client rule.
        loaded: the federated state of the checkpoint, if it has one.
        layers: the order of the models' parameters.
        trained: names of the parameters that the running or last fit trains; ``None`` before the first.
    """
    if not rule.overrides("personal_model"):
        return None
    if trainer.state.fn == TrainerFn.FITTING or trainer.ckpt_path is None:
        return PersonalModels(rule.personal_model, trained)
    name, state = type(rule).__name__, loaded or {}
    fit = state.get("fit", {})
    if not str(fit.get("method", "")).endswith(f" with {name}"):
        reason = f"it holds {'another method' if fit else 'no federated fit'}, and this is {name}"
    else:
        try:
            trained = _laid_out(fit, trainer.lightning_module, layers)
            return PersonalModels(rule.personal_models(state["client_rule"]), trained)
        except (FileNotFoundError, ValueError) as error:
            reason = str(error)
    rank_zero_warn(f"personal models are not evaluated with the checkpoint {trainer.ckpt_path}: {reason}")
    return None


def _laid_out(fit: Mapping[str, Any], module: nn.Module, layers: LayerSpec) -> tuple[str, ...] | None:
    """The trained parameters of a checkpoint; raises ValueError unless they lie in the module as they did there."""
    if "layout" not in fit:  # files of earlier versions
        return None
    names, own = names_in(fit["layout"]), trained_parameters(module, None)
    present = layout_fingerprint(ParamLayout.from_module(module, layers, [n for n in names if n in own]))
    if fit["layout"] != present:
        raise ValueError(f"its layout is another one, {layout_difference(fit['layout'], present)}")
    return names


class PersonalEvaluation:
    """Runs the module's evaluation with clients' own models and collects what it logs.

    Args:
        trainer: the trainer whose evaluation is running.
        alone: runs the module for a client alone.
        models: the clients' models; what a part of one lacks comes from the global model.
        layers: the order of the models' parameters.
    """

    def __init__(self, trainer: Trainer, alone: Alone, models: PersonalModels, layers: LayerSpec) -> None:
        self._trainer, self._alone, self._model_of = trainer, alone, models.of
        self._layout = ParamLayout.from_module(alone.module, layers, models.trained)

    def row(self, client_id: int, batches: Iterator[tuple[Any, int]], count: int, start: StateCopy) -> LoggedRow | None:
        """The client's values of what the module logs, under ``personal/<name>``; ``None`` if it has no model.

        Logs, metrics, buffers and generators are as if this had not been.

        Args:
            client_id: the client.
            batches: its evaluation batches and their numbers of samples.
            count: how many batches.
            start: what the module held before its first evaluation batch.
        """
        model = self._model_of(client_id)
        if model is None:
            return None
        device = self._trainer.strategy.root_device
        parameters = self._layout.parameters(self._alone.module)
        if isinstance(model, ModelPart):
            with torch.inference_mode(False), torch.no_grad():
                model = model.completed(self._alone.module, parameters, self._layout)
        seed = derive_seed(torch.initial_seed(), "personal", client_id)
        found = LoggedRow()
        # Lightning evaluates in inference mode, whose tensors must not become parameters.
        with torch.inference_mode(False), torch.no_grad(), isolated(seed, device):
            personal = partial(
                standing_in, self._alone.module, parameters, self._layout, model.to(device), evaluate=True
            )
            row = self._alone.steps(start, batches, count, personal)
        found.update(row, PREFIX)
        found.error = row.error
        return found
