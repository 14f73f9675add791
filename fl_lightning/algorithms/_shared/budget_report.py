# SPDX-License-Identifier: Apache-2.0
"""What a fit under disparity budgets came to: the disparities themselves beside the surrogates it was trained on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping

from torch import Tensor

from fl_lightning.algorithms._shared.disparity import PREDICTED, SCORES
from fl_lightning.core.cohort import Cohort

_SHOWN = 10


def true_disparities(cohort: Cohort) -> Tensor | None:
    """``[m]`` disparities of what the clients predict, NaN where one lacks a group; ``None`` if none has counted."""
    predicted = cohort.extras.get(PREDICTED)
    if predicted is None or SCORES not in cohort.extras:
        return None
    rates = predicted[:, 0] / predicted[:, 1]  # 0 / 0 is NaN
    return (rates[:, 1] - rates[:, 0]).abs().cpu()


def lowest_score(cohort: Cohort) -> float:
    """The lowest score that any sample of the round had."""
    return float(cohort.extras[SCORES][:, 0].min())


def conclusion(
    method: str,
    notion: str,
    surrogates: Mapping[int, float],
    true: Mapping[int, float],
    lowest: float,
    budget_of: Callable[[int], float],
) -> str | None:
    """One line about how the budgets were kept; warns of clients above theirs, and of scores that are no logits.

    Args:
        method: whose report it is.
        notion: which disparity.
        surrogates: of the clients that have reported, by id, on their training data in their last round.
        true: likewise the disparities themselves; NaN where a client lacks one of the groups.
        lowest: the lowest score that any sample had in any round.
        budget_of: a client's budget.
    """
    known = {client: found for client, found in true.items() if not math.isnan(found)}
    if not known:
        return None
    if lowest >= 0:
        warnings.warn(
            f"federated_groups never returned a negative score, so class 1 was predicted for every sample and the "
            f"disparities of {method} mean nothing: return logits, which are positive where class 1 is "
            "predicted and negative elsewhere",
            stacklevel=2,
        )
    above = {client: found - budget_of(client) for client, found in known.items()}
    order = sorted(above, key=lambda client: -above[client])
    exceeded = [client for client in order if above[client] > 0]
    if exceeded:
        worst = order[0]
        warnings.warn(
            f"{method} ended above its budget for {len(exceeded)} of {len(known)} clients: that of client "
            f"{worst} is {budget_of(worst):g}, its disparity on training data {known[worst]:.4f} (the "
            f"surrogate that is trained on: {surrogates[worst]:.4f}). Train for more rounds, raise sharpness, "
            "or lower the budget",
            stacklevel=2,
        )
    shown = "; ".join(
        f"client {client}: {budget_of(client):g}, {surrogates[client]:.4f}, {known[client]:.4f}"
        for client in order[:_SHOWN]
    )
    which = f" (the {_SHOWN} of {len(order)} clients with the largest excess)" if len(order) > _SHOWN else ""
    return (
        f"{method}: budget, surrogate and true disparity ({notion}) on the training data, at the start "
        f"of each client's last round{which}: {shown}"
    )
