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

from fl_lightning.algorithms._shared.weighting import nonnegative_losses, shares, stands_still, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, Needs, State, StepReport
from fl_lightning.arguments import checked
from fl_lightning.core.cohort import Cohort
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
      client counts as one without a loss; weights are over the clients seen so far.
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
    column_state = ()
    averages = True

    @checked()
    def __init__(self, setting: Setting = "device", response: Response = "gumbel") -> None:
        self.setting, self.response = setting, response
        self._rounds = 0
        self._gains: dict[int, float] = {}  # "device": by client, minus the sum of its gradients, up to what all share
        self._ids: list[int] = []  # else: the clients behind the entries of the tensors
        self._gradient = torch.zeros(0, dtype=torch.float64)
        self._outer = torch.zeros(0, 0, dtype=torch.float64)
        self._decision = torch.zeros(0, dtype=torch.float64)  # p of the last round

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i p_i u_i``, with weights that this round's losses have a say in.

        Raises:
            ValueError: the cohort has no losses, a loss is negative, or a row is not finite.
        """
        ratios = shares(nonnegative_losses(cohort, "AAggFF")) * len(cohort)  # beside their mean
        responses = RESPONSES[self.response](ratios)
        before, counts = self.state_dict(), False
        try:
            weights = (self._entropic if self.setting == "device" else self._quadratic)(cohort, responses)
            step = weighted_mean(cohort, weights)
            counts = not stands_still(cohort)
        finally:
            if not counts:
                self.load_state_dict(before)
        self._rounds += counts
        self.report = StepReport(weights=weights, flagged=not counts)
        return step

    def _entropic(self, cohort: Cohort, responses: Tensor) -> Tensor:
        """Algorithm 3, without what is the same for all clients, which a softmax does not see."""
        clients = cohort.num_clients or len(self._gains.keys() | set(cohort.client_ids))
        rate = len(cohort) / clients  # C
        r = rate * responses
        # Doubly robust: absent clients count as the mean, present ones as the mean plus (r_i - mean) / C.
        gains = (r - r.mean()) / rate / (1 + r.mean())
        self._gains = dict(self._gains)
        for client, gain in zip(cohort.client_ids, gains.tolist(), strict=True):
            self._gains[client] = self._gains.get(client, 0.0) + gain
        scale = math.sqrt(math.log(clients)) / math.sqrt(self._rounds + 1) / (2 + rate)
        gathered = torch.tensor([self._gains[client] for client in cohort.client_ids], dtype=torch.float64)
        return torch.softmax(scale * gathered, 0)

    def _quadratic(self, cohort: Cohort, responses: Tensor) -> Tensor:
        """Algorithm 2, or the online Newton step of Hazan, Introduction to Online Convex Optimization, chapter 4."""
        self._admit(cohort)
        k = len(self._ids)
        present = [self._ids.index(client) for client in cohort.client_ids]
        r = torch.zeros(k, dtype=torch.float64)
        r[present] = responses / k
        gradient = -r / (1 + self._decision @ r)
        self._gradient = self._gradient + gradient
        self._outer = self._outer + torch.outer(gradient, gradient)
        if self.setting == "newton":  # A = epsilon I + sum g g'; the nearest point to p - A^-1 g / gamma by A's norm
            curvature = EPSILON * torch.eye(k).double() + self._outer
            self._decision = _least_on_simplex(curvature, gradient / GAMMA - curvature @ self._decision, EPSILON)
        else:  # beta / 2 p' (alpha I + sum g g') p + alpha / 2 |p|^2 + sum g . p, with beta = 1 / (4 L)
            curvature = k / 4 * (RIDGE * torch.eye(k).double() + self._outer) + RIDGE * torch.eye(k).double()
            self._decision = _least_on_simplex(curvature, self._gradient, RIDGE)
        return shares(self._decision[present])

    def _admit(self, cohort: Cohort) -> None:
        """Clients that are new get the mean weight of those known, and no history."""
        new = [client for client in cohort.client_ids if client not in self._ids]
        if not new:
            return
        k, total = len(self._ids), len(self._ids) + len(new)
        self._ids = self._ids + new
        wide = torch.zeros(total, total, dtype=torch.float64)
        wide[:k, :k] = self._outer
        self._outer = wide
        self._gradient = torch.nn.functional.pad(self._gradient, (0, len(new)))
        fresh = torch.full((len(new),), 1 / total, dtype=torch.float64)
        self._decision = torch.cat([self._decision * (k / total), fresh])

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the curvature, but with ``"device"``."""
        k = federation.num_clients
        return {} if self.setting == "device" else {"decisions (CPU)": 8 * (k * k + 2 * k)}

    def reset(self) -> None:
        """Forgets all rounds."""
        fresh = type(self)(self.setting, self.response)
        self.load_state_dict(fresh.state_dict())
        self.report = StepReport()

    def state_dict(self) -> State:
        """Rounds, and what they say about each client."""
        return {
            "rounds": self._rounds,
            "gains": dict(self._gains),
            "clients": torch.tensor(self._ids, dtype=torch.int64),
            "gradient": self._gradient,
            "outer": self._outer,
            "decision": self._decision,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._rounds = int(state["rounds"])
        self._gains = {int(client): float(gain) for client, gain in state["gains"].items()}
        self._ids = state["clients"].tolist()
        self._gradient, self._outer, self._decision = (
            state[name].clone() for name in ("gradient", "outer", "decision")
        )


def _least_on_simplex(curvature: Tensor, slope: Tensor, ridge: float) -> Tensor:
    """The point of the unit simplex with the least ``p' Q p / 2 + s . p``; ``Q - ridge I`` is positive semi-definite.

    On the simplex ``s . p`` is the quadratic form of ``s 1'``, and numbers added to all entries change nothing. With
    enough of them the sum is a Gram matrix.
    """
    s = slope - slope.mean()
    enough = float(s @ s) / ridge
    return min_norm(curvature + s[:, None] + s[None, :] + enough)
