# SPDX-License-Identifier: Apache-2.0
"""FCFL (NeurIPS 2021) on eICU: Figures 4 and 5, Tables S1 and S3, also on hospitals that do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch

import fl_lightning as fl
from benchmarks.papers.adult import Adult
from benchmarks.papers.eicu import FILES, Outcome, load, write_made_up
from benchmarks.papers.experiment import Case, Experiment, Job, Log
from benchmarks.papers.fcfl import Run, agnostic, execute, fair_reg, unfair
from benchmarks.papers.records import Line
from benchmarks.papers.sources import MissingDataError
from benchmarks.papers.tables.fcfl import DIVISIONS, NOTHING, chosen, divided, draw_points

A = fl.algorithms


@cache
def _made_up(outcome: Outcome) -> Adult:
    with TemporaryDirectory() as folder:
        write_made_up(Path(folder))
        return load(Path(folder), outcome)


@cache
def _unconstrained(run: Run, outcome: Outcome, root: Path | None, seed: int) -> tuple[float, ...]:
    """Disparities of the hospitals without budgets."""
    train, test = _halves(outcome, root, seed)
    return tuple(map(abs, execute(replace(run, budget=None), train, test, "library").disparity))


def _halves(outcome: Outcome, root: Path | None, seed: int) -> tuple[Adult, Adult]:
    """Two thirds of the stays for training, and the rest."""
    stays = _made_up(outcome) if root is None else load(root, outcome)
    size = len(stays.labels)
    order = torch.arange(size)
    train, test = chosen(stays, order[: 2 * size // 3]), chosen(stays, order[2 * size // 3 :])
    return divided(train, test, 100 + seed)  # shuffled with every seed: stays are in the order of the hospitals


@dataclass(frozen=True)
class StayCase(Case):
    """A run on eICU.

    Attributes:
        run: the setting.
        outcome: what is predicted.
        made_up: on hospitals that do not exist.
        share: of its own disparity without budgets, that each hospital has as its budget.
    """

    name: str
    run: Run
    rounds: int
    outcome: Outcome = "long stay"
    made_up: bool = False
    share: float | None = None
    seeds: tuple[int, ...] = DIVISIONS
    published: Mapping[str, float] = field(default_factory=dict)

    def check(self, root: Path) -> None:
        """See the base class."""
        if not self.made_up and not all((root / "eicu" / name).is_file() for name in FILES):
            raise MissingDataError(
                f"eICU is needed: --data-root must be a folder that holds eicu/{FILES[0]} and eicu/{FILES[1]}, "
                f"found {root}"
            )

    def cost(self, rounds: int) -> float:
        """About 40 ms per round."""
        return 0.04 * rounds * (1 if self.share is None else 2)

    def execute(self, job: Job, log: Log) -> None:
        """See the base class; it is not resumed."""
        root = None if self.made_up else job.root / "eicu"
        train, test = _halves(self.outcome, root, job.seed)
        first = min(self.run.rounds[0], job.rounds)
        run = replace(self.run, rounds=(first, job.rounds - first))
        if self.share is not None:
            original = _unconstrained(replace(run, name=""), self.outcome, root, job.seed)
            run = replace(run, budget=tuple(self.share * disparity for disparity in original))
        result = execute(run, train, test, "library")
        gaps = [abs(disparity) for disparity in result.disparity]
        log.cut(0)
        log.write(
            job.rounds,
            {
                "mean": fmean(result.accuracy),
                "min": min(result.accuracy),
                "disparity": max(gaps),
                "clients": list(result.accuracy),
                "disparities": gaps,
            },
            result.seconds,
        )


def _runs() -> dict[str, tuple[Run, Outcome, float | None, dict[str, float]]]:
    base = Run("", None, 0.1, (150, 150), NOTHING, NOTHING)
    keys = ("mean", "min", "disparity")
    found: dict[str, tuple[Run, Outcome, float | None, dict[str, float]]] = {}
    for label, run, figures in (
        ("MMPF", replace(base, other=partial(unfair, partial(A.MMPF, 20, 15))), (0.658, 0.614, 0.119)),
        ("FA", replace(base, other=partial(agnostic, 0.05)), (0.695, 0.601, 0.115)),
        ("FairReg", replace(base, other=partial(fair_reg, 1.0, "dp")), (0.676, 0.593, 0.110)),
        ("FCFL .1", replace(base, budget=0.1), (0.691, 0.614, 0.093)),
        ("FCFL .05", replace(base, budget=0.05), (0.691, 0.609, 0.068)),
    ):
        found[f"budgets: {label}"] = run, "long stay", None, dict(zip(keys, figures, strict=True))
    for share in (1.0, 0.8, 0.5, 0.2):
        found[f"own budgets: {share} of the original"] = base, "long stay", share, {}
    outcomes: dict[Outcome, tuple[tuple[float, float], ...]] = {
        "long stay": ((0.700, 0.576), (0.700, 0.581), (0.674, 0.605)),
        "death": ((0.883, 0.917), (0.882, 0.917), (0.883, 0.917)),  # the paper has mean and minimum the other way round
    }
    for outcome, figures_of in outcomes.items():
        others = (partial(unfair, partial(A.QFedAvg, 0.1)), partial(unfair, partial(A.AFL, 0.1)), None)
        for label, other, known in zip(("q-FFL", "AFL", "FCFL"), others, figures_of, strict=True):
            low, high = min(known), max(known)
            found[f"no budgets, {outcome}: {label}"] = (
                replace(base, other=other),
                outcome,
                None,
                {"mean": high, "min": low},
            )
    return found


def _cases() -> list[StayCase]:
    cases = []
    for name, (run, outcome, share, known) in _runs().items():
        real = StayCase(name, run, sum(run.rounds), outcome, False, share, published=known)
        cases += [real, replace(real, name=f"made-up hospitals, {name}", made_up=True, published={})]
    return sorted(cases, key=lambda case: case.made_up)


def _draw(results: Mapping[str, Mapping[int, list[Line]]], path: Path) -> None:
    """A point per hospital and division: a panel for each method (Figure 4) and each share of their own (Figure 5)."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, runs in results.items():
        if "no budgets" not in name:
            points = [
                point
                for lines in runs.values()
                for point in zip(lines[-1]["disparities"], lines[-1]["clients"], strict=True)
            ]
            least = fmean(lines[-1]["min"] for lines in runs.values())
            panels[name.rpartition(": ")[2]] = {f"minimum {least:.3f}": points}
    draw_points(panels, path)


EICU = Experiment(
    "fcfl-eicu",
    "FCFL on eICU: eleven hospitals, long stays and deaths",
    tuple(_cases()),
    metrics=("mean", "min", "disparity"),
    draw=_draw,
    deviations=(
        "The data need permission. `made-up hospitals` have sizes, shares of races and laws of their own; the paper's "
        "figures are not for them. Published: Tables S1 and S3 of the appendix.",
        "The paper follows a preprocessing that it does not spell out. Here a model sees age, nine measurements, sex, "
        "unit and source of admission.",
        "Two thirds for training, five divisions, 150 rounds of each stage with the learning rate .1, 300 of the "
        "others. `disparity` is the largest of the hospitals', between white people and others, on test data.",
    ),
)
