# SPDX-License-Identifier: Apache-2.0
"""Runs a module's evaluation for one client alone, without a trace in the fit, and on its own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn

from fl_lightning.algorithms.base import ClientRule
from fl_lightning.clients.schedules import group_options
from fl_lightning.core.layout import LayerSpec, ParamLayout, layout_difference, layout_fingerprint, names_in
from fl_lightning.core.model_snapshot import ModelPart, Snapshot, standing_in
from fl_lightning.core.modules import preserve_modes, shadowed, submodules, trained_parameters
from fl_lightning.core.storage import rule_state
from fl_lightning.fit.loaders import EvaluationLoader, counts_of
from fl_lightning.lightning.batches import counted_batches, run_batch, run_hook
from fl_lightning.lightning.logged_values import ClientValues, LoggedRow, active_results, collecting
from fl_lightning.lightning.names import DummyLogger, LightningModule, Trainer, TrainerFn, rank_zero_warn
from fl_lightning.lightning.undefined_metrics import LogNotes

PREFIX = "personal/"


class Alone:
    """Runs steps and hooks of the module as if one client were all there is.

    Loggers and ``print`` are silent, and a hook that steps optimizers or schedulers ends there. The caller sees to what
    the module holds before and afterwards.
    """

    def __init__(
        self, trainer: Trainer, stage: str, notes: LogNotes, loaders: Sequence[EvaluationLoader | None]
    ) -> None:
        self._trainer, self._stage, self._notes, self._loaders = trainer, stage, notes, loaders
        self._module: LightningModule = trainer.lightning_module
        self._values = ClientValues(type(active_results(trainer))(training=False))

    def steps(self, client_id: int) -> LoggedRow:
        """What the module logs in all of a client's batches."""
        row, results = LoggedRow(), self._values.results
        counts = counts_of(self._loaders, client_id)
        with (
            self._unheard(),
            collecting(self._trainer, results, {}, in_steps=True),
            self._notes.listening(judges=False),
        ):
            for place, own in enumerate(self._loaders):
                results.dataloader_idx = place if len(self._loaders) > 1 else None
                self._values.clear()
                for index, (batch, _) in enumerate(
                    own.of_client(client_id) if own is not None and counts[place] else ()
                ):
                    self._notes.next_batch()
                    run_batch(self._trainer, self._stage, batch, index)
                self._values.read(self._notes, row)  # Lightning, too, computes metrics once a loader is over
        results.dataloader_idx = None
        return row

    def end(self, client_id: int, row: LoggedRow) -> LoggedRow:
        """Runs the epoch-end hook for a client; adds what it logs until it ends or raises, and the error."""
        found, results = LoggedRow(), self._values.results
        groups = [(group, group_options(group)) for each in self._trainer.optimizers for group in each.param_groups]
        self._values.clear()
        with (
            self._unheard(), collecting(self._trainer, results, row.values, in_steps=False),
            self._notes.listening(judges=True), counted_batches(self._trainer, counts_of(self._loaders, client_id)),
        ):  # fmt: skip
            try:
                run_hook(self._trainer, f"on_{self._stage}_epoch_end")
            except Exception as raised:
                found.error = f"{type(raised).__name__}: {raised}"
            self._values.read(self._notes, found)
        for group, options in groups:  # rates that the hook sets move once per evaluation, not once per client
            group.update(options)
        found.update(row)
        return found

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        trainer = self._trainer
        loggers = trainer.loggers
        with (
            redirect_stdout(StringIO()), preserve_modes(submodules(self._module)),
            shadowed(self._module, optimizers=_refuse, lr_schedulers=_refuse),
        ):  # fmt: skip
            trainer.loggers = [DummyLogger()] if loggers else []
            try:
                yield
            finally:
                trainer.loggers = loggers


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("optimizers and schedulers step once per evaluation, not once per client")


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
            own = rule_state.copy_with(rule, state["client_rule"], rule_state.renumbering(state, names)[0])
            return PersonalEvaluation(module, device, own.personal_model, layers, trained)
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
