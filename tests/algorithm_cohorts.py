# SPDX-License-Identifier: Apache-2.0
"""Cohorts for tests of algorithms, without a Trainer."""

from dataclasses import replace

import torch

from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.updates import UpdateMatrix

SIZES = (30, 12, 50)
COLUMNS = sum(SIZES)


def make_cohort(
    rows,
    losses=None,
    ids=None,
    when=0,
    layout=None,
    lr=0.1,
    losses_at="shrink",
    sizes=None,
    companions=None,
    num_clients=None,
    params=None,
    extras=None,
    num_samples=None,
):
    m, n = rows.shape
    losses = torch.arange(m, dtype=torch.float64) / m + 0.5 if losses is None else losses
    losses = None if losses is False else torch.as_tensor(losses, dtype=torch.float64)
    if losses_at == "shrink":
        losses_at = (lambda params: 0.5 * losses) if losses is not None else None
    sizes = torch.arange(1.0, m + 1) if sizes is None else sizes
    if extras is None:
        extras = {"accuracy": torch.exp(-(torch.arange(m, dtype=torch.float64) if losses is None else losses))}
        extras["disparity"] = torch.full((m,), 0.05, dtype=torch.float64)
        extras["lowest_loss"] = 0.5 * extras["accuracy"]
        extras["sharpness"] = 0.01 + 0.1 * extras["accuracy"]
        count = torch.as_tensor(sizes, dtype=torch.float64)
        half, right = count[:, None].expand(m, 2) / 2, extras["accuracy"]
        rates = torch.stack([right, right**2], 1)
        extras["group_predictions"] = torch.stack([half * rates, half], 1)
        extras["label_counts"] = torch.stack([half * rates, half * (1 - rates)], 1) / 2
        extras["label_losses"] = extras["label_counts"] * (1 - right)[:, None, None]
        extras["right_predictions"] = torch.stack([right * count, count], 1)
        extras["kernel_sums"] = torch.rand(m, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(when))
        extras["group_counts"] = torch.tensor([[2.0, 1.0]], dtype=torch.float64).expand(m, 2)
        if n >= 12:  # features of three classes, not all of which everybody has
            extras |= {"prototypes": rows[:, :9].reshape(m, 3, 3), "prototype_counts": (rows[:, 9:12] > 0).double()}
    layout = layout or ParamLayout.from_sizes(SIZES)
    return Cohort(
        params=torch.zeros(n, dtype=rows.dtype) if params is None else params,
        updates=UpdateMatrix(rows, layout),
        losses=losses,
        sizes=sizes,
        client_ids=tuple(range(m)) if ids is None else tuple(ids),
        round=when,
        client_lr=lr,
        num_clients=num_clients,
        extras=extras,
        companions={"disparity": UpdateMatrix(torch.zeros_like(rows), layout)} if companions is None else companions,
        losses_at=losses_at,
        num_samples=num_samples,
    )


def elsewhere(device, cohort):
    """The same cohort with its parameters and rows on a remote device; the rest comes from the CPU, as in a fit."""
    companions = {name: matrix.beside(device.put(matrix.rows)) for name, matrix in cohort.companions.items()}
    there = {"params": device.put(cohort.params), "updates": cohort.updates.beside(device.put(cohort.updates.rows))}
    return replace(cohort, **there, companions=companions)


def switched(rule, **switches):
    """The rule with some of its private switches set, which its ``reading`` sets together."""
    for name, value in switches.items():
        assert hasattr(rule, f"_{name}"), name
        setattr(rule, f"_{name}", value)
    return rule


def random_rows(m, seed, dtype=torch.float64, n=COLUMNS):
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, generator=generator, dtype=torch.float64)
    return (torch.randn(m, n, generator=generator, dtype=torch.float64) + 0.3 * common).to(dtype)


def sampled_rounds(rounds, clients, m, seed, dtype=torch.float64, n=COLUMNS, layout=None, **more):
    """Cohorts of a federation with partial participation; every row is new and random."""
    generator = torch.Generator().manual_seed(seed)
    for when in range(rounds):
        ids = torch.randperm(clients, generator=generator)[:m].tolist()
        losses = torch.rand(m, generator=generator, dtype=torch.float64) + 0.2
        yield make_cohort(random_rows(m, 1000 * seed + when, dtype, n), losses, ids, when, layout, **more)
