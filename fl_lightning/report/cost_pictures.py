# SPDX-License-Identifier: Apache-2.0
"""Pictures of who was missing, where the time went, and what memory the fits needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_lightning.report.number_formats import Spread, plural, seconds
from fl_lightning.report.pictures import Picture, Spec, binned, escaped, layout, numbers, sentences, stretches
from fl_lightning.report.record import FitRecord
from fl_lightning.report.runs_of_a_method import Method, called, seconds_of

_BINS = 120


def missing(methods: Sequence[Method]) -> Picture | None:
    """Drop-outs and errors over the rounds."""
    variants, longest = {}, 1
    for method in methods:
        rounds = method.records[0].rounds
        if not any(rounds.drop_outs) and not any(rounds.errors):
            continue
        columns = {"dropped out": rounds.drop_outs, "left out after an error": rounds.errors}
        spec, width = _stacked(method.records[0], columns, ("@c5", "@c1"), "clients per round", "%{y:.3~g}")
        variants[method.label] = spec
        longest = max(longest, width)
    if not variants:
        return None
    caption = sentences(
        "Clients that were drawn for a round and did not take part in its step.",
        f"Bars are means over {longest} rounds." if longest > 1 else "",
        "Of several seeds, the first is drawn." if any(len(method.records) > 1 for method in methods) else "",
    )
    return Picture("missing", "Who was missing", variants, caption, "method")


def time_in_all(methods: Sequence[Method]) -> Picture | None:
    """Seconds of each method, by what they were spent on."""
    found = {m.label: [seconds_of(r) for r in m.records if len(r.rounds)] for m in methods}
    rows = {label: runs for label, runs in found.items() if runs}
    if not rows:
        return None
    names = [escaped(label) for label in rows]
    data = []
    for part, color in zip(("clients' training", "server", "evaluation", "this report"), (0, 1, 2, 7), strict=True):
        spent = [Spread.of([run.get(part, 0.0) for run in runs]) for runs in rows.values()]
        means = [0.0 if value is None else value.mean for value in spent]
        data.append({
            "type": "bar", "orientation": "h", "name": part, "y": names, "x": numbers(means),
            "marker": {"color": f"@c{color}"}, "hovertemplate": f"%{{y}}<br>{part}: %{{x:.4~g}} s<extra></extra>",
        })  # fmt: skip
    y = {"automargin": True, "autorange": "reversed", "ticks": "", "showgrid": False}
    spec = {**layout("seconds", "", yaxis=y), "barmode": "stack", "legend": {"traceorder": "normal"}, "bargap": 0.35}
    shares = []
    for label, runs in list(rows.items())[:3]:
        whole = sum(sum(run.values()) for run in runs) or 1.0
        words = ", ".join(f"{100 * sum(run.get(part, 0.0) for run in runs) / whole:.0f} % {part}" for part in runs[0])
        shares.append(f"{label}: {seconds(whole / len(runs))}, {words}.")
    caption = sentences("Wall-clock seconds.", *shares)
    return Picture(
        "time", "Where the time went", {"": {"data": data, "layout": spec, "height": 150 + 34 * len(rows)}}, caption
    )


def time_per_round(methods: Sequence[Method]) -> Picture | None:
    """Seconds per round, by what they were spent on."""
    variants, longest = {}, 1
    for method in methods:
        rounds = method.records[0].rounds
        if len(rounds) < 2:
            continue
        columns = {
            "clients' training": rounds.training_seconds,
            "server": rounds.server_seconds,
            "evaluation": rounds.evaluation_seconds,
        }
        spec, width = _stacked(method.records[0], columns, ("@c0", "@c1", "@c2"), "seconds per round", "%{y:.3~g} s")
        variants[method.label] = spec
        longest = max(longest, width)
    if not variants:
        return None
    caption = sentences(
        f"Bars are means over {longest} rounds." if longest > 1 else "",
        "Of several seeds, the first is drawn." if any(len(method.records) > 1 for method in methods) else "",
    )
    return Picture("time-per-round", "Time per round", variants, caption, "method")


def memory(methods: Sequence[Method]) -> Picture | None:
    """Bytes that the fits planned for, by what they are for."""
    plans = {method.label: method.records[0].memory for method in methods if method.records[0].memory}
    if not plans:
        return None
    parts = list(dict.fromkeys(part for plan in plans.values() for part in plan))
    unit, words = _unit(max(value for plan in plans.values() for value in plan.values()))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escaped(label),
            "y": [escaped(part, 46) for part in parts],
            "x": numbers([plan.get(part, 0) / unit for part in parts]),
            "text": [_size(plan.get(part, 0)) for part in parts],
            "textposition": "auto" if len(plans) <= 3 else "none",
            "marker": {"color": f"@c{color % 8}"},
            "hovertemplate": f"%{{y}}<br>%{{text}}<extra>{escaped(label)}</extra>",
        }
        for color, (label, plan) in enumerate(plans.items())
    ]
    y = {"automargin": True, "autorange": "reversed", "ticks": "", "showgrid": False}
    spec = {**layout(words, "", yaxis=y), "bargap": 0.3}
    totals = ", ".join(f"{label} {_size(sum(plan.values()))}" for label, plan in list(plans.items())[:6])
    height = 110 + len(parts) * (26 + 14 * min(len(plans), 6))
    return Picture("memory", "The memory plan", {"": {"data": data, "layout": spec, "height": height}},
                   f"What the fit allocates at most beside the module. In all: {totals}.")  # fmt: skip


def reasons(methods: Sequence[Method]) -> list[list[str]]:
    """A table of why clients were left out: method, reason, how often, rounds, clients."""
    rows = []
    for method in methods:
        for record in method.records:
            for entry in record.absences:
                first, last = entry.first_round + 1, entry.last_round + 1
                names = [called(record, client) for client in entry.client_ids]
                more = " and others" if len(names) > 5 else ""
                rows.append([
                    method.label if len(method.records) == 1 else f"{method.label}, seed {record.seed}",
                    entry.reason, f"{entry.count:,}", f"{first}" if first == last else f"{first} to {last}",
                    ", ".join(names[:5]) + more,
                ])  # fmt: skip
    return rows


def nobody_missing(methods: Sequence[Method]) -> str:
    """A sentence for fits in which everybody took part."""
    rounds = sum(len(record.rounds) for method in methods for record in method.records)
    return f"Every client that was drawn took part, in all of {plural(rounds, 'round')}." if rounds else ""


def _stacked(
    record: FitRecord, columns: Mapping[str, Sequence[float]], colors: Sequence[str], title: str, hover: str
) -> tuple[Spec, int]:
    """A stacked bar per stretch of rounds."""
    data, width = [], 1
    for (name, values), color in zip(columns.items(), colors, strict=True):
        means, width = binned(values, _BINS)
        starts = [record.rounds.round[k] + 1 for k in stretches(len(values), width)]
        data.append({
            "type": "bar", "name": name, "x": numbers(starts, "i4"), "y": numbers(means), "marker": {"color": color},
            "width": width, "offset": -width / 2 if width == 1 else 0,
            "hovertemplate": f"{name}: {hover}<extra></extra>",
        })  # fmt: skip
    spec = {
        **layout("round", title),
        "barmode": "stack",
        "legend": {"traceorder": "normal"},
        "bargap": 0,
        "hovermode": "x",
    }
    return {"data": data, "layout": spec, "height": 300}, width


def _unit(largest: int) -> tuple[int, str]:
    for unit, word in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if largest >= unit:
            return unit, word
    return 1, "bytes"


def _size(count: int) -> str:
    unit, word = _unit(count)
    return f"{count:,} bytes" if unit == 1 else f"{count / unit:,.1f} {word}"
