# SPDX-License-Identifier: Apache-2.0
"""Pictures over the rounds: the mean and the worst clients, the training loss, and conflicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fl_lightning.report.number_formats import plural
from fl_lightning.report.pictures import BETTER, Picture, color_of, escaped, figure, picture
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import Method, series_of, shown_metrics


def mean_and_worst(methods: Sequence[Method]) -> Picture | None:
    """Mean over the clients and mean of the worst tenth, per metric."""
    variants = {}
    for metric, mode, names in shown_metrics(methods, "val"):
        made = figure("round", f"{escaped(metric)} ({BETTER[mode]})", 400, hovermode="x unified")
        for place, (method, name) in enumerate(zip(methods, names, strict=True)):
            label = "" if len(methods) == 1 else f"{method.label}, "
            fits = [series for record in method.records if (series := series_of(record, name, "val")) is not None]
            for key, words, dash in (("mean", "mean", "solid"), ("worst_10", "worst 10 %", "dash")):
                columns = [dict(zip(fit.rounds, fit.summaries.get(key, ()), strict=False)) for fit in fits]
                _add_line(made, f"{label}{words}", {"color": color_of(place), "dash": dash}, columns)
        if made.data:
            variants[metric] = made
    return picture(
        "mean-and-worst", "The mean and the worst clients over the rounds", variants,
        "Validation after each round. Solid: mean over the clients. Dashed: mean of the worst tenth of them.",
        _averaged(methods), choose="metric",
    )  # fmt: skip


def training_loss(methods: Sequence[Method]) -> Picture | None:
    """The clients' training loss."""
    return _per_round(
        methods, lambda record: record.rounds.train_loss, "loss", "The clients' training loss", "mean training loss",
        "Mean of the local training losses of the clients in a round, weighted by their samples.",
    )  # fmt: skip


def conflicts(methods: Sequence[Method]) -> Picture | None:
    """Share of the clients whom the step worked against."""

    def shares(record: FitRecord) -> list[float | None]:
        pairs = zip(record.rounds.conflicts, record.rounds.clients, strict=True)
        known = not record.is_bound
        return [100 * count / clients if known and count is not None and clients else None for count, clients in pairs]

    return _per_round(
        methods, shares, "conflicts", "Whom the steps worked against", "clients in conflict (%)",
        "A client is in conflict with a step that goes against its own update (their inner product is negative): the "
        "step makes the model worse for it. Drawn is the share of a round's clients.",
    )  # fmt: skip


def _per_round(
    methods: Sequence[Method], values: Callable[[FitRecord], Sequence[float | None]], key: str, title: str, axis: str,
    words: str,
) -> Picture | None:  # fmt: skip
    """A line per method of something that each round has."""
    made = figure("round", axis, 300, hovermode="x unified", yaxis={"rangemode": "tozero"})
    for place, method in enumerate(methods):
        fits = [record for record in method.records if len(record.rounds)]
        columns = [{number + 1: y for number, y in zip(fit.rounds.round, values(fit), strict=True)} for fit in fits]
        _add_line(made, method.label, {"color": color_of(place)}, columns)
    return picture(key, title, {"": made} if made.data else {}, words, _averaged(methods))


def _add_line(made: Any, name: str, line: dict[str, str], fits: Sequence[Mapping[int, float | None]]) -> None:
    """Draws the mean over fits, where all have been."""
    rounds = sorted(set(fits[0]).intersection(*fits[1:])) if fits else []
    columns = [[value for fit in fits if (value := fit[number]) is not None] for number in rounds]
    if any(columns):
        y = [fmean(column) if column else None for column in columns]
        made.add_scatter(x=rounds, y=y, mode="lines" if len(rounds) > 1 else "markers", name=escaped(name), line=line)


def _averaged(methods: Sequence[Method]) -> str:
    most = max(len(method.fits) for method in methods)
    return f"Lines are means over {plural(most, 'seed')}." if most > 1 else ""
