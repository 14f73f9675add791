# SPDX-License-Identifier: Apache-2.0
"""Ditto: Fair and Robust Federated Learning Through Personalization.

Tian Li, Shengyuan Hu, Ahmad Beirami, Virginia Smith. ICML 2021. https://arxiv.org/abs/2012.04221
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms._shared.own_loss import add_gradient, refuse_manual_optimization
from fl_lightning.algorithms.base import ClientRule
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import ClientReport, LocalWork, Needs
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.model_snapshot import Snapshot, packed_buffers, standing_in
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.core.storage.at_clients import at_clients
from fl_lightning.core.storage.declared import plain


class Ditto(FedAvg):
    """Every client has a model of its own, held near the global one (Algorithm 1).

    Validation and test evaluate both on every client's data; what the module logs for the personal models stands under
    ``personal/<metric>``. A client's first personal model is the global model that it receives in its first round.

    Args:
        lam: strength of the pull towards the global model, the paper's lambda. With 0 clients train alone, but by plain
            steps of SGD; ``fl.compare(..., bounds="local")`` trains them alone as the module says.
        personal_lr: step size of the personal models; ``None``: the clients' learning rate.
        weighting: how the server weighs clients; the paper's experiments weigh them alike.
        directory: where personal models live in files; ``None``: in memory on the CPU and in the checkpoint.

    Raises:
        ValueError: ``lam`` is negative, or ``personal_lr`` is not positive.
    """

    @checked(lam=Bounds(0), personal_lr=Bounds(above=0))
    def __init__(
        self,
        lam: float = 1.0,
        personal_lr: float | None = None,
        weighting: Literal["samples", "uniform"] = "uniform",
        directory: str | None = None,
    ) -> None:
        super().__init__(weighting)
        self.lam, self.personal_lr = lam, personal_lr
        self.directory = directory
        self._client = PersonalModels(lam, personal_lr, directory)


class PersonalModels(ClientRule):
    """Before each local batch, the personal model steps on it: ``v -= eta (grad L(v) + lambda (v - W))``.

    These are plain steps of gradient descent, without the clients' momentum, weight decay, clipping or hooks. Whatever
    they draw comes from generators of their own, and BatchNorm's statistics are the personal model's own: the global
    model trains as in FedAvg, bit for bit.

    See :class:`Ditto` for the arguments.
    """

    own_work = "steps"

    own = at_clients(files="directory")

    def __init__(self, lam: float, personal_lr: float | None, directory: str | None = None) -> None:
        self.needs = Needs(client_lr=personal_lr is None)
        self.lam, self.personal_lr = lam, personal_lr
        self.directory = directory
        self._model: Snapshot | None = None
        self._batches = 0
        self._gradient: Tensor | None = None  # summed up over the batches of a step that is not taken yet
        self._from_step, self._step_lr = 0, 0.0

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Personal models need losses that ``training_step`` leaves to others to descend."""
        refuse_manual_optimization(module, "Ditto trains personal models on the loss of {}")

    def personal_model(self, client_id: int) -> Snapshot | None:
        """The client's model on the CPU, or ``None`` before the end of its first round."""
        return self.own.get(client_id)

    def begin_client(self, work: LocalWork) -> None:
        """Loads the client's model, a copy of the global one in its first round."""
        held, device = self.own.get(work.client_id), work.params.device
        if held is None:
            self._model = Snapshot(work.params.clone(), packed_buffers(work.module, device))
        else:
            self._model = Snapshot(held.params.to(work.params, copy=True), held.buffers.to(device))
        self._batches, self._gradient, self._from_step = 0, None, work.steps

    def begin_batch(self, work: LocalWork, batch: Any, batch_idx: int) -> None:
        """The personal model's gradient; steps are as many as local ones, so gradients accumulate as theirs do."""
        model, lr = self._model, work.client_lr if self.personal_lr is None else self.personal_lr
        if model is None or work.own_loss is None or lr is None:
            raise ValueError("begin_batch of Ditto needs begin_client before it, work.own_loss and a learning rate")
        model = self._stepped(work, model)
        # The present seed is the client's own in this round.
        seed = derive_seed(torch.initial_seed(), "personal", self._batches)
        stand_in = standing_in(work.module, work.parameters, work.layout, model)
        if self._gradient is None:
            self._gradient = torch.zeros_like(work.params)
        with isolated(seed, work.params.device), torch.enable_grad(), stand_in:
            loss = work.own_loss(batch, batch_idx)
            add_gradient(self._gradient, loss, work, 1 / work.window)  # as the loss of the global model is divided
            buffers = packed_buffers(work.module, work.params.device)
        self._model = Snapshot(model.params, buffers)
        self._from_step, self._step_lr = work.steps, lr
        self._batches += 1

    def _stepped(self, work: LocalWork, model: Snapshot) -> Snapshot:
        """The model after a step along the gradients gathered, if the global model has taken one along its own."""
        if self._gradient is None or work.steps == self._from_step:
            return model
        v, gradient, self._gradient = model.params, self._gradient, None
        direction = (v - work.params).mul_(self.lam).add_(gradient)
        return Snapshot(v.sub_(direction, alpha=self._step_lr), model.buffers)

    def end_client(self, work: LocalWork) -> ClientReport:
        """Keeps the personal model; nothing of it is sent."""
        assert self._model is not None
        model, self._model = self._stepped(work, self._model), None
        if not bool(torch.isfinite(model.params).all()):
            raise ValueError(f"the personal model of client {work.client_id} diverged: lower personal_lr or lam")
        return ClientReport(local_state={"own": plain(model.to("cpu"))})
