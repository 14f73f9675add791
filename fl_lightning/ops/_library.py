# SPDX-License-Identifier: Apache-2.0
"""Schemas of the ops in torch.library's namespace ``fl_lightning``, their shapes, and the pure-torch kernels.

A compiled extension registers kernels for CPU and CUDA under the same names; the dispatcher then prefers those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.ops import _reference
from fl_lightning.ops._min_norm import min_norm

LIBRARY = torch.library.Library("fl_lightning", "FRAGMENT")

_SCHEMAS = {
    "layer_gram": ("(Tensor rows, Tensor offsets) -> Tensor", _reference.layer_gram),
    "layer_cross_gram": ("(Tensor rows, Tensor others, Tensor offsets) -> Tensor", _reference.layer_cross_gram),
    "layer_dots": ("(Tensor rows, Tensor step, Tensor offsets) -> Tensor", _reference.layer_dots),
    "layer_combine": ("(Tensor rows, Tensor offsets, Tensor coeff) -> Tensor", _reference.layer_combine),
    "layer_combine_add": (
        "(Tensor(a!) out, Tensor rows, Tensor offsets, Tensor coeff) -> ()",
        _reference.layer_combine_add,
    ),
    "project_conflicts": ("(Tensor gram, Tensor order, Tensor keep) -> Tensor", _reference.project_conflicts),
    "min_norm": ("(Tensor gram) -> (Tensor, Tensor)", min_norm),
    "puc_track": (
        "(Tensor row, Tensor(a!) counts, int threshold, int participations, Tensor offsets) -> (Tensor, Tensor)",
        _reference.puc_track,
    ),
    "puc_combine": ("(Tensor rows, Tensor keep, Tensor weights) -> Tensor", _reference.puc_combine),
}
NAMES = tuple(_SCHEMAS)

for _name, (_schema, _kernel) in _SCHEMAS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


def _float64(rows: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=_reference.accumulation_device(rows))


@torch.library.register_fake("fl_lightning::layer_gram", lib=LIBRARY)
def _(rows: Tensor, offsets: Tensor) -> Tensor:
    return _float64(rows, offsets.shape[0] - 1, rows.shape[0], rows.shape[0])


@torch.library.register_fake("fl_lightning::layer_cross_gram", lib=LIBRARY)
def _(rows: Tensor, others: Tensor, offsets: Tensor) -> Tensor:
    return _float64(rows, offsets.shape[0] - 1, rows.shape[0], others.shape[0])


@torch.library.register_fake("fl_lightning::layer_dots", lib=LIBRARY)
def _(rows: Tensor, step: Tensor, offsets: Tensor) -> Tensor:
    return _float64(rows, offsets.shape[0] - 1, rows.shape[0])


@torch.library.register_fake("fl_lightning::layer_combine", lib=LIBRARY)
def _(rows: Tensor, offsets: Tensor, coeff: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1])


@torch.library.register_fake("fl_lightning::layer_combine_add", lib=LIBRARY)
def _(out: Tensor, rows: Tensor, offsets: Tensor, coeff: Tensor) -> None:
    return None


@torch.library.register_fake("fl_lightning::project_conflicts", lib=LIBRARY)
def _(gram: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    return torch.empty_like(gram, memory_format=torch.contiguous_format)


@torch.library.register_fake("fl_lightning::min_norm", lib=LIBRARY)
def _(gram: Tensor) -> tuple[Tensor, Tensor]:
    return gram.new_empty(gram.shape[:2]), gram.new_empty(gram.shape[0])


@torch.library.register_fake("fl_lightning::puc_track", lib=LIBRARY)
def _(row: Tensor, counts: Tensor, threshold: int, participations: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
    words = row.new_empty((row.shape[0] + 31) // 32, dtype=torch.int32)
    return words, _float64(row, offsets.shape[0] - 1)


@torch.library.register_fake("fl_lightning::puc_combine", lib=LIBRARY)
def _(rows: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1])
