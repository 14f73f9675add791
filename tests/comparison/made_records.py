# SPDX-License-Identifier: Apache-2.0
"""Results of comparisons made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fl_lightning.comparison.plan import Measure, Run
from fl_lightning.report import ClientValues, FitRecord, RoundSeries

NAMES = ("Aalborg", "Braga", "Cluj", "Dundee")
ACCURACY = Measure("mean", "val", "val_acc", "test", "test_acc", "max")


def record(
    values: Mapping[str, Sequence[float | None]],
    mode: str = "max",
    conflicts: Sequence[int] = (),
    names: Sequence[str] = NAMES,
    seconds: float = 2.0,
) -> FitRecord:
    """A run whose clients end with these values, metric by metric; a metric's stage is in its name."""
    rounds = max(1, len(conflicts))
    zeros: tuple[float, ...] = (0.0,) * rounds
    evaluations = tuple(
        ClientValues(
            round=5, stage="test" if "test" in metric else "val", client_ids=tuple(range(len(found))),
            sizes=(10,) * len(found), values={metric: tuple(found)}, modes={metric: mode},
        )
        for metric, found in values.items()
    )  # fmt: skip
    series = RoundSeries(
        tuple(range(rounds)), (4,) * rounds, zeros, tuple(conflicts) or (0,) * rounds, (seconds / rounds,) * rounds,
        zeros, zeros,
    )  # fmt: skip
    return FitRecord(
        "by hand", client_names=tuple(names), client_sizes=(10,) * len(names), evaluations=evaluations, rounds=series
    )


def of_run(run: Run, made: FitRecord) -> FitRecord:
    """A record as that of a run."""
    return replace(
        made, method=run.method, seed=run.seed, division=run.division, learning_rate=run.learning_rate,
        is_bound=run.method in ("local only", "pooled"),
    )  # fmt: skip


def results_of(made: Mapping[Run, FitRecord] | Iterable[tuple[Run, FitRecord]]) -> dict[Run, FitRecord]:
    """What runs leave."""
    return {run: of_run(run, one) for run, one in dict(made).items()}


def runs(method: str, numbers: Mapping[float, Sequence[Sequence[float]]]) -> dict[Run, FitRecord]:
    """Per learning rate and seed, values of four clients in validation; in the test they are 0.1 smaller."""
    return results_of(
        (Run(method, rate, seed), record({"val_acc": values, "test_acc": [value - 0.1 for value in values]}))
        for rate, seeds in numbers.items()
        for seed, values in enumerate(seeds)
    )
