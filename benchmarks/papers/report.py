# SPDX-License-Identifier: Apache-2.0
"""Tables with the published figures beside ours, and curves over the rounds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.papers.experiment import Case, Experiment
from benchmarks.papers.records import Line, recorded, slug

ABREAST = 3  # groups beside each other in a picture

Results = Mapping[str, Mapping[int, list[Line]]]
"""Lines by case and seed."""


def gather(experiment: Experiment, out: Path, rounds: int | None = None) -> dict[str, dict[int, list[Line]]]:
    """What has been run of an experiment; with ``rounds``, the runs that are as long, cut there."""
    records = sorted(recorded(out, experiment.name).items())
    found: dict[str, dict[int, list[Line]]] = {}
    for case in experiment.cases:
        runs = {seed: _until(rounds, lines) for (name, seed), lines in records if name == slug(case.name)}
        if any(runs.values()):
            found[case.name] = {seed: lines for seed, lines in runs.items() if lines}
    return found


def _until(rounds: int | None, lines: list[Line]) -> list[Line]:
    if rounds is None:
        return lines
    return [line for line in lines if line["round"] <= rounds <= lines[-1]["round"]]


def final(lines: Sequence[Line], metric: str, last: int) -> float:
    """Mean of a metric over the last evaluations, as far as they lie in the second half of the run."""
    late = [line for line in lines if 2 * line["round"] > lines[-1]["round"]]
    values = [line[metric] for line in late[-last:] if metric in line]
    return fmean(values) if values else nan


def tables(experiment: Experiment, out: Path, rounds: int | None = None) -> str:
    """Markdown: one table per group of cases, at the end of the runs or after so many ``rounds``."""
    results = gather(experiment, out, rounds)
    parts = [f"# {experiment.title}", f"`python -m benchmarks.papers run {experiment.name} --data-root DIR`"]
    parts += ["\n".join(f"- {text}" for text in experiment.deviations)] if experiment.deviations else []
    for group in dict.fromkeys(case.group for case in experiment.cases):
        cases = [case for case in experiment.cases if case.group == group]
        done = [case for case in cases if case.name in results]
        if done:
            parts += [f"## {group}"] if group else []
            parts.append(_table(experiment, done, results))
        left = [case.label for case in cases if case not in done]
        if left:
            missing = "Not run" if rounds is None else f"Not run for {rounds} rounds"
            parts.append(f"{missing}{f' ({group})' if group else ''}: {', '.join(left)}.")
    origins = sorted({_origin(lines[-1]) for runs in results.values() for lines in runs.values()})
    parts += [f"Run with {'; '.join(origins)}."] if origins else []
    return "\n\n".join(parts) + "\n"


def _origin(line: Line) -> str:
    return (
        f"fl_lightning {line['fl_lightning']} at {line['commit']}, torch {line['torch']}, "
        f"lightning {line['lightning']}, Python {line['python']}"
    )


def _table(experiment: Experiment, cases: Sequence[Case], results: Results) -> str:
    metrics = list(experiment.metrics)
    heads = ["method"]
    for metric in metrics:
        known = any(metric in case.published for case in cases)
        heads += [metric, "published", "difference"] if known else [metric]
    if experiment.reach is not None:
        heads.append(f"rounds to {experiment.reach}".replace("0.", "."))
    rows = [[*heads, "rounds", "seeds", "minutes"]]
    for case in cases:
        runs = results[case.name]
        row = [case.label]
        for metric in metrics:
            values = [final(lines, metric, experiment.last) for lines in runs.values()]
            mean = fmean(values)
            row.append(_with_spread(values))
            if any(metric in other.published for other in cases):
                target = case.published.get(metric)
                row += ["", ""] if target is None else [f"{target:.3f}", _signed(mean - target)]
        if experiment.reach is not None:
            first = [[line["round"] for line in lines if line["mean"] >= experiment.reach] for lines in runs.values()]
            row.append(f"{fmean(rounds[0] for rounds in first):.0f}" if all(first) else "never")
        reached = {int(lines[-1]["round"]) for lines in runs.values()}
        rounds = " to ".join(str(number) for number in sorted({min(reached), max(reached)}))
        row.append(rounds if reached == {case.rounds} else f"{rounds} of {case.rounds}")
        row.append(", ".join(str(seed) for seed in runs))
        row.append(f"{fmean(lines[-1]['seconds'] for lines in runs.values()) / 60:.1f}")
        rows.append(row)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _with_spread(values: Sequence[float]) -> str:
    """Nothing for a metric that a seed lacks: some methods do not report it."""
    mean = fmean(values)
    if isnan(mean):
        return ""
    return f"{mean:.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def _signed(value: float) -> str:
    return "" if isnan(value) else f"{value:+.3f}"


def draw_curves(results: Results, path: Path) -> None:
    """Mean accuracy above fairness angle over the rounds, for each group of cases; the mean of the seeds."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(name.rpartition(": ")[0] for name in results))
    labels = list(dict.fromkeys(name.rpartition(": ")[2] for name in results))  # of one colour everywhere
    colors = colormaps["tab10" if len(labels) <= 10 else "tab20"].colors
    width = min(len(groups), ABREAST)
    height = -(-len(groups) // width)
    figure = Figure(figsize=(5.4 * width, 6.4 * height), layout="constrained")
    axes = figure.subplots(2 * height, width, squeeze=False)
    for place, group in enumerate(groups):
        above, column = 2 * (place // width), place % width
        for name, runs in results.items():
            if name.rpartition(": ")[0] != group:
                continue
            rounds = sorted(set.intersection(*({line["round"] for line in lines} for lines in runs.values())))
            for axis, metric in ((axes[above][column], "mean"), (axes[above + 1][column], "angle")):
                curve = [
                    fmean(line.get(metric, nan) for lines in runs.values() for line in lines if line["round"] == number)
                    for number in rounds
                ]
                label = name.rpartition(": ")[2]
                axis.plot(rounds, curve, label=label, color=colors[labels.index(label) % len(colors)], linewidth=1.2)
        axes[above][column].set_title(group)
        axes[above][column].legend(fontsize="xx-small", ncols=2)
        axes[above + 1][column].set_xlabel("round")
    for above in range(0, 2 * height, 2):
        axes[above][0].set_ylabel("mean accuracy")
        axes[above + 1][0].set_ylabel("fairness angle (rad)")
    for axis in axes[-2:, len(groups) - width * (height - 1) :].flat:
        axis.remove()
    figure.savefig(path, dpi=110)


def write(experiment: Experiment, out: Path, rounds: int | None = None) -> None:
    """Prints the tables; those of the whole runs and the curves also go into the folder of the results, if any."""
    text = tables(experiment, out, rounds)
    print(text)
    if rounds is not None:
        return
    results = gather(experiment, out)
    if not results:
        return
    (out / f"{experiment.name}.md").write_text(text)
    try:
        (experiment.draw or draw_curves)(results, out / f"{experiment.name}.png")
    except ModuleNotFoundError:
        print("No curves: they need matplotlib (pip install '.[benchmarks]').")


def rewritten(page: str, name: str, text: str) -> str:
    """A page with new tables between two comments.

    Args:
        page: as it is.
        name: of the place.
        text: the tables.

    Raises:
        ValueError: the page has no such place, or several.
    """
    place = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise ValueError(f"the page must have the comments {name} and end of {name} once, found them otherwise")
    return place.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page)
