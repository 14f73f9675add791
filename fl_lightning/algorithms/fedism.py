# SPDX-License-Identifier: Apache-2.0
"""FedISM: From Optimization to Generalization.

Fair Federated Learning against Quality Shift via Inter-Client Sharpness Matching.

Nannan Wu, Zhuo Kuang, Zengqiang Yan, Li Yu. IJCAI 2024. https://arxiv.org/abs/2404.17805
https://github.com/wnn2000/FFL4MIA
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms._shared.own_loss import add_gradient, measured_loss, refuse_manual_optimization
from fl_lightning.algorithms._shared.weighting import reported, shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, StepReport
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers, standing_in
from fl_lightning.core.storage.per_client import per_client

SHARPNESS = "sharpness"
LEAST = 1e-10  # of a sharpness, and added to shares of it
TINY = 1e-12  # beside norms


class FedISM(ServerRule):
    """Clients on whose data the global model is sharp count more, and all train towards flat minima.

    The sharpness of a client is how much its loss rises from the received model to a point at distance ``rho`` in the
    direction of its gradient. Weights are a power of the clients' shares of the sharpness, averaged over rounds. A
    client that is new has no earlier weights to average with. If all rows are zero, the step is zero, flagged, and
    weights stay as they are.

    Args:
        rho: distance of the perturbed model, in training and for the sharpness.
        alpha: how much of the gradient's part at a right angle to the perturbed one is taken away (GSAM); 0 is SAM.
        q: power of the shares; 0 weighs clients alike.
        beta: part of the present round in the weights, above 0; 1 forgets earlier rounds.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "sums"
    averages = True

    weights = per_client(float)

    @checked(rho=Bounds(above=0), alpha=Bounds(0), q=Bounds(0), beta=Bounds(above=0, most=1))
    def __init__(self, rho: float = 0.05, alpha: float = 0.1, q: float = 2.0, beta: float = 0.5) -> None:
        self.rho, self.alpha, self.q, self.beta = rho, alpha, q, beta
        self._client = SharpnessAware(rho, alpha)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i w_i u_i``."""
        sharpness = reported(cohort, SHARPNESS, (), "FedISM")
        weights = shares((shares(sharpness.clamp_min(LEAST)) + LEAST) ** self.q)
        before = shares(self.weights.vector(cohort.client_ids, weights))
        weights = self.beta * weights + (1 - self.beta) * before
        step = weighted_mean(cohort, weights)
        self.report = StepReport(weights=weights, flagged=stands_still(cohort))
        if not self.report.flagged:
            self.weights.put(cohort.client_ids, weights)
        return step


class SharpnessAware(ClientRule):
    """Steps along gradients at perturbed parameters, and reports the sharpness at the received ones.

    A second pass over each batch gives the gradient at ``theta + rho g / ||g||``. BatchNorm's statistics follow the
    first pass alone.
    """

    own_work = "gradients"

    def __init__(self, rho: float, alpha: float) -> None:
        self.rho, self.alpha = rho, alpha
        self._sharpness = torch.zeros((), dtype=torch.float64)
        self._batches: list[tuple[Any, int]] = []  # since the last step

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """The second pass needs losses that ``training_step`` leaves to others to descend."""
        refuse_manual_optimization(module, "FedISM takes the loss of {} a second time")

    def begin_client(self, work: LocalWork) -> None:
        """Measures the sharpness: two passes over the client's data in evaluation mode, with equal random numbers."""
        loss, gradient = measured_loss(work, _at(work, work.params), SHARPNESS, slope=True)
        higher, _ = measured_loss(work, _at(work, self._perturbed(work.params, gradient)), SHARPNESS, slope=False)
        self._sharpness = torch.tensor(higher - loss, dtype=torch.float64)
        self._batches = []

    def _perturbed(self, params: Tensor, gradient: Tensor) -> Tensor:
        scale: Tensor = self.rho / (gradient.norm() + TINY)
        return params + scale * gradient

    def begin_batch(self, work: LocalWork, batch: Any, batch_idx: int) -> None:
        """Keeps the batch for its second pass."""
        self._batches.append((batch, batch_idx))

    def correct_gradients(self, work: LocalWork) -> None:
        """Puts the gradient at the perturbed parameters in the place of the gradient."""
        assert work.own_loss is not None
        batches, self._batches = self._batches, []
        present = [torch.zeros_like(p) if p.grad is None else p.grad for p in work.parameters]
        old, new = work.layout.flatten(present), torch.zeros_like(work.params)
        model = _at(work, self._perturbed(work.row, old))
        with torch.enable_grad(), standing_in(work.module, work.parameters, work.layout, model):
            for batch, index in batches:
                add_gradient(new, work.own_loss(batch, index), work, 1 / work.window)
        along = (old @ new) / (new.norm() + TINY) ** 2
        new -= self.alpha * (old - along * new)
        for parameter, view in zip(work.parameters, work.layout.views(new), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(view)

    def end_client(self, work: LocalWork) -> ClientReport:
        """The sharpness at the received parameters."""
        return ClientReport({SHARPNESS: self._sharpness})

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the gradients and the perturbed parameters of one client."""
        return {"sharpness (per process)": 4 * federation.layout.numel * federation.dtype.itemsize}


def _at(work: LocalWork, params: Tensor) -> Snapshot:
    return Snapshot(params, packed_buffers(work.module, params.device))
