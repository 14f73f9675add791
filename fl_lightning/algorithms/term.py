# SPDX-License-Identifier: Apache-2.0
"""TERM: Tilted Empirical Risk Minimization, tilted over clients.

Tian Li, Ahmad Beirami, Maziar Sanjabi, Virginia Smith. ICLR 2021. https://arxiv.org/abs/2007.01162
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.weighting import stands_still, weighted_mean
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Needs, Reading, StepReport
from fl_lightning.arguments import Bounds, check_unused, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state


class TERM(ServerRule):
    """Descent on the tilted loss ``1/t log(1/m sum_i exp(t F_i))``, whose gradient weighs clients by ``exp(t F_i)``.

    Exponentials stay in the log domain, so losses of any size are fine. If all rows are zero, the step is zero and
    flagged, and the moving average stays as it is.

    Args:
        t: tilt, positive. Towards infinity the client with the largest loss counts alone; the limit at ``t = 0`` is
            ``FedAvg(weighting="uniform")``.
        reading: how weights are normalised. ``"library"`` divides by their sum over the cohort (the gradient of the
            tilted loss). ``"paper"`` divides by ``m R``: ``R`` is a moving average of the mean of ``exp(t F)`` that
            starts at the first round's. ``"code"``, for comparisons, starts ``R`` at 0, mixes exponentials relative to
            each round's largest loss, and divides by ``m`` once more.
        ema_rate: share of the present round in the moving average, above 0 and up to 1.

    Raises:
        ValueError: an argument is out of range.
    """

    needs = Needs(losses=True)
    reads = "sums"

    log_r = server_state(float)  # log of R

    @checked(t=Bounds(above=0), ema_rate=Bounds(above=0, most=1))
    def __init__(self, t: float = 1.0, reading: Reading = "library", ema_rate: float = 0.5) -> None:
        if reading == "library":
            check_unused("ema_rate of TERM", ema_rate, 0.5, "with reading='library', which has no moving average")
        self.t, self.reading, self.ema_rate = t, reading, ema_rate
        self.averages = reading == "library"

    def aggregate(self, cohort: Cohort) -> Tensor:
        """Returns ``sum_i c_i u_i`` with ``c_i`` proportional to ``exp(t F_i)``."""
        losses, m = cohort.known_losses, len(cohort)
        tilted = self.t * (losses - losses.max() if self.reading != "paper" else losses)
        log_r = self._moving_average(float(torch.logsumexp(tilted, 0)) - math.log(m))
        averaged = (tilted - log_r).exp() / (m if self.reading == "paper" else m * m)
        weights = torch.softmax(tilted, 0) if self.reading == "library" else averaged
        step = weighted_mean(cohort, weights)
        self.report = StepReport(weights=weights, flagged=stands_still(cohort))
        if not self.report.flagged and self.reading != "library":
            self.log_r = log_r
        return step

    def _moving_average(self, log_mean: float) -> float:
        """``log((1 - l) R + l exp(log_mean))``."""
        share = math.log(self.ema_rate)
        if self.log_r is None:
            return log_mean + share if self.reading == "code" else log_mean
        if self.ema_rate == 1:
            return log_mean
        past, new = math.log1p(-self.ema_rate) + self.log_r, share + log_mean
        return max(past, new) + math.log1p(math.exp(-abs(past - new)))
