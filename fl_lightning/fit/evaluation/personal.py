# SPDX-License-Identifier: Apache-2.0
"""Evaluates a client's own model on its data, beside the global one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.core.layout import LayerSpec, ParamLayout, layout_difference, layout_fingerprint, names_in
from fl_lightning.core.model_snapshot import ModelPart, Snapshot, standing_in
from fl_lightning.core.modules import trained_parameters
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.rule_state import renumbering
from fl_lightning.lightning.names import Trainer, TrainerFn, rank_zero_warn

PREFIX = "personal/"


def personal_evaluation(
    trainer: Trainer,
    rule: ClientRule,
    loaded: Mapping[str, Any] | None,
    layers: LayerSpec,
    trained: Sequence[str] | None,
    names: Sequence[str],
) -> PersonalEvaluation | None:
    """Evaluates the clients' own models that belong to the global one; ``None`` where there are none.

    Those of the rule, or, if ``validate`` or ``test`` loads a checkpoint (its federated state: ``loaded``), that
    checkpoint's, of clients by their ``names``. Warns if it has none that this rule can take, rather than evaluate
    those of another time.
    """
    module, device = trainer.lightning_module, trainer.strategy.root_device
    if trainer.state.fn == TrainerFn.FITTING or trainer.ckpt_path is None:
        return PersonalEvaluation(module, device, rule.personal_model, layers, trained)
    name, state = type(rule).__name__, loaded or {}
    fit = state.get("fit", {})
    if not str(fit.get("method", "")).endswith(f" with {name}"):
        reason = f"it holds {'another method' if fit else 'no federated fit'}, and this is {name}"
    else:
        try:
            trained = _laid_out(fit, module, layers)
            own = rule_state.renumbered(rule, state["client_rule"], renumbering(state, names)[0])
            return PersonalEvaluation(module, device, rule_state.copy_with(rule, own).personal_model, layers, trained)
        except (FileNotFoundError, ValueError) as error:
            reason = str(error)
    rank_zero_warn(f"personal models are not evaluated with the checkpoint {trainer.ckpt_path}: {reason}")
    return None


def _laid_out(fit: Mapping[str, Any], module: nn.Module, layers: LayerSpec) -> tuple[str, ...]:
    """The trained parameters of a checkpoint; raises ValueError unless they lie in the module as they did there."""
    names, own = names_in(fit["layout"]), trained_parameters(module, None)
    present = layout_fingerprint(ParamLayout.from_module(module, layers, [n for n in names if n in own]))
    if fit["layout"] != present:
        raise ValueError(f"its layout is another one, {layout_difference(fit['layout'], present)}")
    return names


class PersonalEvaluation:
    """Lets a module be its clients' own models; what a part of one lacks comes from the global model."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        model_of: Callable[[int], Snapshot | ModelPart | None],
        layers: LayerSpec,
        trained: Sequence[str] | None,
    ) -> None:
        self._module, self._device = module, device
        self._model_of, self._layout = model_of, ParamLayout.from_module(module, layers, trained)

    def standing_in(self, client_id: int) -> AbstractContextManager[None] | None:
        """Makes the module the client's own model for a while; ``None`` if it has none."""
        model = self._model_of(client_id)
        return None if model is None else self._standing_in(model)

    @contextmanager
    def _standing_in(self, model: Snapshot | ModelPart) -> Iterator[None]:
        parameters = self._layout.parameters(self._module)
        with ExitStack() as stack:
            # Lightning evaluates in inference mode, whose tensors must not become parameters.
            with torch.inference_mode(False), torch.no_grad():
                if isinstance(model, ModelPart):
                    model = model.completed(self._module, parameters, self._layout)
                own = model.to(self._device)
                stack.enter_context(standing_in(self._module, parameters, self._layout, own, evaluate=True))
            yield
