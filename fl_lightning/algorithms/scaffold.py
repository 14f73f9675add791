# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank J. Reddi, Sebastian U. Stich, Ananda Theertha Suresh.
ICML 2020. https://arxiv.org/abs/1910.06378
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared import client_vectors
from fl_lightning.algorithms._shared.weighting import data_weights, uniform_weights, weighted_mean
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.fedavg import FedAvg
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs, StepReport
from fl_lightning.arguments import DEVICE, Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client

Weighting = Literal["samples", "uniform"]
_NAME = "SCAFFOLD's control variates"


class SCAFFOLD(ServerRule):
    """Clients follow the federation's gradient instead of their own drift (Algorithm 1).

    Args:
        server_lr: global step size ``eta_g``.
        control_device: where the clients' control variates live, for instance ``"cpu"``; ``None``: on the federation's
            device. One vector of the model's size per client that has trained.
        weighting: what the clients count in the step and in ``c``. ``"uniform"``: all alike (the paper), towards the
            optimum of the mean of their losses. ``"samples"``: by their numbers of training samples, towards the
            optimum of the loss on all samples, as FedAvg does.

    Raises:
        ValueError: ``server_lr`` is not positive, or ``weighting`` is neither.
    """

    reads = "sums"
    averages = True

    @checked(server_lr=Bounds(above=0), control_device=DEVICE)
    def __init__(
        self, server_lr: float = 1.0, control_device: str | None = None, weighting: Weighting = "uniform"
    ) -> None:
        self.server_lr, self.control_device, self.weighting = server_lr, control_device, weighting
        self._client = ControlVariates(control_device, weighting)

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``eta_g sum_i p_i u_i`` (Algorithm 1, line 17) with ``p_i = 1 / m`` or ``n_i / n``."""
        weights = self.server_lr * (data_weights if self.weighting == "samples" else uniform_weights)(cohort)
        step = weighted_mean(cohort, weights)
        self.report = StepReport(weights=weights)
        return step


class ControlVariates(ClientRule):
    """Local steps along ``g - c_i + c``, and the update of ``c_i`` and ``c``.

    ``c_i`` becomes the mean of the gradients that the client saw (option II): ``c_i - c + (x - y_i) / (eta S)`` with
    ``S`` the number of local steps. SGD with momentum moves further: ``S`` is then the sum of the weights that
    gradients get in ``x - y_i``, so that ``c_i`` is a weighted mean of them. Both hold for SGD that starts each round
    with an empty momentum buffer, without Nesterov, dampening or clipping; elsewhere ``c_i`` is an estimate. A client
    that made no local step, or steps of length zero, changes nothing.
    """

    needs = Needs(client_lr=True)
    reads = "sums"

    c = server_state(Tensor, sent="all")
    c_i = per_client(Tensor, sent="owner", device="control_device")

    def __init__(self, control_device: str | None = None, weighting: Weighting = "uniform") -> None:
        self.control_device, self.weighting = control_device, weighting
        self._correction: list[Tensor] | None = None

    def refusal(self, server: ServerRule) -> str | None:
        """The step and ``c`` must weigh clients alike, or the fixed point is an optimum of neither."""
        if not isinstance(server, FedAvg) or server.weighting == self.weighting:
            return None
        return (
            f"weighs control variates with weighting={self.weighting!r}, and {type(server).__name__} updates with "
            f"{server.weighting!r}: give both the same weighting"
        )

    def clients_changed(self, federation: Federation, sizes: Tensor) -> None:
        """``c`` is the mean of the present clients' ``c_i``, or the fixed point is an optimum of neither."""
        n = sizes.double() if self.weighting == "samples" and sizes.any() else torch.ones(len(sizes)).double()
        self.c = client_vectors.mean_of(self.c_i, federation, n / n.sum())

    def begin_fit(self, federation: Federation) -> None:
        """Starts ``c`` at 0."""
        self.c = client_vectors.at_begin(self.c, federation, _NAME)

    def begin_client(self, work: LocalWork) -> None:
        """Prepares the correction ``c - c_i``."""
        own, server = self.c_i.get(work.client_id), self._c(work)
        self._correction = work.layout.views(server if own is None else server - own.to(work.params))

    def correct_gradients(self, work: LocalWork) -> None:
        """Turns ``g`` into ``g - c_i + c`` (Algorithm 1, line 10); parameters without a gradient stay as they are."""
        if self._correction is None:
            raise RuntimeError("begin_client of SCAFFOLD must run before correct_gradients")
        client_vectors.add_to_gradients(work, self._correction)

    def end_client(self, work: LocalWork) -> ClientReport:
        """Reports ``c_i^+ - c_i = -c + (x - y_i) / (eta S)`` (line 12, option II) as companion row ``"control"``."""
        if work.client_lr is None:
            raise ValueError(
                "client_lr must be given: SCAFFOLD computes mean gradients from the change of the parameters"
            )
        if work.steps == 0 or work.client_lr == 0:
            return ClientReport(companions={"control": torch.zeros_like(work.params)})
        if work.rates:
            total = accumulated_rates(work.rates, work.momentum)
        else:
            total = work.client_lr * accumulated_steps(work.steps, work.momentum)
        return ClientReport(companions={"control": (work.params - work.row).div_(total).sub_(self._c(work))})

    def commit(self, cohort: Cohort) -> None:
        """``c_i += dc_i`` and ``c += sum_i p_i dc_i`` (Algorithm 1, lines 14, 18), ``p_i = 1 / N`` or ``n_i / n``."""
        changes = cohort.companions.get("control")
        if changes is None:
            raise ValueError(f"companions must hold 'control' rows for SCAFFOLD, found {sorted(cohort.companions)}")
        p = client_vectors.uniform_shares(cohort)
        if self.weighting == "samples":
            p = cohort.sizes / (cohort.sizes.sum() if cohort.num_samples is None else cohort.num_samples)
        c = client_vectors.add_sent(self.c, cohort, changes, p)
        client_vectors.check_vector(c, cohort, changes, _NAME)
        self.c = c
        client_vectors.add_to_own(self.c_i, cohort, changes)

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the control variates, and of the rows in which clients send their change."""
        rows = cohort_size * federation.numel * federation.dtype.itemsize
        return {**super().memory(federation, cohort_size), "control rows": rows}

    def _c(self, work: LocalWork) -> Tensor:
        return torch.zeros_like(work.params) if self.c is None else self.c


def accumulated_steps(steps: int, momentum: float) -> float:
    """Sum of the weights that gradients get in the change of the parameters, in units of the learning rate.

    Plain SGD gives every gradient weight 1. With momentum ``mu``, that of the ``k``-th step from the end has been added
    ``1 + mu + ... + mu^(k - 1)`` times (the normaliser of FedNova, Wang et al., NeurIPS 2020).
    """
    return accumulated_rates([1.0] * steps, momentum)


def accumulated_rates(rates: Sequence[float], momentum: float) -> float:
    """What a constant gradient is multiplied by in the change of the parameters, step by step at these rates."""
    total, weight = 0.0, 0.0
    for rate in rates:
        weight = momentum * weight + 1
        total += rate * weight
    return total
