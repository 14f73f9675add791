# SPDX-License-Identifier: Apache-2.0
"""Carries a suite out: a comparison in a folder of its own."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import fl_lightning as fl
from benchmarks.leaderboard.suites import TUNING_SEEDS, Suite
from fl_lightning.comparison.project import ObjectProject
from fl_lightning.comparison.session import Session

METRIC = "val_acc"


def carry_out(
    suite: Suite,
    root: Path,
    folder: Path,
    only: Collection[str] | None = None,
    seeds: int | None = None,
    jobs: int = 1,
) -> fl.Comparison:
    """Does what is not done yet of a suite.

    Args:
        suite: which.
        root: folder of the data sets.
        folder: of the suite's runs.
        only: names of methods to run beside the reference; ``None``: all.
        seeds: how many; ``None``: those of the suite.
        jobs: runs at a time.

    Raises:
        MissingDataError: its data are not there.
        ValueError: the suite has no such method.
    """
    strategies, seeds = suite.methods(), suite.seeds if seeds is None else seeds
    if only is not None:
        unknown = sorted(set(only) - set(strategies))
        if unknown:
            raise ValueError(f"only must name methods of {suite.name}, found {unknown}: there are {list(strategies)}")
        reference = next(iter(strategies))
        strategies = {name: each for name, each in strategies.items() if name == reference or name in only}
    project = ObjectProject(suite.learner, suite.federate(root), suite.trainer)
    session = Session(
        project, strategies, next(iter(strategies.values())), folder=folder, learning_rates=suite.rates, seeds=seeds,
        bounds=suite.bounds, metric=METRIC, jobs=jobs, tuning_seeds=min(TUNING_SEEDS, seeds), divisions=suite.divisions,
    )  # fmt: skip
    return session.carry_out()
