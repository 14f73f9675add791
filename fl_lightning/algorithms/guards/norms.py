# SPDX-License-Identifier: Apache-2.0
"""Updates are cut to a bound on their length, which is fixed or follows the clients' lengths.

Ziteng Sun, Peter Kairouz, Ananda Theertha Suresh, H. Brendan McMahan: Can You Really Backdoor Federated Learning?
2019, section 4. https://arxiv.org/abs/1911.07963

Galen Andrew, Om Thakkar, H. Brendan McMahan, Swaroop Ramaswamy: Differentially Private Learning with Adaptive Clipping.
NeurIPS 2021, section 2. https://arxiv.org/abs/1905.03871
"""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor

from fl_lightning.algorithms.guards.base import Guard, Verdict
from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.declared import server_state


def clipping(norms: Tensor, bound: float) -> Tensor:
    """Factors ``min(1, bound / norm)`` that bring lengths ``[m]`` to at most ``bound``: float64 on the CPU."""
    norms = norms.cpu().double()
    return torch.where(norms > bound, bound / norms, 1.0)


class NormClipping(Guard):
    """``u_i <- u_i min(1, C / ||u_i||)``: no client moves the model further than ``C``, whatever it sends.

    A rule that rescales rows by itself (FedLF, FedMDFG, FedMGDA+) does without the lengths, so clipping changes little
    there.

    Args:
        bound: the largest norm ``C`` of an update.

    Raises:
        ValueError: ``bound`` is not positive and finite.
    """

    reads = "sums"

    @checked(bound=Bounds(above=0))
    def __init__(self, bound: float) -> None:
        self.bound = bound

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        scale = clipping(cohort.updates.norms(), self.bound)
        return Verdict(scale=scale, scalars={"clipped": float((scale < 1).sum())})


class AdaptiveNormClipping(Guard):
    """Norm clipping whose bound follows a quantile of the norms: ``C <- C exp(-rate (b - quantile))``.

    ``b`` is the share of a round's updates that fit under the bound. The rule is the paper's without its noise. Each
    client counts once, so ``k`` dishonest of ``m`` move ``b`` by at most ``k / m``. The first round sets the bound to
    that quantile of its norms above 0. A round in which all updates are zero does not count.

    Args:
        quantile: share of the updates that should fit under the bound, in (0, 1); the paper's gamma.
        rate: how fast the bound moves; the paper's eta_C.

    Attributes:
        bound: ``C``; 0 before the first round.

    Raises:
        ValueError: an argument is out of range.
    """

    reads = "sums"

    bound = server_state(0.0)

    @checked(quantile=Bounds(above=0, below=1), rate=Bounds(above=0))
    def __init__(self, quantile: float = 0.5, rate: float = 0.2) -> None:
        self.quantile, self.rate = quantile, rate

    def judge(self, cohort: Cohort) -> Verdict:
        """See the class."""
        norms = cohort.updates.norms().cpu()
        above, bound = norms[norms > 0], self.bound
        if bound == 0 and len(above) > 0:
            bound = float(torch.quantile(above, self.quantile, interpolation="lower"))
        share = float((norms <= bound).double().mean())  # b
        self.bound = bound * exp(-self.rate * (share - self.quantile)) if len(above) > 0 else bound
        scale = clipping(norms, bound)
        return Verdict(scale=scale, scalars={"clipped": float((scale < 1).sum()), "bound": bound})
