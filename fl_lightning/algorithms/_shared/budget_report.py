# SPDX-License-Identifier: Apache-2.0
"""What a fit under disparity budgets came to: the disparities themselves beside the surrogates it was trained on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fl_lightning.algorithms._shared.disparity import PREDICTED, SCORES
from fl_lightning.algorithms.records import State
from fl_lightning.core.cohort import Cohort

_SHOWN = 10


class Measured(NamedTuple):
    """A client's disparities on its training data in its last round; NaN where it lacks one of the groups."""

    surrogate: float
    true: float


class BudgetReport:
    """Remembers what clients last reported.

    Args:
        method: whose report it is.
        notion: which disparity.

    Attributes:
        clients: the last report of every client, by id.
        lowest: the lowest score that any sample had in any round.
    """

    def __init__(self, method: str, notion: str) -> None:
        self._method, self._notion = method, notion
        self.clients: dict[int, Measured] = {}
        self.lowest = math.inf

    def note(self, cohort: Cohort, surrogates: Tensor) -> Tensor | None:
        """Takes a round's reports.

        Args:
            cohort: the round.
            surrogates: ``[m]``.

        Returns:
            ``[m]`` the true disparities; ``None`` if the clients have not counted their predictions.
        """
        predicted, scores = cohort.extras.get(PREDICTED), cohort.extras.get(SCORES)
        if predicted is None or scores is None:
            return None
        rates = predicted[:, 0] / predicted[:, 1]  # 0 / 0 is NaN
        true = (rates[:, 1] - rates[:, 0]).abs().cpu()
        both = zip(surrogates.tolist(), true.tolist(), strict=True)
        self.clients |= {client: Measured(*pair) for client, pair in zip(cohort.client_ids, both, strict=True)}
        self.lowest = min(self.lowest, float(scores[:, 0].min()))
        return true

    def conclude(self, budget_of: Callable[[int], float]) -> str | None:
        """One line about how the budgets were kept; warns of clients above theirs, and of scores that are no logits.

        Args:
            budget_of: a client's budget.
        """
        known = {client: found for client, found in self.clients.items() if not math.isnan(found.true)}
        if not known:
            return None
        if self.lowest >= 0:
            warnings.warn(
                f"federated_groups never returned a negative score, so class 1 was predicted for every sample and the "
                f"disparities of {self._method} mean nothing: return logits, which are positive where class 1 is "
                "predicted and negative elsewhere",
                stacklevel=2,
            )
        above = {client: found.true - budget_of(client) for client, found in known.items()}
        order = sorted(above, key=lambda client: -above[client])
        exceeded = [client for client in order if above[client] > 0]
        if exceeded:
            worst = order[0]
            warnings.warn(
                f"{self._method} ended above its budget for {len(exceeded)} of {len(known)} clients: that of client "
                f"{worst} is {budget_of(worst):g}, its disparity on training data {known[worst].true:.4f} (the "
                f"surrogate that is trained on: {known[worst].surrogate:.4f}). Train for more rounds, raise sharpness, "
                "or lower the budget",
                stacklevel=2,
            )
        shown = "; ".join(
            f"client {client}: {budget_of(client):g}, {known[client].surrogate:.4f}, {known[client].true:.4f}"
            for client in order[:_SHOWN]
        )
        which = f" (the {_SHOWN} of {len(order)} clients with the largest excess)" if len(order) > _SHOWN else ""
        return (
            f"{self._method}: budget, surrogate and true disparity ({self._notion}) on the training data, at the start "
            f"of each client's last round{which}: {shown}"
        )

    def reset(self) -> None:
        """Forgets all clients."""
        self.clients, self.lowest = {}, math.inf

    def state_dict(self) -> State:
        """The last reports."""
        return {"clients": {client: list(found) for client, found in self.clients.items()}, "lowest": self.lowest}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.clients = {int(client): Measured(*found) for client, found in state["clients"].items()}
        self.lowest = state["lowest"]
