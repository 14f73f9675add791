# SPDX-License-Identifier: Apache-2.0
"""TERM: Tilted Empirical Risk Minimization, tilted over clients.

Tian Li, Ahmad Beirami, Maziar Sanjabi, Virginia Smith. ICLR 2021. https://arxiv.org/abs/2007.01162
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import stands_still, weighted_mean
from fl_lightning.algorithms.base import Needs, ServerRule, State, StepReport
from fl_lightning.core.cohort import Cohort


class TERM(ServerRule):
    """Descent on the tilted loss ``1/t log(1/m sum_i exp(t F_i))``, whose gradient weighs clients by ``exp(t F_i)``.

    Exponentials stay in the log domain, so losses of any size are fine. If all rows are zero, the step is zero and
    flagged, and the moving average stays as it is.

    Args:
        t: tilt, positive; towards 0 the uniform mean, towards infinity the client with the largest loss alone.
        normalise: ``"softmax"`` divides the weights by their sum over the cohort (the gradient of the tilted loss);
            ``"ema_paper"`` by ``m R`` with ``R`` a moving average of the mean of ``exp(t F)`` over rounds (the
            paper's stochastic algorithm), which starts at the first round's; ``"reference"`` is the authors' code, for
            comparisons: its ``R`` starts at 0 and mixes exponentials relative to each round's largest loss, and the
            weights are divided by ``m`` once more.
        ema_rate: share of the present round in the moving average, above 0 and up to 1.

    Raises:
        ValueError: ``t`` or ``ema_rate`` is out of range, or ``normalise`` unknown.
    """

    needs = Needs(losses=True)

    def __init__(
        self, t: float = 1.0, normalise: Literal["softmax", "ema_paper", "reference"] = "softmax", ema_rate: float = 0.5
    ) -> None:
        if not 0 < t < math.inf:
            raise ValueError(f"t of TERM must be positive and finite, found {t}; FedAvg('uniform') is its limit at 0")
        if not 0 < ema_rate <= 1:
            raise ValueError(f"ema_rate of TERM must be above 0 and at most 1, found {ema_rate}")
        if normalise not in ("softmax", "ema_paper", "reference"):
            raise ValueError(f"normalise of TERM must be 'softmax', 'ema_paper' or 'reference', found {normalise!r}")
        self.t, self.normalise, self.ema_rate = t, normalise, ema_rate
        self.averages = normalise == "softmax"
        self._log_r: float | None = None  # log of R

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i c_i u_i`` with ``c_i`` proportional to ``exp(t F_i)``.

        Raises:
            ValueError: the cohort has no losses, or a row is not finite.
        """
        losses, m = cohort.known_losses.cpu(), len(cohort)
        tilted = self.t * (losses - losses.max() if self.normalise != "ema_paper" else losses)
        log_r = self._moving_average(float(torch.logsumexp(tilted, 0)) - math.log(m))
        if self.normalise == "softmax":
            weights = torch.softmax(tilted, 0)
        else:
            weights = (tilted - log_r).exp() / (m if self.normalise == "ema_paper" else m * m)
        step = weighted_mean(cohort, weights)
        still = stands_still(cohort, step)
        if not still and self.normalise != "softmax":
            self._log_r = log_r
        self.report = StepReport(weights=weights, flagged=still)
        return step

    def _moving_average(self, log_mean: float) -> float:
        """``log((1 - l) R + l exp(log_mean))``."""
        share = math.log(self.ema_rate)
        if self._log_r is None:
            return log_mean + share if self.normalise == "reference" else log_mean
        if self.ema_rate == 1:
            return log_mean
        kept, new = math.log1p(-self.ema_rate) + self._log_r, share + log_mean
        return max(kept, new) + math.log1p(math.exp(-abs(kept - new)))

    def reset(self) -> None:
        """Forgets the moving average."""
        self._log_r = None
        self.report = StepReport()

    def state_dict(self) -> State:
        """The moving average, if there is one."""
        return {} if self._log_r is None else {"log_r": self._log_r}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._log_r = float(state["log_r"]) if "log_r" in state else None
