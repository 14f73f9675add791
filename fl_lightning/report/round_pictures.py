# SPDX-License-Identifier: Apache-2.0
"""Pictures over the rounds: mean and worst clients, fairness, loss, conflicts, learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from fl_lightning.report.heat_maps import cells_of, heat_map, row_axis, same_scale, seed_words, shrunk, stretch
from fl_lightning.report.pictures import (
    COLORS,
    MAX_POINTS,
    Picture,
    Spec,
    binned,
    escaped,
    layout,
    line,
    numbers,
    sentences,
    stretches,
    thinned,
)
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import Method, metrics_of

_BETTER = {"max": "up is better", "min": "down is better", "abs": "near 0 is better"}
_BINS = 100


def mean_and_worst(methods: Sequence[Method]) -> Picture | None:
    """Mean over the clients and mean of the worst tenth, per metric."""
    records = [record for method in methods for record in method.records]
    variants, longest = {}, 0
    for metric, mode in metrics_of(records, "val").items():
        data: list[Spec] = []
        for color, method in enumerate(methods):
            for key, words, dash in (("mean", "mean", "solid"), ("worst_10", "worst 10 %", "dash")):
                rounds, means, ends = _over_seeds(method, metric, key)
                longest = max(longest, len(rounds))
                if not rounds:
                    continue
                data += _band(color, rounds, ends) if key == "worst_10" else []
                name = words if len(methods) == 1 else f"{method.label}, {words}"
                hover = f"{escaped(name, 60)}: %{{y:.4~g}}<extra></extra>"
                data.append(line(name, color, rounds, means, line={"dash": dash}, hovertemplate=hover))
        if data:
            spec = layout("round", f"{escaped(metric)} ({_BETTER[mode]})")
            variants[metric] = {"data": data, "layout": {**spec, "hovermode": "x"}, "height": 400}
    if not variants:
        return None
    caption = sentences(
        "Validation after each round. Solid: mean over the clients. Dashed: mean of the worst tenth of them.",
        _seeds_averaged(methods, " of the worst reach"),
        _every(longest),
    )
    return Picture("mean-and-worst", "The mean and the worst clients over the rounds", variants, caption, "metric")


def unevenness(methods: Sequence[Method]) -> Picture | None:
    """The fairness angle, or the deviation over clients where no angle is defined."""
    records = [record for method in methods for record in method.records]
    variants, longest = {}, 0
    for metric, mode in metrics_of(records, "val").items():
        key, title = ("angle", "fairness angle (rad)") if mode == "max" else ("std", f"deviation of {escaped(metric)}")
        data: list[Spec] = []
        for color, method in enumerate(methods):
            rounds, means, ends = _over_seeds(method, metric, key)
            longest = max(longest, len(rounds))
            if rounds:
                hover = f"{escaped(method.label, 60)}: %{{y:.4~g}}<extra></extra>"
                data += _band(color, rounds, ends)
                data.append(line(method.label, color, rounds, means, hovertemplate=hover))
        if data:
            spec = layout("round", f"{title}, down is fairer", yaxis={"rangemode": "tozero"})
            variants[metric] = {"data": data, "layout": {**spec, "hovermode": "x"}, "height": 320}
    if not variants:
        return None
    caption = sentences(
        "The fairness angle is 0 if all clients have the same value. For metrics where smaller is better, the standard "
        "deviation over the clients is drawn instead.",
        _seeds_averaged(methods, " reach"),
        _every(longest),
    )
    return Picture("unevenness", "How unevenly the clients fare over the rounds", variants, caption, "metric")


def training_loss(methods: Sequence[Method]) -> Picture | None:
    """The clients' training loss."""
    spec, width = _per_round(methods, lambda record: record.rounds.train_loss, "mean training loss")
    if spec is None:
        return None
    caption = sentences(
        "Mean of the local training losses of the clients in a round, weighted by their samples.",
        _seeds_averaged(methods),
        _binned_words(width),
    )
    return Picture("loss", "The clients' training loss", {"": spec}, caption)


def learning_rate(methods: Sequence[Method]) -> Picture | None:
    """The clients' learning rate, if it changes."""
    rates = {rate for method in methods for record in method.records for rate in record.rounds.learning_rate}
    if len(rates) < 2:
        return None
    spec, width = _per_round(methods, lambda record: record.rounds.learning_rate, "learning rate")
    if spec is None:
        return None
    caption = sentences("The learning rate with which the clients of a round begin.", _binned_words(width))
    return Picture("learning-rate", "The learning rate", {"": spec}, caption)


def learning_rate_in_words(methods: Sequence[Method]) -> str:
    """The learning rate, where it does not change."""
    rates = {rate for method in methods for record in method.records for rate in record.rounds.learning_rate}
    if rates == {None}:
        return "The clients' optimizers have no single learning rate."
    return f"The clients' learning rate was {rates.pop():g} in all rounds." if len(rates) == 1 else ""


