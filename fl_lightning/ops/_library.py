# SPDX-License-Identifier: Apache-2.0
"""Schemas of the ops in torch.library's namespace ``fl_lightning``, their shapes, and the pure-torch kernels.

A compiled extension registers kernels for CPU and CUDA under the same names; the dispatcher then prefers those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.arguments import TEXT, checked
from fl_lightning.ops import _extension, _gram_problems, _reference
from fl_lightning.ops.rows import accumulation_device


class _Op(NamedTuple):
    schema: str
    kernel: Callable[..., Any]
    fake: Callable[..., Any]


def _step(rows: Tensor, *others: object) -> Tensor:
    return rows.new_empty(rows.shape[1])


def _nothing(*arguments: object) -> None:
    return None


def _layer_gram(rows: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    return _float64(rows, offsets.shape[0] - 1, rows.shape[0], rows.shape[0])


def _layer_squares(rows: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    return _float64(rows, offsets.shape[0] - 1, rows.shape[0])


def _layer_dots(rows: Tensor, step: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    return _layer_squares(rows, offsets)


def _layer_cross_gram(rows: Tensor, others: Tensor, offsets: Tensor, total_columns: int | None = None) -> Tensor:
    return _float64(rows, offsets.shape[0] - 1, rows.shape[0], others.shape[0])


def _layer_chosen_gram(
    rows: Tensor, others: Tensor, offsets: Tensor, chosen: Tensor, total_columns: int | None = None
) -> Tensor:
    return _float64(rows, offsets.shape[0] - 1, rows.shape[0], chosen.shape[0])


def _project_conflicts(gram: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    return gram.new_empty(gram.shape)


def _min_norm(gram: Tensor) -> tuple[Tensor, Tensor]:
    return gram.new_empty(gram.shape[:2]), gram.new_empty(gram.shape[0])


def _common_descent(
    gram: Tensor,
    online: int,
    scale: Tensor | None,
    weights: Tensor | None,
    zero_row: float,
    zero_direction: float,
    rounding: float,
) -> tuple[Tensor, Tensor, Tensor]:
    solved, fair = (gram.new_empty(gram.shape[0], dtype=torch.bool) for _ in range(2))
    return gram.new_empty(gram.shape[:2]), solved, fair


def _puc_track(
    row: Tensor, counts: Tensor, threshold: int, participations: int, offsets: Tensor, total_columns: int | None = None
) -> tuple[Tensor, Tensor]:
    words = row.new_empty((row.shape[0] + 31) // 32, dtype=torch.int32)
    return words, _float64(row, offsets.shape[0] - 1)


def _float64(rows: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=accumulation_device(rows))


_OPS = {
    "layer_gram": _Op(
        "(Tensor rows, Tensor offsets, int? total_columns=None) -> Tensor", _reference.layer_gram, _layer_gram
    ),
    "layer_squares": _Op(
        "(Tensor rows, Tensor offsets, int? total_columns=None) -> Tensor", _reference.layer_squares, _layer_squares
    ),
    "layer_cross_gram": _Op(
        "(Tensor rows, Tensor others, Tensor offsets, int? total_columns=None) -> Tensor",
        _reference.layer_cross_gram,
        _layer_cross_gram,
    ),
    "layer_chosen_gram": _Op(
        "(Tensor rows, Tensor others, Tensor offsets, Tensor chosen, int? total_columns=None) -> Tensor",
        _reference.layer_chosen_gram,
        _layer_chosen_gram,
    ),
    "layer_dots": _Op(
        "(Tensor rows, Tensor step, Tensor offsets, int? total_columns=None) -> Tensor",
        _reference.layer_dots,
        _layer_dots,
    ),
    "layer_combine": _Op("(Tensor rows, Tensor offsets, Tensor coeff) -> Tensor", _reference.layer_combine, _step),
    "layer_cross_combine": _Op(
        "(Tensor rows, Tensor others, Tensor offsets, Tensor coeff) -> Tensor", _reference.layer_cross_combine, _step
    ),
    "layer_combine_add": _Op(
        "(Tensor(a!) out, Tensor rows, Tensor offsets, Tensor coeff) -> ()", _reference.layer_combine_add, _nothing
    ),
    "project_conflicts": _Op(
        "(Tensor gram, Tensor order, Tensor keep) -> Tensor", _gram_problems.project_conflicts, _project_conflicts
    ),
    "min_norm": _Op("(Tensor gram) -> (Tensor lam, Tensor gap)", _gram_problems.min_norm, _min_norm),
    "common_descent": _Op(
        "(Tensor gram, int online, Tensor? scale, Tensor? weights, float zero_row, float zero_direction,"
        " float rounding) -> (Tensor coeff, Tensor solved, Tensor fair)",
        _gram_problems.common_descent,
        _common_descent,
    ),
    "puc_track": _Op(
        "(Tensor row, Tensor(a!) counts, int threshold, int participations, Tensor offsets,"
        " int? total_columns=None) -> (Tensor keep, Tensor norms)",
        _reference.puc_track,
        _puc_track,
    ),
    "puc_combine": _Op("(Tensor rows, Tensor keep, Tensor weights) -> Tensor", _reference.puc_combine, _step),
    "trimmed_mean": _Op("(Tensor rows, int trim) -> Tensor", _reference.trimmed_mean, _step),
}
NAMES = tuple(_OPS)
VARIANTS = ("layer_combine_add", "layer_chosen_gram")  # of layer_combine and layer_cross_gram, which call them
PUBLIC = tuple(name for name in NAMES if name not in VARIANTS)
COMPOSED = ("layer_chosen_gram",)  # on CUDA: of another op's kernel

# The library object must live as long as the ops: dropping it unregisters them.
_LIBRARY = torch.library.Library("fl_lightning", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _op in _OPS.items():
    _LIBRARY.define(_name + _op.schema)  # type: ignore[no-untyped-call]
    # Compiled kernels give results without gradients, so those in pure torch do, too.
    _LIBRARY.impl(_name, torch.no_grad()(_op.kernel), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fl_lightning::{_name}", _op.fake, lib=_LIBRARY)

# The extension's kernels for CPU and CUDA take precedence over those registered above.
EXTENSION = _extension.load()


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
    return {name: Backend(name, implementation, reason) for name in PUBLIC}


def _running() -> tuple[Literal["torch", "cpu", "cuda"], str]:
    module = EXTENSION.module
    if module is None:
        return "torch", EXTENSION.reason
    instructions = f"on the CPU: {module.instruction_set()}"
    if not EXTENSION.cuda:
        return "cpu", f"{EXTENSION.no_cuda}; {instructions}"
    if not torch.cuda.is_available():
        return "cpu", f"no CUDA device; {instructions}"
    return "cuda", ""
