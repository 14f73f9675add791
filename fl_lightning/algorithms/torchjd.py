# SPDX-License-Identifier: Apache-2.0
"""Weightings of TorchJD as server rules, with the extra ``torchjd``.

Quinton, Rey: Jacobian Descent for Multi-Objective Optimization, 2024, https://arxiv.org/abs/2406.16232 (UPGrad);
the other weightings name their papers in TorchJD's documentation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import StepReport
from fl_lightning.arguments import ANY, FILLED, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.errors import how_to_install
from fl_lightning.core.layout import LayerSpec
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.ops.solvers.dual_cone import dual_cone

try:
    from torchjd import aggregation
    from torchjd.linalg import DualConeProjector
except ImportError as error:
    raise ImportError(f"fl_lightning.algorithms.torchjd needs TorchJD: {how_to_install('torchjd')}") from error


class TorchJD(ServerRule):
    """Combines the clients' updates with the weights of any TorchJD weighting of Gram matrices.

    Every layer is weighted on its own. ``TorchJD(UPGradWeighting(projector=DualCone()))`` is layer-wise UPGrad: per
    layer, the mean of the updates after each was projected onto the directions that conflict with none, so the step
    conflicts with no client in any layer. ``layers="model"`` weighs whole models.

    A weighting sees each layer's Gram matrix in float64, divided by the mean of its diagonal, so that its tolerances
    do not depend on the size of updates. A layer in which no client moved stays unchanged. Weightings that draw random
    numbers draw the same ones for the same seed and round.

    Args:
        weighting: for instance ``torchjd.aggregation.UPGradWeighting(projector=DualCone())``, ``MGDAWeighting()`` or
            ``AlignedMTLWeighting()``. With quadprog installed, TorchJD's own projector serves as well.
        layers: what a layer is, see :class:`fl_lightning.ParamLayout`.
        seed: root of what the weighting draws.

    Raises:
        TypeError: ``weighting`` is no weighting: an aggregator, for instance, which wants the rows themselves.
        ValueError: ``weighting`` keeps state from call to call. It would keep it by row, and a row is another client
            in the next round.
    """

    reads = "gram"

    @checked(weighting=ANY, layers=FILLED)
    def __init__(self, weighting: nn.Module, layers: LayerSpec = "module", seed: int = 0) -> None:
        if not isinstance(weighting, aggregation.Weighting):
            raise TypeError(
                "weighting must be a TorchJD weighting such as torchjd.aggregation.MGDAWeighting(), "
                f"found {type(weighting).__name__}"
            )
        if hasattr(weighting, "reset"):
            raise ValueError(
                f"weighting must not keep state: {type(weighting).__name__} keeps it by row, and a row is another "
                "client in the next round"
            )
        self.weighting = weighting
        self.layers = layers
        self.seed = seed

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Weighs each layer's rows by its Gram matrix.

        Raises:
            ValueError: a row is not finite.
            RuntimeError: the weighting returned something else than ``m`` finite weights; names the layer.
        """
        gram = cohort.updates.gram()
        require_finite(gram.diagonal(dim1=-2, dim2=-1).isfinite().all(0), cohort, "TorchJD")
        uniform = torch.full_like(gram[0, 0], 1.0 / len(cohort))
        weights = [uniform] * len(gram)
        with isolated(derive_seed(self.seed, "weighting", cohort.round), gram.device), torch.no_grad():
            for layer, matrix in enumerate(gram):
                size = matrix.diagonal().mean()
                if size > 0:
                    weights[layer] = self._weigh(matrix / size, cohort.updates.layout.layer_names[layer])
        coeff = torch.stack(weights)
        shares = cohort.updates.layout.offsets.diff().to(coeff)
        self.report = StepReport(weights=shares @ coeff / shares.sum())
        return cohort.updates.combine(coeff)

    def _weigh(self, matrix: Tensor, layer: str) -> Tensor:
        weights: Tensor = self.weighting(matrix).to(matrix)
        if weights.shape != matrix.shape[:1] or not bool(torch.isfinite(weights).all()):
            raise RuntimeError(
                f"{type(self.weighting).__name__} must return {len(matrix)} finite weights, found "
                f"{weights.tolist()} in layer {layer!r}"
            )
        return weights


class DualCone(DualConeProjector):
    """Exact projections for ``UPGradWeighting`` and ``DualProjWeighting``, without quadprog and its licence (GPL).

    TorchJD's default projector adds 1e-4 to the diagonal and solves one QP after the other in quadprog. This one adds
    nothing and solves them together with :func:`fl_lightning.ops.solvers.dual_cone`.
    """

    def __call__(self, U: Tensor, G: Tensor) -> Tensor:  # noqa: N803
        """Coefficients ``[..., m]`` of the projections of ``U @ J``, where ``G = J @ J.T`` is ``[m, m]``."""
        return dual_cone(G, U.reshape(-1, G.shape[0])).reshape(U.shape).to(U)
