# SPDX-License-Identifier: Apache-2.0
"""Which implementation of each op runs here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from fl_lightning.arguments import TEXT, checked
from fl_lightning.ops import _library


@checked(reason=TEXT)
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
    """Which implementation of each public op runs in this installation, and why not a faster one.

    ``"cuda"`` means that rows on a GPU go through CUDA kernels and rows on the CPU through compiled ones; ``"cpu"``
    that only the latter do.
    """
    implementation, reason = _running()
    return {name: Backend(name, implementation, reason) for name in _library.PUBLIC}


def _running() -> tuple[Literal["torch", "cpu", "cuda"], str]:
    module = _library.EXTENSION.module
    if module is None:
        return "torch", _library.EXTENSION.reason
    instructions = f"on the CPU: {module.instruction_set()}"
    if not _library.EXTENSION.cuda:
        return "cpu", f"{_library.EXTENSION.no_cuda}; {instructions}"
    if not torch.cuda.is_available():
        return "cpu", f"no CUDA device; {instructions}"
    return "cuda", ""
