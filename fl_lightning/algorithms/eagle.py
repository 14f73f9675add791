# SPDX-License-Identifier: Apache-2.0
"""EAGLE: Loss Gap Parity for Fairness in Heterogeneous Federated Learning (experimental).

Brahim Erraji, Michaël Perrot, Aurélien Bellet. 2026. https://arxiv.org/abs/2603.29818
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.algorithms._shared.own_loss import add_gradient, measured_loss, refuse_manual_optimization
from fl_lightning.algorithms._shared.weighting import reported, shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs, StepReport
from fl_lightning.arguments import FILLED, Bounds, check_unused, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers, standing_in
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.core.storage.per_client import per_client

LOWEST = "lowest_loss"


class EAGLE(ServerRule):
    """Descent on ``mean_i F_i + lam Var_i(F_i - F_i*)``: clients far above what they reach alone count more.

    ``F_i*`` is the lowest loss that client ``i`` reaches on its own data. A client finds it when it first takes part:
    it trains a copy of the model that it received alone, until a pass over its data lowers the loss no further.

    Experimental: docs/methods/eagle.md says what was decided here, without the paper's text. If all rows are zero, the
    step is zero and flagged.

    Args:
        lam: strength of the penalty on the variance; 0 is ``FedAvg("uniform")``.
        best_losses: the ``F_i*`` by client id, where they are known; clients then train no model alone.
        alone_epochs: most passes of a client's training alone.
        alone_lr: its learning rate; ``None``: that of the clients.
        clip: negative weights become 0, and the others are divided by their sum. ``False`` takes the gradient as it is,
            which raises the loss of a client that is far below the mean gap.

    Raises:
        ValueError: an argument is out of range, or has no use beside ``best_losses``.
    """

    needs = Needs(losses=True)
    reads = "sums"
    averages = True

    @checked(lam=Bounds(0), best_losses=FILLED, alone_epochs=Bounds(1), alone_lr=Bounds(above=0))
    def __init__(
        self,
        lam: float = 1.0,
        best_losses: Sequence[float] | None = None,
        alone_epochs: int = 20,
        alone_lr: float | None = None,
        clip: bool = True,
    ) -> None:
        if best_losses is not None:
            check_unused("alone_epochs of EAGLE", alone_epochs, 20, "with best_losses, which clients need not find")
            check_unused("alone_lr of EAGLE", alone_lr, None, "with best_losses, which clients need not find")
        self.lam, self.best_losses, self.clip = lam, best_losses, clip
        self.alone_epochs, self.alone_lr = alone_epochs, alone_lr
        self._client = LowestLosses(alone_epochs, alone_lr) if best_losses is None else None

    def begin_fit(self, federation: Federation) -> None:
        """Checks that there is a loss for each client."""
        if self.best_losses is not None and len(self.best_losses) != federation.num_clients:
            raise ValueError(
                f"best_losses of EAGLE must be one for each of {federation.num_clients} clients, found "
                f"{len(self.best_losses)}"
            )

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i p_i u_i`` with ``p_i = (1 + 2 lam (r_i - mean r)) / m`` and gaps ``r_i = F_i - F_i*``."""
        gaps = cohort.known_losses - self._lowest(cohort)
        weights = (1 + 2 * self.lam * (gaps - gaps.mean())) / len(cohort)
        weights = shares(weights.clamp_min(0)) if self.clip else weights
        step = weighted_mean(cohort, weights)
        spread = float(gaps.std(correction=0))
        self.report = StepReport(weights=weights, flagged=stands_still(cohort), scalars={"loss_gap_std": spread})
        return step

    def _lowest(self, cohort: Cohort) -> Tensor:
        if self.best_losses is None:
            return reported(cohort, LOWEST, (), "EAGLE")
        return torch.tensor([self.best_losses[client] for client in cohort.client_ids], dtype=torch.float64)


class LowestLosses(ClientRule):
    """Reports the lowest loss that a client reaches alone; the server keeps it for the client's next rounds.

    Training alone is plain steps of gradient descent on batches in the dataset's order. After each pass the loss on all
    of the client's data is measured in evaluation mode, as that of the global model is. Random numbers are its own:
    local training goes as in FedAvg, bit for bit.

    See :class:`EAGLE` for the arguments.
    """

    own_work = "steps"
    reads = "sums"

    lowest = per_client(float, sent="owner")

    def __init__(self, epochs: int, lr: float | None) -> None:
        self.needs = Needs(client_lr=lr is None)
        self.epochs, self.lr = epochs, lr
        self._found = math.inf

    def refusal(self, server: ServerRule) -> str | None:
        """Only EAGLE reads what clients reach alone."""
        if isinstance(server, EAGLE):
            return None
        return f"reports lowest losses, which {type(server).__name__} does not read: leave client out"

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Training alone needs losses that ``training_step`` leaves to others to descend."""
        refuse_manual_optimization(module, "EAGLE trains clients alone on the loss of {}", ", or give best_losses")

    def begin_client(self, work: LocalWork) -> None:
        """Trains alone, unless the client has done so in an earlier round."""
        held = self.lowest.get(work.client_id)
        self._found = self._alone(work) if held is None else held

    def _alone(self, work: LocalWork) -> float:
        model = Snapshot(work.params.clone(), packed_buffers(work.module, work.params.device))
        lowest, (loss, _) = math.inf, measured_loss(work, model, LOWEST, slope=False)
        for epoch in range(self.epochs):
            if not loss < lowest:  # no lower, or not finite
                return lowest
            lowest, model = loss, self._passed(work, model, epoch)
            loss, _ = measured_loss(work, model, LOWEST, slope=False)
        return min(lowest, loss)

    def _passed(self, work: LocalWork, model: Snapshot, epoch: int) -> Snapshot:
        """The model after one more pass over the client's data; its parameters change in place."""
        lr = work.client_lr if self.lr is None else self.lr
        assert work.batches is not None
        assert work.own_loss is not None
        assert lr is not None
        seed = derive_seed(torch.initial_seed(), "alone", epoch)
        stand_in = standing_in(work.module, work.parameters, work.layout, model)
        with isolated(seed, work.params.device), torch.enable_grad(), stand_in:
            for index, (batch, _) in enumerate(work.batches()):
                gradient = torch.zeros_like(work.params)
                add_gradient(gradient, work.own_loss(batch, index), work, 1.0)
                model.params.sub_(gradient, alpha=lr)
            return Snapshot(model.params, packed_buffers(work.module, work.params.device))

    def end_client(self, work: LocalWork) -> ClientReport:
        """The lowest loss of the client alone."""
        return ClientReport({LOWEST: torch.tensor(self._found, dtype=torch.float64)})

    def commit(self, cohort: Cohort) -> None:
        """Keeps what was found."""
        self.lowest.put(cohort.client_ids, reported(cohort, LOWEST, (), "EAGLE"))
