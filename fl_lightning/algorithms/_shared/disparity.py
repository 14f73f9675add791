# SPDX-License-Identifier: Apache-2.0
"""Differentiable disparities between groups, measured by each client on all of its data (FCFL and its baselines).

With ``u`` the prediction of a sample, the disparity ``g`` is the largest mean of ``u`` in a group less the smallest
one, taken over all samples for demographic parity and over those with label 1 for equal opportunity. Training replaces
the indicator ``u = 1[z > 0]`` of a score ``z`` by ``sigmoid(c z)``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.groups import GroupScores, group_scores
from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.metrics.group_frame import rates

Notion = Literal["dp", "eo"]
NAME = "disparity"
PREDICTED = "group_predictions"  # [2, A]: predicted 1, and samples, of each group
SCORES = "score_range"  # [2]: lowest and highest score


class Disparities(ClientRule):
    """Reports ``g`` at the global parameters, and the learning rate times its gradient as a companion row.

    Also what the model predicts for the groups, without a surrogate: how many of each are predicted 1, of how many, and
    the lowest and the highest score.

    Groups without samples (for ``"eo"``: with label 1) are left out. A client with fewer than two others has no
    disparity: it reports NaN and a row of zeros, with a warning. At ``g = 0`` the sub-gradient 0 is taken, and where
    several groups have the same extreme mean, that of one of them.
    """

    needs = Needs(groups=True, client_lr=True)
    undefined_extras = (NAME,)

    def __init__(self, method: str, notion: Notion, sharpness: float, num_groups: int = 2) -> None:
        self.method, self.notion, self.sharpness, self.num_groups = method, notion, sharpness, num_groups
        self._report = ClientReport()

    def refusal(self, server: ServerRule) -> str | None:
        """Only FCFL and FairReg read disparities."""
        if isinstance(server.client_rule(), Disparities):
            return None
        return f"reports disparities, and {type(server).__name__} reads none: leave client out"

    def begin_client(self, work: LocalWork) -> None:
        """Passes over the client's data once."""
        if work.batches is None or work.client_lr is None:
            raise ValueError("batches and client_lr of the client's work must be given to measure a disparity")
        sums = torch.zeros(self.num_groups, dtype=torch.float64)
        counts, predicted = [0] * self.num_groups, [0] * self.num_groups
        ranges = list[Tensor]()
        gradients = work.params.new_zeros(self.num_groups, work.layout.numel)
        for batch, _ in work.batches():
            with work.forward_context():
                asked = group_scores(work.module, batch, self.num_groups)
            soft = torch.sigmoid(self.sharpness * _single(asked.scores))
            hard = asked.scores.detach()
            if len(hard) > 0:  # a module may leave people out
                ranges.append(torch.stack(hard.aminmax()).double().cpu())
            for group, chosen in enumerate(counted_groups(asked, self.notion, self.num_groups)):
                number = int(chosen.sum())
                if number == 0:
                    continue
                total = (soft * chosen).sum()
                counts[group] += number
                predicted[group] += int((chosen & (hard > 0)).sum())
                sums[group] += total.detach().cpu()
                parts = torch.autograd.grad(total, work.parameters, retain_graph=True, allow_unused=True)
                for view, part in zip(work.layout.views(gradients[group]), parts, strict=True):
                    if part is not None:
                        view.add_(part)
        report = self._reported(work, sums, counts, gradients)
        seen = torch.stack(ranges) if ranges else torch.zeros(1, 2, dtype=torch.float64)
        told = {
            PREDICTED: torch.tensor([predicted, counts], dtype=torch.float64),
            SCORES: torch.stack([seen[:, 0].min(), seen[:, 1].max()]),
        }
        self._report = replace(report, extras={**report.extras, **told})

    def _reported(self, work: LocalWork, sums: Tensor, counts: list[int], gradients: Tensor) -> ClientReport:
        assert work.client_lr is not None
        held = [group for group, count in enumerate(counts) if count]
        if len(held) < 2:
            those = "samples" if self.notion == "dp" else "samples with label 1"
            warnings.warn(
                f"client {work.client_id} has {those} of fewer than two groups, {counts} of each: its disparity is "
                "undefined",
                stacklevel=2,
            )
            undefined = torch.full((), torch.nan, dtype=torch.float64)
            return ClientReport({NAME: undefined}, {NAME: torch.zeros_like(work.params)})
        means = sums / torch.tensor(counts)
        # In the order of their numbers, so that it does not matter for the rounding which mean is larger.
        first, second = sorted((held[int(means[held].argmin())], held[int(means[held].argmax())]))
        gap = means[second] - means[first]
        factor = work.client_lr * float(gap.sign())
        row = torch.sub(gradients[second] * (factor / counts[second]), gradients[first], alpha=factor / counts[first])
        return ClientReport({NAME: gap.abs()}, {NAME: row})

    def end_client(self, work: LocalWork) -> ClientReport:
        """What was measured at the global parameters."""
        return self._report

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes of the gradients per group of one client, and of the cohort's rows."""
        size = federation.dtype.itemsize
        rows = cohort_size * federation.numel * size
        return {"group_gradients": self.num_groups * federation.layout.numel * size, "disparity_rows": rows}


