# SPDX-License-Identifier: Apache-2.0
"""AAggFF: Pursuing Overall Welfare in Federated Learning through Sequential Decision Making.

Seok-Ju Hahn, Gi-Soo Kim, Junghye Lee. ICML 2024. https://arxiv.org/abs/2405.20821
https://github.com/vaseline555/AAggFF
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms._shared.weighting import (
    nonnegative_losses,
    shares,
    stands_still,
    uniform_weights,
    weighted_mean,
)
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, Needs, StepReport
from fl_lightning.arguments import checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.ops.solvers import min_norm

Response = Literal["weibull", "exponential", "frechet", "normal", "gumbel", "logistic"]
RESPONSES: dict[Response, Callable[[Tensor], Tensor]] = {  # equation 8: distribution functions, all with scale 1
    "weibull": lambda x: -torch.expm1(-x.square()),
    "exponential": lambda x: -torch.expm1(-x),
    "frechet": lambda x: torch.exp(-1 / x),
    "normal": lambda x: torch.special.ndtr(x - 1),
    "gumbel": lambda x: torch.exp(-torch.exp(1 - x)),
    "logistic": lambda x: torch.sigmoid(x - 1),
}
Setting = Literal["device", "silo", "newton"]
RIDGE = 4.0  # alpha = 4 K L of the quadratic penalty, with the Lipschitz constant L = 1 / K of the responses
# Of the online Newton step. Decision losses are 1-exp-concave, and their gradients at most 1 / sqrt(K) long, on a set
# of diameter sqrt(2): gamma = min(1 / (G D), 1) / 2 and epsilon = 1 / (gamma D)^2.
GAMMA, EPSILON = 0.5, 2.0


class AAggFF(ServerRule):
    """Decides the clients' weights round by round, as an investor divides capital: losses are the returns.

    The decision loss of weights ``p`` under responses ``r`` is ``-log(1 + p . r)`` (equation 4). Responses are the
    clients' losses beside the mean of the round's, bent to (0, 1) by a distribution function (equation 8). The next
    weights minimise the losses of all rounds so far, in one of two approximations:

    - ``"device"``: linear, with an entropy penalty (Algorithm 3). Weights are a softmax of what a client's responses
      exceeded the rounds' means by, in all rounds in which it took part. Few clients may take part in a round.
    - ``"silo"``: by quadratic forms, with a quadratic penalty, as the authors' code has it (Algorithm 2). An absent
      client counts as one without a loss, also one that is gone; weights are over the clients seen so far.
    - ``"newton"``: as ``"silo"``, by the online Newton step of textbooks, which gives up the penalty sooner: weights
      come nearer to the best ones, and leave equal weights faster.

    The weights of the round's clients are then divided by their sum (equation 95). If all rows are zero, the step is
    zero, flagged, and nothing changes. Without ``num_clients`` in the cohort, the clients seen so far count as all.

    Args:
        setting: see above.
        response: the distribution function; all have scale 1, and location 1 where they have one.

    Raises:
        ValueError: an argument is none of the above.
    """

    needs = Needs(losses=True)
    reads = "sums"
    averages = True

    rounds = server_state(0)
    gains = per_client(float)  # "device": minus the sum of a client's gradients, up to what all share
    clients = server_state(torch.zeros(0, dtype=torch.int64), ids=True)  # else: those behind the entries of the tensors
    gradient = server_state(torch.zeros(0, dtype=torch.float64))
    outer = server_state(torch.zeros(0, 0, dtype=torch.float64))
    decision = server_state(torch.zeros(0, dtype=torch.float64))  # p of the last round

    @checked()
    def __init__(self, setting: Setting = "device", response: Response = "gumbel") -> None:
        self.setting, self.response = setting, response

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i p_i u_i``, with weights that this round's losses have a say in."""
        ratios = shares(nonnegative_losses(cohort, "AAggFF")) * len(cohort)  # beside their mean
        responses = RESPONSES[self.response](ratios)
        require_finite(cohort.updates.norms().isfinite(), cohort, "AAggFF")
        if stands_still(cohort):
            self.report = StepReport(weights=uniform_weights(cohort), flagged=True)
            return torch.zeros_like(cohort.params)
        weights = (self._entropic if self.setting == "device" else self._quadratic)(cohort, responses)
        self.rounds += 1
        self.report = StepReport(weights=weights)
        return weighted_mean(cohort, weights)

    def _entropic(self, cohort: Cohort, responses: Tensor) -> Tensor:
        """Algorithm 3, without what is the same for all clients, which a softmax does not see."""
        clients = cohort.num_clients or len(self.gains.keys() | set(cohort.client_ids))
        rate = len(cohort) / clients  # C
        r = rate * responses
        # Doubly robust: absent clients count as the mean, present ones as the mean plus (r_i - mean) / C.
        gains = (r - r.mean()) / rate / (1 + r.mean())
        for client, gain in zip(cohort.client_ids, gains.tolist(), strict=True):
            self.gains[client] = self.gains.get(client, 0.0) + gain
        scale = math.sqrt(math.log(clients)) / math.sqrt(self.rounds + 1) / (2 + rate)
        return torch.softmax(scale * self.gains.vector(cohort.client_ids, 0.0), 0)

    def _quadratic(self, cohort: Cohort, responses: Tensor) -> Tensor:
        """Algorithm 2, or the online Newton step of Hazan, Introduction to Online Convex Optimization, chapter 4."""
        self._admit(cohort)
        ids = self.clients.tolist()
        k, present = len(ids), [ids.index(client) for client in cohort.client_ids]
        r = torch.zeros(k, dtype=torch.float64)
        r[present] = responses / k
        gradient = -r / (1 + self.decision @ r)
        self.gradient = self.gradient + gradient
        self.outer = self.outer + torch.outer(gradient, gradient)
        if self.setting == "newton":  # A = epsilon I + sum g g'; the nearest point to p - A^-1 g / gamma by A's norm
            curvature = EPSILON * torch.eye(k).double() + self.outer
            self.decision = _least_on_simplex(curvature, gradient / GAMMA - curvature @ self.decision, EPSILON)
        else:  # beta / 2 p' (alpha I + sum g g') p + alpha / 2 |p|^2 + sum g . p, with beta = 1 / (4 L)
            curvature = k / 4 * (RIDGE * torch.eye(k).double() + self.outer) + RIDGE * torch.eye(k).double()
            self.decision = _least_on_simplex(curvature, self.gradient, RIDGE)
        return shares(self.decision[present])

    def _admit(self, cohort: Cohort) -> None:
        """Clients that are new get the mean weight of those known, and no history."""
        ids = self.clients.tolist()
        new = [client for client in cohort.client_ids if client not in ids]
        if not new:
            return
        k, total = len(ids), len(ids) + len(new)
        self.clients = torch.tensor(ids + new, dtype=torch.int64)
        wide = torch.zeros(total, total, dtype=torch.float64)
        wide[:k, :k] = self.outer
        self.outer = wide
        self.gradient = torch.nn.functional.pad(self.gradient, (0, len(new)))
        fresh = torch.full((len(new),), 1 / total, dtype=torch.float64)
        self.decision = torch.cat([self.decision * (k / total), fresh])

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the curvature, but with ``"device"``."""
        k = federation.num_clients
        return {} if self.setting == "device" else {"decisions (CPU)": 8 * (k * k + 2 * k)}


def _least_on_simplex(curvature: Tensor, slope: Tensor, ridge: float) -> Tensor:
    """The point of the unit simplex with the least ``p' Q p / 2 + s . p``; ``Q - ridge I`` is positive semi-definite.

    On the simplex ``s . p`` is the quadratic form of ``s 1'``, and numbers added to all entries change nothing. With
    enough of them the sum is a Gram matrix.
    """
    s = slope - slope.mean()
    enough = float(s @ s) / ridge
    return min_norm(curvature + s[:, None] + s[None, :] + enough)
