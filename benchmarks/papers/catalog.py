# SPDX-License-Identifier: Apache-2.0
"""All experiments."""

from __future__ import annotations

from benchmarks.papers.experiment import Experiment
from benchmarks.papers.tables import defences, fcfl, fedfv, fedheal, fedlf, fedlf_variants, fedmdfg

EXPERIMENTS: tuple[Experiment, ...] = (
    fedlf.TABLE1,
    fedlf.TABLE2,
    fedlf_variants.ABLATION,
    fedlf.RATES,
    fedmdfg.TABLE2,
    fedmdfg.ATTACKED,
    fedfv.TABLE2,
    fedfv.TABLE3,
    fedfv.TABLE4,
    fcfl.ADULT,
    fcfl.COMPARED,
    fcfl.SYNTHETIC_PROBLEM,
    fedheal.TABLE2,
    defences.DEFENCES,
)


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    return next(each for each in EXPERIMENTS if each.name == name)
