# SPDX-License-Identifier: Apache-2.0
"""The loss in what ``training_step`` returns, under the rules that Lightning's automatic optimization has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_lightning.lightning.names import lightning_module


def loss_of(output: Any) -> Tensor | None:
    """Takes the loss out of what ``training_step`` returned.

    Returns:
        The loss, or ``None`` if the step wants this batch skipped.

    Raises:
        MisconfigurationException: it returned something else than a tensor, a dict with one as ``"loss"``, or ``None``;
            Lightning's own, which modules with hooks get from Lightning itself.
    """
    # Tensors first: this runs for every local batch.
    if isinstance(output, Tensor) or output is None:
        return output
    found = type(output).__name__
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            return loss
        found = f"a dict with {sorted(map(str, output))}" if loss is None else f"{type(loss).__name__} as 'loss'"
    error: type[Exception] = lightning_module("utilities.exceptions").MisconfigurationException
    raise error(
        "training_step must return a tensor, a dict with the loss as 'loss', or None to skip the batch, where "
        f"optimization is automatic, found {found}"
    )
