# SPDX-License-Identifier: Apache-2.0
"""FedHEAL: Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity.

Yuhang Chen, Wenke Huang, Mang Ye. CVPR 2024. https://github.com/yuhangchen0/FedHEAL
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil, floor
from typing import Literal

import torch
from torch import Tensor

from fl_lightning import ops
from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms._shared.weighting import data_weights, uniform_weights
from fl_lightning.algorithms.base import ServerRule
from fl_lightning.algorithms.records import Federation, StepReport
from fl_lightning.arguments import Bounds, check_unused, checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.per_client import per_client
from fl_lightning.core.updates import UpdateMatrix

_WIDER = {torch.uint8: torch.int16, torch.int16: torch.int32}


class FedHEAL(ServerRule):
    """Filters each client's update coordinate by coordinate, and weighs clients by how far they still move.

    FPHL (equations 5 to 9): a coordinate of a client's update counts only if it points the way that this client's
    updates mostly pointed in earlier rounds. FAEL (equations 10 to 12): clients with long filtered updates gain weight.
    It needs nothing but updates, so it combines with methods that change local training:
    ``FederatedStrategy(FedHEAL(), client=SCAFFOLD())``.

    A coordinate that no client keeps does not move, and a round without any movement counts for nothing. A client seen
    for the first time keeps everything; its weight starts at the mean of the others'. Absent clients keep counts and
    weights. The filter counts in integers, one count of increases per client and coordinate, so ties at ``tau`` are
    decided exactly.

    Args:
        tau: consistency that a coordinate needs, between 0 and 1; read as the decimal it is written as.
        beta: how fast weights follow the lengths, between 0 and 1.
        filter_updates: FPHL on or off.
        adapt_weights: FAEL on or off; off leaves the initial weights.
        reading: whose form four steps take, as docs/methods/fedheal.md lists: the authors' code's (equations 5 to 9) or
            the paper's (Algorithm 1, equations 3, 11 and 12).

    Raises:
        ValueError: ``tau`` is not strictly between 0 and 1, or ``beta`` not between them.
    """

    reads = "rows"
    averages = True

    counts = per_client(Tensor, dtype=torch.uint8)  # t_m l_m: rounds in which a coordinate rose
    rounds = per_client(int)  # t_m: rounds that the client took part in
    weights = per_client(float)  # p_m
    gains = per_client(float)  # Delta p_m

    @checked(tau=Bounds(above=0, below=1), beta=Bounds(0, 1))
    def __init__(
        self,
        tau: float = 0.3,
        beta: float = 0.4,
        filter_updates: bool = True,
        adapt_weights: bool = True,
        reading: Literal["code", "paper"] = "code",
    ) -> None:
        if not filter_updates:
            check_unused("tau of FedHEAL", tau, 0.3, "with filter_updates=False")
        if not adapt_weights:
            check_unused("beta of FedHEAL", beta, 0.4, "with adapt_weights=False")
        self.tau, self.beta = Fraction(str(tau)), float(beta)  # weights go into checkpoints, as Python's numbers
        self.filter_updates, self.adapt_weights, self.reading = filter_updates, adapt_weights, reading
        self._counts_round_in = self._weighs_by_samples = self._renormalises = self._squares_norms = reading == "paper"

    def aggregate(self, cohort: Cohort) -> Tensor:
        """See the class.

        Raises:
            ValueError: a row is not finite; nothing is counted then.
        """
        updates, lengths = cohort.updates, cohort.updates.norms()
        require_finite(torch.isfinite(lengths), cohort, "FedHEAL")
        if not bool(lengths.any()):
            self.report = StepReport(weights=uniform_weights(cohort), flagged=True, scalars={"kept_share": 1.0})
            return torch.zeros_like(cohort.params)
        keep, norms = [], []
        for place, client in enumerate(cohort.client_ids):
            mask, squares = self._filter(client, place, updates)  # M_m and ||M_m * Delta_m||^2 per tensor
            keep.append(mask)
            norms.append(squares.sum() if self._squares_norms else squares.sqrt().sum())
        p = self._weigh(cohort, torch.stack(norms).cpu())
        bits = torch.stack(keep)
        updates.columns.note(p)
        step = ops.puc_combine(updates.rows, bits, p)  # equations 8 and 9
        kept_share = updates.columns.count(_ones(bits)) / (len(cohort) * updates.layout.numel)
        self.report = StepReport(weights=p, scalars={"kept_share": kept_share})
        return step

    def _filter(self, client: int, place: int, updates: UpdateMatrix) -> tuple[Tensor, Tensor]:
        """Equations 5 to 7: keep bits of one client, and the squared norms of what is kept."""
        counts, t = self.counts.get(client), self.rounds.get(client, 0)
        if counts is None or not self.filter_updates:
            counts = torch.zeros_like(updates.rows[place], dtype=torch.uint8)
        elif t + 1 > torch.iinfo(counts.dtype).max:
            counts = counts.to(_WIDER[counts.dtype])
        else:
            counts = counts.clone()
        if not self.filter_updates:
            return updates.puc_track(place, counts, threshold=0, participations=0)
        bits, squares = updates.puc_track(place, counts, self._threshold(t), t)  # counts this round in, too
        self.counts[client], self.rounds[client] = counts, t + 1
        return bits, squares

    def _threshold(self, t: int) -> int:
        """Fewest earlier rounds, of ``t``, that must agree with this one."""
        if self._counts_round_in:
            return max(0, ceil(self.tau * (t + 1)) - 1)
        return 0 if t == 0 else floor(self.tau * t) + 1

    def _weigh(self, cohort: Cohort, distance: Tensor) -> Tensor:
        """Equation 12: weights ``[m]`` of the participants, summing to 1."""
        start = data_weights(cohort) if self._weighs_by_samples else uniform_weights(cohort)
        if not self.adapt_weights:
            return start.cpu()
        ids, m = cohort.client_ids, len(cohort)
        mean = sum(self.weights.values()) / len(self.weights) if self.weights else 1 / m
        shares = distance / distance.sum() if distance.sum() > 0 else torch.full_like(distance, 1 / m)
        for client, first, share in zip(ids, (start * m).tolist(), shares.tolist(), strict=True):
            before, gain = self.weights.get(client, mean * first), self.gains.get(client, 0.0)
            self.gains[client] = (1 - self.beta) * gain + self.beta * share
            self.weights[client] = before + self.gains[client]
        if self._renormalises:
            everyone = sum(self.weights.values())
            self.weights.update({client: weight / everyone for client, weight in self.weights.items()})
        p = self.weights.vector(ids, 0.0)
        return p / p.sum()

    def sign_consistency(self, client_id: int) -> Tensor:
        """How often the coordinates of a client's updates had the same sign so far (section 3.2 of the paper).

        Returns:
            ``[n]`` float32: the share of rounds in which a coordinate had its more frequent sign, in [0.5, 1].

        Raises:
            KeyError: the client has not taken part yet, or the filter is off.
        """
        share = self.counts[client_id] / self.rounds[client_id]
        return torch.maximum(share, 1 - share)

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """One byte per coordinate and client; two from a client's 255th round on."""
        return super().memory(federation, cohort_size) if self.filter_updates else {}


def _ones(words: Tensor) -> Tensor:
    """How many bits of int32 words are set."""
    bits = words.to(torch.int64) & 0xFFFFFFFF
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        bits = (bits & mask) + ((bits >> shift) & mask)  # sums of neighbouring bits, pairs, nibbles, ...
    return bits.sum()
