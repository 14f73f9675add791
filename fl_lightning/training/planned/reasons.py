# SPDX-License-Identifier: Apache-2.0
"""Why a step cannot be planned, in one sentence of few words."""

from __future__ import annotations

from fl_lightning.training.planned.trace import CannotPlanError


def reason_of(error: BaseException) -> str:
    """Completes "eager, because ...".

    Args:
        error: what a call of a guarded function raised; its causes are looked through.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CannotPlanError):
            return str(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    error = getattr(error, "inner_exception", None) or error
    text = str(error).strip()
    if "recompile" in type(error).__name__.lower():
        return "training_step reads values that change from step to step"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0].rstrip(".") if lines else type(error).__name__
    return f"TorchDynamo cannot follow training_step: {first}"
