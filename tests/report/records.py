# SPDX-License-Identifier: Apache-2.0
"""Records of made-up fits."""

import math
import random

import torch

from fl_lightning.core.records import EvaluationRecord, RoundRecord
from fl_lightning.report import FitRecord
from fl_lightning.report.record_builder import RecordBuilder


def round_of(index, clients, seed=0, dropped=None):
    """A round in which these clients took part."""
    rng = random.Random(f"{seed}/{index}")
    return RoundRecord(
        round=index,
        client_ids=tuple(clients),
        dropped=dropped or {},
        train_loss=2.0 * math.exp(-index / 30) + 0.1 * rng.random(),
        losses=None,
        step_norm=1 / (1 + index),
        update_norms=torch.ones(len(clients)),
        conflicts=rng.randrange(len(clients) + 1),
        layer_conflicts={},
        flagged=False,
        weights=None,
        scalars={},
        seconds=0.3,
        training_seconds=0.2,
    )


def evaluation_of(number, clients, seed=0, stage="val", names=None, own=False, empty=()):
    """An evaluation after ``number`` rounds: clients with higher numbers fare better, but by their own models."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.linspace(0, 1, clients, dtype=torch.float64)
    noise = torch.rand(clients, generator=generator, dtype=torch.float64)
    acc = (1 - 0.6 * math.exp(-number / 40)) * (0.5 + 0.4 * place + 0.1 * noise)
    values, sizes = {f"{stage}_acc": acc, f"{stage}_loss": 2 - 2 * acc}, torch.arange(10, 10 + clients)
    values |= {f"personal/{name}": 0.9 * found.flip(0) for name, found in values.items() if own}
    for column, nothing in ((sizes, 0), *((found, math.nan) for found in values.values())):
        column[list(empty)] = nothing
    return EvaluationRecord(
        number,
        stage,
        tuple(range(clients)),
        sizes,
        values,
        client_names=tuple(names or map(str, range(clients))),
    )


def fit_record(
    method="FedAvg", clients=4, rounds=12, seed=0, names=None, per_round=None, every=1, test=True, own=False, empty=(),
    **entries,
):  # fmt: skip
    """The record of a fit with everything in it."""
    names = tuple(names or (f"client {k}" for k in range(clients)))
    base = FitRecord(
        method=method, seed=seed, learning_rate=0.1, planned_rounds=rounds, client_names=names,
        client_sizes=tuple(20 + 5 * k for k in range(clients)), class_names=tuple("0123456789"),
        class_counts=tuple(tuple((7 * k + 3 * c) % 40 for c in range(10)) for k in range(clients)),
        settings={"local_epochs": 1, "seed": seed}, arguments={method: {"alpha": 0.1}},
        configuration={"module": "Classifier", "trainer": {"max_epochs": rounds}}, versions={"torch": "2.15"},
        command=f"python train.py --method {method}", memory={"update matrix (4 x 10)": 160, "global parameters": 40},
    )  # fmt: skip
    builder, rng = RecordBuilder(base), random.Random(seed)
    for index in range(rounds):
        cohort = sorted(rng.sample(range(clients), per_round or clients))
        dropped = {cohort.pop(): "dropped out"} if index % 5 == 4 and len(cohort) > 1 else {}
        if index % 7 == 6 and len(cohort) > 1:
            dropped[cohort.pop()] = "its update is not finite"
        builder.add_round(round_of(index, cohort, seed, dropped))
        if (index + 1) % every == 0:
            builder.add_evaluation_seconds(0.1)
            builder.add_evaluation(evaluation_of(index + 1, clients, seed, "val", names, own, empty))
    if test:
        builder.add_evaluation(evaluation_of(rounds, clients, seed + 1, "test", names, own, empty))
    return builder.record(**entries)