def reported_disparities(cohort: Cohort, method: str) -> tuple[Tensor, UpdateMatrix]:
    """``[m]`` disparities on the CPU, NaN where undefined, and their rows, as :class:`Disparities` sent them."""
    values, rows = cohort.extras.get(NAME), cohort.companions.get(NAME)
    if values is None or rows is None:
        raise ValueError(f"extras and companions must hold {NAME!r} for {method}: its clients report their disparity")
    if values.shape != (len(cohort),) or bool(((values < 0) | (values > 1)).any()):
        raise ValueError(
            f"extras[{NAME!r}] must be {len(cohort)} numbers from 0 to 1, NaN if undefined, found {values.tolist()}"
        )
    return values.cpu(), rows


def disparity_gram(cohort: Cohort, companions: UpdateMatrix | None, method: str) -> Tensor:
    """Products ``[2m, 2m]`` of all loss and disparity rows, in this order, on the CPU; zeros without companions."""
    m = len(cohort)
    gram = torch.zeros(2 * m, 2 * m, dtype=torch.float64)
    gram[:m, :m] = cohort.updates.gram().sum(0)
    if companions is not None:
        gram[:m, m:] = cohort.updates.cross_gram(companions.rows).sum(0)
        gram[m:, :m] = gram[:m, m:].T
        gram[m:, m:] = companions.gram().sum(0)
    require_finite(gram.diagonal().isfinite().reshape(2, m).all(0), cohort, method)
    return gram


def counted_groups(asked: GroupScores, notion: Notion, num_groups: int = 2) -> list[Tensor]:
    """For each group ``[B]`` booleans: the samples that count in it."""
    counted = asked.positive if notion == "eo" else torch.ones_like(asked.positive)
    return [counted & (asked.groups == group) for group in range(num_groups)]


def _single(scores: Tensor) -> Tensor:
    # Half precision has no room for a sum over a client's samples.
    return scores if scores.dtype.itemsize > 2 else scores.float()


_SHOWN = 10


def true_disparities(cohort: Cohort) -> Tensor | None:
    """``[m]`` disparities of what the clients predict, NaN where undefined; ``None`` if none has counted."""
    predicted = cohort.extras.get(PREDICTED)
    if predicted is None or SCORES not in cohort.extras:
        return None
    return rates(*predicted.unbind(1)).difference().cpu()


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

    ``surrogates`` are those of the clients that have reported, by id, on their training data in their last round;
    ``true`` likewise the disparities themselves, NaN where undefined. ``lowest`` is the lowest score that any sample
    had in any round.
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
