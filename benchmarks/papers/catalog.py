# SPDX-License-Identifier: Apache-2.0
"""All experiments."""

from __future__ import annotations

from benchmarks.papers.experiment import Experiment
from benchmarks.papers.tables import (
    defences,
    fcfl,
    fcfl_eicu,
    fedfv,
    fedheal,
    fedlf,
    fedlf_cifar,
    fedlf_variants,
    fedmdfg,
    fedmdfg_figures,
)

EXPERIMENTS: tuple[Experiment, ...] = (
    fedlf.TABLE1,
    fedlf_cifar.TABLE1,
    fedlf.TABLE2,
    fedlf_variants.ABLATION,
    fedlf_variants.FAIR_ROW,
    fedlf.RATES,
    fedlf_cifar.CLIENTS_OF_ALL,
    fedmdfg.TABLE2,
    fedmdfg_figures.TABLE3,
    fedmdfg.ATTACKED,
    fedmdfg_figures.FIGURES,
    fedmdfg_figures.PARTED,
    fedfv.TABLE2,
    fedfv.TABLE3,
    fedfv.TABLE4,
    fedfv.FIGURE2,
    fcfl.ADULT,
    fcfl.COMPARED,
    fcfl.SYNTHETIC_PROBLEM,
    fcfl_eicu.EICU,
    fedheal.TABLE2,
    fedheal.SWEPT,
    fedheal.SIGNS,
    defences.DEFENCES,
)


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    return next(each for each in EXPERIMENTS if each.name == name)
