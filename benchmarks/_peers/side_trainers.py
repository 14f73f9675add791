# SPDX-License-Identifier: Apache-2.0
"""Federated averaging by a Lightning Trainer per client, as people write it without a package."""

from __future__ import annotations

import copy
import logging
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._peers.baton import Baton, flat, options
from benchmarks._rounds.workloads import Classifier


def main() -> None:
    """Runs the rounds."""
    given = options()
    shape = given.shape
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    x, y = shape.data()
    parts = [TensorDataset(*part) for part in zip(x.split(shape.samples), y.split(shape.samples), strict=True)]
    model, steps = Classifier(shape), 0
    weights = copy.deepcopy(model.state_dict())
    baton = Baton(shape, flat(model.net))
    for _ in range(given.rounds):
        chosen = torch.randperm(shape.clients)[: shape.per_round].tolist()
        mean = {name: torch.zeros_like(value) for name, value in weights.items()}
        for client in chosen:
            model.load_state_dict(weights)
            trainer = L.Trainer(
                max_epochs=1,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(model, DataLoader(parts[client], batch_size=shape.batch, shuffle=True))
            steps += trainer.global_step
            for name, value in model.state_dict().items():
                mean[name] += value / len(chosen)
        weights = mean
        model.load_state_dict(weights)
        baton.pass_on(flat(model.net), steps)


if __name__ == "__main__":
    main()
