# SPDX-License-Identifier: Apache-2.0
r"""Fairness of a vector of per-client values, and conflicts of a step, as pure functions.

Every function of values takes ``[N]`` values, one per client, and raises ValueError unless they are a non-empty real
vector. A NaN stands for a client without data: it is left out. If nothing is left the result is NaN. Results are
float64 (float32 on devices that lack float64).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, checked, trusted
from fl_lightning.metrics.group_frame import demographic_parity as demographic_parity
from fl_lightning.metrics.group_frame import equal_opportunity as equal_opportunity
from fl_lightning.metrics.group_frame import equalized_odds as equalized_odds

_SMALLER_PARTS = ("loss", "error", "perplexity", "entropy", "disparity", "distance")
_SMALLER_WORDS = frozenset(
    {
        "err", "mse", "mae", "rmse", "nrmse", "msle", "rmsle", "mape", "smape", "wape", "mase", "crps", "nll", "ppl",
        "wer", "cer", "brier", "ece", "fpr", "aurc", "augrc", "kl", "kld", "huber", "fid", "lpips", "hd95", "assd",
    }
)  # fmt: skip
_GAP_WORDS = frozenset({"gap", "gaps", "dp", "dpd", "deo", "eod", "spd"})

Mode = Literal["max", "min", "abs"]
"""Which values of a metric are good: large ones, small ones, or those near 0."""


@checked()
@dataclass(frozen=True)
class ConflictCounts:
    """Clients that a step works against: on the whole model (scalar) and per layer (``[L]``), int64."""

    model: Tensor
    layers: Tensor


@checked()
def fairness_angle(values: Tensor) -> Tensor:
    r"""Angle between the clients' values and equal values, in radians.

    .. math::
        \varphi = \arccos \frac{|A \cdot \mathbf{1}|}{\lVert A \rVert \sqrt{N}}

    0 means that all clients have the same value. Source: FedLF (AAAI 2024) and FedMDFG (AAAI 2023), experiments,
    without the bars around the sum, which change nothing for accuracies. It is computed as ``atan2(std, |mean|)``,
    which is the same, because the arccosine loses half of the digits near 0.

    Args:
        values: ``[N]``, larger is better.

    Returns:
        A scalar in ``[0, pi / 2]``; NaN if all values are 0, where no angle exists.

    Example:
        >>> fairness_angle(torch.tensor([0.5, 0.5, 0.5]))
        tensor(0., dtype=torch.float64)
        >>> fairness_angle(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        tensor(1.0472, dtype=torch.float64)
    """
    valid = _counted(values)
    if valid.numel() == 0:
        return valid.mean()  # NaN
    # The angle does not depend on the scale; without it squares of tiny or huge values leave the number range.
    scaled = valid / valid.abs().max()  # 0 / 0 is the NaN that all-zero values get
    average = scaled.mean()
    return torch.atan2((scaled - average).square().mean().sqrt(), average.abs())


@checked()
def mean(values: Tensor) -> Tensor:
    """Mean over the clients, each counted once."""
    return _counted(values).mean()


@checked()
def weighted_mean(values: Tensor, sizes: Tensor) -> Tensor:
    """Mean over the clients' samples.

    Args:
        values: ``[N]``.
        sizes: ``[N]`` samples per client. Clients whose value is NaN do not count.

    Raises:
        ValueError: a shape is wrong, or a size is negative or not finite.
    """
    vector = _vector(values)
    if sizes.shape != vector.shape:
        raise ValueError(f"sizes must have shape {list(vector.shape)}, found {list(sizes.shape)}")
    weights = sizes.to(vector)
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError(f"sizes must be finite and not negative, found {sizes.tolist()}")
    valid = ~vector.isnan()
    return (vector[valid] * weights[valid]).sum() / weights[valid].sum()


@checked()
def std(values: Tensor) -> Tensor:
    """Population standard deviation over the clients (divides by ``N``)."""
    valid = _counted(values)
    return (valid - valid.mean()).square().mean().sqrt()


@checked(fraction=Bounds(above=0, most=1))
def worst_fraction(values: Tensor, fraction: float, larger_is_better: bool = True) -> Tensor:
    r"""Mean over the worst clients.

    .. math::
        \frac1k \sum_{i \le k} A_{(i)}, \quad k = \max(1, \operatorname{round}(fraction \cdot N))

    with values sorted from the worst; ``N`` counts the clients with a value, halves round to even.

    Args:
        values: ``[N]``.
        fraction: share of the clients, in (0, 1].
        larger_is_better: whether the worst clients have the lowest or the highest values.

    Example:
        >>> worst_fraction(torch.tensor([0.9, 0.1, 0.3, 0.7]), 0.5)
        tensor(0.2000, dtype=torch.float64)
    """
    return _first(_counted(values).sort(descending=not larger_is_better).values, fraction)


def _first(ordered: Tensor, fraction: float) -> Tensor:
    return ordered[: max(1, round(fraction * ordered.numel()))].mean()


@checked(fraction=Bounds(above=0, most=1))
def best_fraction(values: Tensor, fraction: float, larger_is_better: bool = True) -> Tensor:
    """Mean over the best clients: :func:`worst_fraction` from the other end."""
    return worst_fraction(values, fraction, not larger_is_better)


@checked()
def fairness_summary(values: Tensor, sizes: Tensor, larger_is_better: bool = True) -> Mapping[str, Tensor]:
    """All numbers that describe how a metric is spread over the clients.

    Args:
        values: ``[N]``.
        sizes: ``[N]`` samples per client.
        larger_is_better: orientation of the metric; :func:`is_larger_better` guesses it from a name.

    Returns:
        ``mean``, ``weighted_mean``, ``std``, ``angle`` (if larger is better), ``worst_5``, ``worst_10``, ``best_5``,
        ``best_10`` (percent of the clients), ``min``, ``max``, and ``clients``: how many have a value (int64).
    """
    valid = _counted(values)
    summary = {
        "mean": valid.mean(),
        "weighted_mean": trusted(weighted_mean)(values, sizes),
        "std": trusted(std)(values),
    }
    if larger_is_better:
        summary["angle"] = trusted(fairness_angle)(values)
    from_worst = valid.sort(descending=not larger_is_better).values
    for percent in (5, 10):
        summary[f"worst_{percent}"] = _first(from_worst, percent / 100)
        summary[f"best_{percent}"] = _first(from_worst.flip(0), percent / 100)
    summary["min"] = valid.min() if valid.numel() else summary["mean"]
    summary["max"] = valid.max() if valid.numel() else summary["mean"]
    summary["clients"] = torch.tensor(valid.numel(), device=valid.device)
    return summary


@checked()
def conflict_counts(dots: Tensor) -> ConflictCounts:
    """Counts the clients that conflict with a step: negative inner product of update and step.

    Rows point like gradients, and so does the step, so a negative product means that the step raises the client's loss
    to first order. An exact zero is no conflict. Source: FedLF (AAAI 2024), Table 2.

    Args:
        dots: ``[L, m]`` inner products of ``m`` updates with the step, per layer.

    Returns:
        Clients in conflict on the whole model (the layers' products add up), and per layer ``[L]``.

    Raises:
        ValueError: ``dots`` is no non-empty matrix, or not finite (a NaN would pass for "no conflict").

    Example:
        >>> conflict_counts(torch.tensor([[1.0, -1.0], [-0.5, 0.0]]))
        ConflictCounts(model=tensor(1), layers=tensor([1, 1]))
    """
    if dots.dim() != 2 or dots.numel() == 0:
        raise ValueError(f"dots must be a non-empty [L, m] matrix, found shape {list(dots.shape)}")
    finite = dots.isfinite().all(dim=0)
    if not bool(finite.all()):
        raise ValueError(f"dots must be finite, found others in columns {(~finite).nonzero().flatten().tolist()}")
    return trusted(ConflictCounts)((dots.sum(dim=0) < 0).sum(), (dots < 0).sum(dim=1))


@checked()
def is_larger_better(metric_name: str) -> bool:
    """Guesses a metric's orientation from its name.

    False for names that contain ``loss``, ``error``, ``perplexity``, ``entropy``, ``disparity`` or ``distance``, or as
    a whole word a short form of such a metric (``val_err``, ``valMSE``, but not ``preferred_acc``), and for those of
    gaps between groups (:func:`guessed_mode`). True for all others. Where the guess is wrong, say so through the
    argument of the function or callback in question.

    Example:
        >>> is_larger_better("val_acc"), is_larger_better("val/loss"), is_larger_better("valRMSE")
        (True, False, False)
    """
    return guessed_mode(metric_name) == "max"


@checked()
def guessed_mode(metric_name: str) -> Mode:
    """Which values of a metric are good, as :func:`is_larger_better` guesses.

    Those near 0 for gaps between groups, which may have a sign: names with the word ``gap``, ``gaps``, ``dp``, ``dpd``,
    ``deo``, ``eod`` or ``spd``.

    Example:
        >>> guessed_mode("val_acc"), guessed_mode("val_kl"), guessed_mode("val/dp_gap")
        ('max', 'min', 'abs')
    """
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", metric_name).lower()
    words = {*re.split(r"[^a-z]+", spaced), *re.split(r"[^a-z0-9]+", spaced)}
    if words & _GAP_WORDS:
        return "abs"
    smaller = words & _SMALLER_WORDS or any(part in metric_name.lower() for part in _SMALLER_PARTS)
    return "min" if smaller else "max"


def _vector(values: Tensor) -> Tensor:
    if values.dim() != 1 or values.numel() == 0 or values.is_complex():
        raise ValueError(
            f"values must be a non-empty real vector [N], found shape {list(values.shape)}, dtype {values.dtype}"
        )
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


def _counted(values: Tensor) -> Tensor:
    vector = _vector(values)
    return vector[~vector.isnan()]
