# SPDX-License-Identifier: Apache-2.0
"""The optimizers that a module asks for, also where no trainer trains it, and their options in checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.names import LightningModule, Trainer, lightning_module, quiet

_MadeUp: Any = lightning_module("core.optimizer")._MockOptimizer


def given_optimizers(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Without the one that Lightning makes up for a module that gives none."""
    return [optimizer for optimizer in optimizers if not isinstance(optimizer, _MadeUp)]


def configured_optimizers(module: LightningModule) -> list[Optimizer]:
    """What ``configure_optimizers`` gives on a server, which has no trainer, or for an evaluation, which has no steps.

    The module sees a trainer without data, so a schedule may ask how long the fit is; the answer is made up.
    """
    if not is_overridden("configure_optimizers", module):
        return []
    alone = lightning_module("plugins.environments").LightningEnvironment()  # whatever cluster the process is on
    with quiet():
        asked = _Unemployed(
            accelerator="cpu", devices=1, max_epochs=_LENGTH, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, plugins=[alone],
        )  # fmt: skip
    before = module._trainer
    module.trainer = asked
    try:
        found = module.configure_optimizers()
    except Exception as error:
        raise ValueError(
            f"configure_optimizers of {type(module).__name__} says which parameters are trained, and must run where "
            f"there are no data and no trainer at work, found {type(error).__name__}: {error}"
        ) from error
    finally:
        module.trainer = before
    return [] if found is None else list(lightning_module("core.optimizer")._configure_optimizers(found)[0])


_LENGTH = 1000


class _Unemployed(Trainer):
    """Has no data and counts no batches."""

    estimated_stepping_batches = _LENGTH
    num_training_batches = _LENGTH


def with_wrapped(optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, dict[int, Any]]]:
    """The optimizers and those in their attributes, and the objects that they may share."""
    found: dict[int, Optimizer] = {}
    waiting = list(optimizers)
    while waiting:
        optimizer = waiting.pop(0)
        if id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            waiting += [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    shared: dict[int, Any] = dict(found)
    for optimizer in found.values():
        groups = optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        lists = [group["params"] for group in groups]
        shared |= {id(o): o for o in (*parameters, *lists, *groups, groups, optimizer.state)}
    return [(optimizer, shared) for optimizer in found.values()]


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group without its parameters."""
    return {name: _own(value) for name, value in group.items() if name != "params"}


def _own(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):  # copy.deepcopy takes many times as long
        return value
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def scheduled_state(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """An optimizer's part of a checkpoint in torch's layout, without the state, which belongs to clients."""
    start, packed = 0, []
    chosen = groups or [group_options(group) for group in optimizer.param_groups]
    for group, options in zip(optimizer.param_groups, chosen, strict=True):
        indices = list(range(start, start + len(group["params"])))
        start += len(indices)
        packed.append({**options, "params": indices})
    return {"state": {}, "param_groups": packed}


def load_scheduled_states(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Restores the options (the learning rate among them) that :func:`scheduled_state` returned for every optimizer.

    Not through ``optimizer.load_state_dict``: it empties the state, which some optimizers fill when they are made.
    """
    if states and len(states) != len(optimizers):
        raise ValueError(f"the module must have the checkpoint's {len(states)} optimizers, found {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=False):
        saved = state["param_groups"]
        found, expected = [len(g["params"]) for g in optimizer.param_groups], [len(g["params"]) for g in saved]
        if found != expected:
            kind = type(optimizer).__name__
            raise ValueError(f"{kind} must have the checkpoint's parameter groups, sizes {expected}, found {found}")
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            group.update(group_options(options))