def conflicts(methods: Sequence[Method]) -> Picture | None:
    """Share of the clients whom the step worked against, on the whole model."""

    def shares(record: FitRecord) -> list[float | None]:
        pairs = zip(record.rounds.conflicts, record.rounds.clients, strict=True)
        return [100 * count / clients if clients and not record.is_bound else None for count, clients in pairs]

    spec, width = _per_round(methods, shares, "clients in conflict (%)")
    if spec is None:
        return None
    spec["layout"]["yaxis"]["rangemode"] = "tozero"
    caption = sentences(
        "A client is in conflict with a step that goes against its own update (their inner product is negative): the "
        "step makes the model worse for it. Drawn is the share of a round's clients, on the whole model.",
        _seeds_averaged(methods),
        _binned_words(width),
    )
    return Picture("conflicts", "Whom the steps worked against", {"": spec}, caption)


def layer_conflicts(methods: Sequence[Method]) -> Picture | None:
    """The same per layer, as a heat map."""
    variants, longest, cells = {}, 1, cells_of(methods)
    found = {}
    for method in methods:
        table = method.records[0].layer_conflicts
        if table is not None and table.counts and table.counts[0]:
            found[method.label] = (table.rows, *shrunk(table, range(len(table.rows)), cells))
    for label, (rows, z, starts, width) in found.items():
        longest = max(longest, width)
        drawn = heat_map(100 * z, rows, starts, "red", "%", f"{stretch(width)}: %{{z:.3~g}} % of the clients")
        axis = row_axis(rows, "layers, the first on top")
        spec = layout("round", "", xaxis={"showgrid": False}, yaxis=axis)
        height = 140 + (24 * len(rows) if len(rows) <= 40 else 500)
        variants[label] = {"data": [drawn], "layout": spec, "height": max(240, height)}
    if not variants:
        return None
    same_scale(list(variants.values()), "from 0")
    caption = sentences(
        "Share of a round's clients in conflict with the step in each layer. All methods have the same colours."
        if len(variants) > 1
        else "Share of a round's clients in conflict with the step in each layer.",
        seed_words(methods),
        f"Columns are means over {longest} rounds." if longest > 1 else "",
    )
    return Picture("layer-conflicts", "Conflicts in each layer", variants, caption, "method")


def _per_round(
    methods: Sequence[Method], values: Callable[[FitRecord], Sequence[float | None]], title: str
) -> tuple[Spec | None, int]:
    """A line per method of something that each round has, as means over stretches of rounds and over seeds."""
    data, longest = [], 1
    for color, method in enumerate(methods):
        found = [(record.rounds.round, values(record)) for record in method.records if len(record.rounds)]
        if not found or all(value is None for _, column in found for value in column):
            continue
        length = min(len(column) for _, column in found)
        curves = []
        for _, column in found:
            curve, width = binned(column[:length], _BINS)
            longest = max(longest, width)
            curves.append(curve)
        means = [
            fmean(k) if (k := [v for v in column if v is not None]) else None for column in zip(*curves, strict=True)
        ]
        x = [found[0][0][start] + 1 for start in stretches(length, width)]
        hover = f"{escaped(method.label, 60)}: %{{y:.4~g}}<extra></extra>"
        data.append(line(method.label, color, x, means, hovertemplate=hover, connectgaps=False))
    if not data:
        return None, 1
    return {"data": data, "layout": {**layout("round", title), "hovermode": "x"}, "height": 300}, longest


def _over_seeds(
    method: Method, metric: str, key: str
) -> tuple[list[int], list[float | None], list[tuple[float, float]]]:
    """Rounds, means over the seeds, and the lowest and highest seed if there are several; thinned out."""
    series = [Method.series(record, metric, "val") for record in method.records]
    found = [dict(zip(s.rounds, s.summaries.get(key, ()), strict=False)) for s in series if s is not None]
    if not found:
        return [], [], []
    rounds = sorted(set(found[0]).intersection(*found[1:]))
    rounds = [rounds[k] for k in thinned(len(rounds), MAX_POINTS)]
    columns = [[v for s in found if (v := s[number]) is not None] for number in rounds]
    if not any(columns):
        return [], [], []
    ends = [(min(column), max(column)) for column in columns] if len(found) > 1 and all(columns) else []
    return rounds, [fmean(column) if column else None for column in columns], ends


def _band(color: int, rounds: Sequence[int], ends: Sequence[tuple[float, float]]) -> list[Spec]:
    """From the lowest to the highest seed."""
    if not ends:
        return []
    x = [*rounds, *reversed(rounds)]
    y = [*(high for _, high in ends), *(low for low, _ in reversed(ends))]
    return [{
        "type": "scatter", "mode": "lines", "x": numbers(x), "y": numbers(y), "fill": "toself", "hoverinfo": "skip",
        "fillcolor": f"@c{color % COLORS}/0.13", "line": {"width": 0}, "showlegend": False,
    }]  # fmt: skip


def _seeds_averaged(methods: Sequence[Method], bands: str = "") -> str:
    most = max(len(method.records) for method in methods)
    if most == 1:
        return ""
    return f"Lines are means over {most} seeds{bands and f', bands{bands} from the lowest seed to the highest'}."


def _every(count: int) -> str:
    return "" if count <= MAX_POINTS else f"Of {count:,} evaluations, {MAX_POINTS:,} are drawn."


def _binned_words(width: int) -> str:
    return "" if width == 1 else f"Points are means over {width} rounds."
