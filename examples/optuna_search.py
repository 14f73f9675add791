# SPDX-License-Identifier: Apache-2.0
"""Lets Optuna search the learning rate and an argument of a method: for the worst clients, not for the average.

    pip install optuna
    python examples/optuna_search.py --trials 20

For a grid of learning rates over several methods and seeds, see `python -m fl_lightning compare --help`.
"""

from __future__ import annotations

import argparse

import lightning as L
import optuna
from digits import DigitClassifier, Digits

import fl_lightning as fl


def worst_clients(trial: optuna.Trial, rounds: int) -> float:
    """Trains with what Optuna suggests; returns the mean validation accuracy of the worst tenth of the clients."""
    lr = trial.suggest_float("lr", 0.01, 1.0, log=True)
    t = trial.suggest_float("t", 0.1, 10.0, log=True)
    L.seed_everything(0, verbose=False)
    data = fl.FederatedDataModule(Digits(), fl.data.Dirichlet(num_clients=10, alpha=0.3), seed=0)
    strategy = fl.FederatedStrategy(fl.algorithms.TERM(t=t), seed=0)
    trainer = L.Trainer(
        max_epochs=rounds, strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(DigitClassifier(lr=lr), data)
    return float(trainer.callback_metrics["fed/val_acc/worst_10"])


def main(trials: int, rounds: int) -> optuna.Study:
    """Runs the search and prints what it found."""
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(lambda trial: worst_clients(trial, rounds), n_trials=trials)
    print(f"worst 10 % of the clients: accuracy {study.best_value:.3f} with {study.best_params}")
    return study


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=15, help="communication rounds per trial")
    options = parser.parse_args()
    main(options.trials, options.rounds)
