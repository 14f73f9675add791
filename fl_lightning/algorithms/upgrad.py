# SPDX-License-Identifier: Apache-2.0
"""UPGrad: the mean of the updates after each was projected so that it conflicts with none.

Pierre Quinton, Valérian Rey: Jacobian Descent for Multi-Objective Optimization, 2024. https://arxiv.org/abs/2406.16232
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import StepReport
from fl_lightning.arguments import FILLED, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import LayerSpec
from fl_lightning.ops.solvers.dual_cone import dual_cone


class UPGrad(ServerRule):
    """The mean of the clients' updates, each projected onto the directions that conflict with no client (equation 3).

    Every layer is solved on its own, so no client conflicts with the step in any layer; the paper has one Jacobian of
    the whole model, which is ``layers="model"``. Projections are exact but for those of nearly opposed clients, see
    below; those of all layers are solved together, from their Gram matrices.

    Where clients oppose each other so that no direction of a layer helps all of them, its projections are 0 and it is
    not updated. Where they oppose each other up to less than 1e-4 of their length, projections may be up to a tenth of
    a row's length beside the exact ones, because coefficients are bounded. A row that is zero in a layer is in nobody's
    way there, and makes the mean shorter. If all rows are zero, so is the step, and the report is flagged.

    Args:
        layers: see :meth:`ParamLayout.from_module`.
    """

    reads = "gram"

    @checked(layers=FILLED)
    def __init__(self, layers: LayerSpec = "module") -> None:
        self.layers = layers

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``1/m sum_i pi(u_i)`` per layer, ``pi`` the projection onto ``{d : u_j . d >= 0 for all j}``."""
        gram, m = cohort.updates.gram(), len(cohort)
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        require_finite(diagonal.isfinite().all(0), cohort, "UPGrad")
        each = torch.eye(m, dtype=gram.dtype, device=gram.device) / m  # u_i / m, in coefficients of the rows
        coeff = dual_cone(gram, each.expand(len(gram), m, m)).sum(1)  # proposition 1
        shares = cohort.updates.layout.offsets.diff().to(coeff)
        self.report = StepReport(weights=shares @ coeff / shares.sum(), flagged=not bool(diagonal.any()))
        return cohort.updates.combine(coeff)
