# SPDX-License-Identifier: Apache-2.0
"""Which implementation of each op runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fl_lightning.ops import _library


@dataclass(frozen=True)
class Backend:
    """The implementation of one op.

    Attributes:
        op: name of the op.
        implementation: ``"torch"``, ``"cpu"`` (compiled for this processor) or ``"cuda"``.
        reason: why nothing faster runs; empty when nothing faster exists.
    """

    op: str
    implementation: Literal["torch", "cpu", "cuda"]
    reason: str


def backend() -> Mapping[str, Backend]:
    """Which implementation of each public op runs in this installation, and why not a faster one."""
    reason = "no compiled extension in this installation"
    names = (name for name in _library.NAMES if name != "layer_combine_add")
    return {name: Backend(name, "torch", reason) for name in names}
