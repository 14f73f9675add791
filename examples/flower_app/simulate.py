# SPDX-License-Identifier: Apache-2.0
"""Tries the federation out in one process: python simulate.py --rounds 10."""

from __future__ import annotations

import argparse

import lightning as L
import task


def main(rounds: int) -> task.Model:
    """The whole federation as one trainer.fit."""
    model = task.initial_model()
    trainer = L.Trainer(
        max_epochs=rounds, strategy=task.STRATEGY, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    trainer.fit(model, task.simulated_data())
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    trained = main(parser.parse_args().rounds)
    print(f"digest of the weights: {task.digest(trained)}")
