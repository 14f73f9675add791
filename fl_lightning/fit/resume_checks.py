# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must have in common with the fit that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.names import rank_zero_warn

_MUST_AGREE = ("method", "clients", "layout", "server_optimizer", "steps_per_round")
_BELONG_TO_STATE = ("arguments", "data")


def remembers(states: Mapping[str, Any]) -> list[str]:
    """Which parts of a checkpoint's state hold something, as a message names them."""
    names = {"algorithm": "the method", "client_rule": "its client half", "client_optimizers": "client optimizers"}
    return [words for name, words in names.items() if _holds_something(states[name])]


def check_resume(
    found: FitDescription, expected: FitDescription, source: str, memories: Sequence[str], strict: bool
) -> None:
    """Compares the fit that wrote a checkpoint with the one that goes on from it; warns of what may differ.

    ``source`` is what the state comes from, as a message names it; for ``memories`` see :func:`remembers`. ``strict``
    refuses other data and arguments where something is remembered. Where the state means nothing to this fit, it always
    raises ValueError: another method, server optimizer, number of clients, layout, or number of steps of a round.
    """
    differences = found.differences(expected)
    refused = [differences[name] for name in _MUST_AGREE if name in differences]
    if refused:
        raise ValueError(
            f"{source} was written by another fit, {refused[0]}: use the same, or start from the weights alone "
            "(load_from_checkpoint)"
        )
    refused = [differences[name] for name in _BELONG_TO_STATE if name in differences]
    if refused and memories and strict:
        raise ValueError(
            f"{source} was written by another fit, {'; '.join(refused)}: the memory of {' and '.join(memories)} "
            "belongs to that one. Use the same, start from the weights alone (load_from_checkpoint), or go on all the "
            "same with FederatedStrategy(strict_resume=False)"
        )
    if differences:
        words = "; ".join(differences.values())
        rank_zero_warn(f"the fit goes on with other settings than {source} was written with: {words}")


def _holds_something(state: Any) -> bool:
    if isinstance(state, Tensor):
        return state.numel() > 0
    if isinstance(state, Mapping):
        return any(map(_holds_something, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_holds_something, state))
    return bool(state)
