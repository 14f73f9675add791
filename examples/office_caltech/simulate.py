# SPDX-License-Identifier: Apache-2.0
"""The four sites in one process: python simulate.py --data FOLDER --rounds 20."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning as L
import task


def main(root: Path, rounds: int) -> L.Trainer:
    """The whole federation as one trainer.fit."""
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=task.STRATEGY,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(task.initial_model(), task.simulated_data(root))
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="a folder with amazon, caltech10, dslr and webcam")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    trained = main(options.data, options.rounds)
    found = trained.strategy.last_evaluation
    for site, accuracy in zip(found.client_names, found.values["val_acc"].tolist(), strict=True):
        print(f"{site:10} {accuracy:.3f}")
    print(f"digest of the weights: {task.digest(trained.lightning_module)}")
