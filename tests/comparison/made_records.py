# SPDX-License-Identifier: Apache-2.0
"""Results of comparisons made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_lightning.comparison.fitted import Fitted
from fl_lightning.comparison.plan import Run
from fl_lightning.comparison.selection import Measure
from fl_lightning.report import ClientValues, FitRecord, RoundSeries

NAMES = ("Aalborg", "Braga", "Cluj", "Dundee")
ACCURACY = Measure("mean", "val", "val_acc", "test", "test_acc", "max")


def fitted(
    values: Mapping[str, Sequence[float | None]],
    mode: str = "max",
    conflicts: Sequence[int] = (),
    names: Sequence[str] = NAMES,
    seconds: float = 2.0,
) -> Fitted:
    """A run whose clients end with these values, metric by metric; a metric's stage is in its name."""
    rounds = len(conflicts)
    zeros: tuple[float, ...] = (0.0,) * rounds
    evaluations = tuple(
        ClientValues(
            round=5, stage="test" if "test" in metric else "val", client_ids=tuple(range(len(found))),
            sizes=(10,) * len(found), values={metric: tuple(found)}, modes={metric: mode},
        )
        for metric, found in values.items()
    )  # fmt: skip
    record = FitRecord(
        "by hand", client_names=tuple(names), client_sizes=(10,) * len(names), evaluations=evaluations,
        rounds=RoundSeries(
            tuple(range(rounds)), (4,) * rounds, zeros, zeros, tuple(conflicts), (0,) * rounds, (0,) * rounds,
            (False,) * rounds, (False,) * rounds, zeros, zeros, zeros, zeros,
        ),
    )  # fmt: skip
    return Fitted(record, seconds)


def runs(method: str, numbers: Mapping[float, Sequence[Sequence[float]]]) -> dict[Run, Fitted]:
    """Per learning rate and seed, values of four clients in validation; in the test they are 0.1 smaller."""
    return {
        Run(method, rate, seed): fitted({"val_acc": values, "test_acc": [value - 0.1 for value in values]})
        for rate, seeds in numbers.items()
        for seed, values in enumerate(seeds)
    }
