# SPDX-License-Identifier: Apache-2.0
"""Robustness against dishonest clients: FedMDFG (AAAI 2023), section 4.4 and Table 4, on Fashion-MNIST.

    python -m benchmarks.papers.attacks --data-root DIR --out FILE [--rounds 100] [--online 1.0]

100 clients hold two of 200 label-sorted shards each and train the MLP; 10 of them, the same ones throughout, send
something else than their update: random numbers (A1; of standard deviation 1, and of the honest update's length), 100
times their update (A2), or nothing (A3). The accuracy is the mean over all clients, each tested on test data of its own
classes. FedMDFG has to stay within .03 of its run without dishonest clients.

Every finished run is one line of FILE; a run that is there already is not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.papers.conflicts import load

CLIENTS, DISHONEST, SHARDS, BATCH, DECAY = 100, 0.1, 2, 50, 0.999

Attacks = dict[str, Callable[[tuple[int, ...]], fl.attacks.Attack | None]]
ATTACKS: Attacks = {
    "none": lambda ids: None,
    "A1, std 1": lambda ids: fl.attacks.RandomUpdates(ids, std=1.0),
    "A1, norm of the update": lambda ids: fl.attacks.RandomUpdates(ids, match_norm=True),
    "A2, 100 x": lambda ids: fl.attacks.ScaledUpdates(ids, 100.0),
    "A3, zero": fl.attacks.ZeroUpdates,
}
RULES: dict[str, Callable[[], fl.algorithms.ServerRule]] = {
    "FedAvg": fl.algorithms.FedAvg,
    "FedMDFG": partial(fl.algorithms.FedMDFG, gradient_source="update"),
}


def run(
    rule: str, attack: str, sets: tuple[TensorDataset, TensorDataset], rounds: int, online: float, lr: float, seed: int
) -> dict[str, float]:
    """Trains one method under one attack; accuracies of all clients and of the honest ones, and seconds."""
    L.seed_everything(seed)
    ids = fl.attacks.dishonest_clients(CLIENTS, DISHONEST, seed)
    data = fl.FederatedDataModule(
        sets[0], fl.data.Shards(CLIENTS, SHARDS), test=sets[1], batch_size=BATCH, eval_batch_size=1000, seed=seed
    )
    module = fl.ClientModule(
        fl.models.MLP(),
        optimizer=partial(torch.optim.SGD, lr=lr),
        lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=DECAY),
        num_classes=10,
    )
    strategy = fl.FederatedStrategy(
        RULES[rule](), clients_per_round=online, attack=ATTACKS[attack](ids), on_client_error="drop", seed=seed
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        strategy=strategy,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.perf_counter()
    trainer.fit(module, data)
    metrics = trainer.test(module, data, verbose=False)[0]
    return {
        "accuracy": metrics["fed/test_acc/mean"],
        "angle": metrics["fed/test_acc/angle"],
        "worst_10": metrics["fed/test_acc/worst_10"],
        "seconds": time.perf_counter() - began,
    }


def table(runs: list[dict[str, object]]) -> str:
    """Markdown: one line per method and attack, with the difference to the run without dishonest clients."""
    clean = {run["rule"]: run["accuracy"] for run in runs if run["attack"] == "none"}
    lines = ["| method | attack | mean accuracy | difference | angle | worst 10 % |", "|---|---|---|---|---|---|"]
    for r in runs:
        difference = float(str(r["accuracy"])) - float(str(clean.get(r["rule"], "nan")))
        lines.append(
            f"| {r['rule']} | {r['attack']} | {r['accuracy']:.3f} | {difference:+.3f} | {r['angle']:.3f} "
            f"| {r['worst_10']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs what is not in the file yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder that holds FashionMNIST/raw")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per run")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--online", type=float, default=1.0, help="share of the clients in a round")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    sets = load(arguments.data_root, True), load(arguments.data_root, False)
    setting = {name: getattr(arguments, name) for name in ("rounds", "online", "lr", "seed")}
    lines = arguments.out.read_text().splitlines() if arguments.out.is_file() else []
    done = {(r["rule"], r["attack"]): r for r in map(json.loads, lines) if setting.items() <= r.items()}
    for rule in RULES:
        for attack in ATTACKS:
            if (rule, attack) not in done:
                result = run(rule, attack, sets, **setting)
                done[rule, attack] = {"rule": rule, "attack": attack, **setting, **result}
                with arguments.out.open("a") as file:
                    file.write(json.dumps(done[rule, attack]) + "\n")
    print(table(list(done.values())))


if __name__ == "__main__":
    main()
