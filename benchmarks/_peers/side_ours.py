# SPDX-License-Identifier: Apache-2.0
"""fl_lightning."""

from __future__ import annotations

import inspect
import logging
import warnings

import lightning as L

import fl_lightning as fl
from benchmarks._peers.baton import Baton, flat, options
from benchmarks._rounds.workloads import Classifier, federated


class Turns(L.Callback):
    """Passes the baton after each round."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The server step is done."""
        assert isinstance(pl_module, Classifier)
        assert isinstance(trainer.strategy, fl.FederatedStrategy)
        assert trainer.strategy.last_round is not None
        self._baton.pass_on(flat(pl_module.net), trainer.strategy.last_round.local_steps)


def strategy(method: str, per_round: int, workers: int) -> fl.FederatedStrategy:
    """The strategy; two clients at a time where workers are asked for.

    Raises:
        RuntimeError: this version trains one client at a time only.
    """
    rule = fl.algorithms.FedFV() if method == "fedfv" else fl.algorithms.FedAvg()
    if workers == 1:
        return fl.FederatedStrategy(rule, clients_per_round=per_round)
    if "executor" not in inspect.signature(fl.FederatedStrategy).parameters:
        raise RuntimeError("this version of fl_lightning trains one client at a time only")
    return fl.FederatedStrategy(rule, clients_per_round=per_round, executor=fl.executors.Parallel(workers))


def main() -> None:
    """Runs the rounds."""
    given = options()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model = Classifier(given.shape)
    data = federated(given.shape, *given.shape.data())
    trainer = L.Trainer(
        max_epochs=given.rounds,
        strategy=strategy(given.method, given.shape.per_round, given.workers),
        accelerator="cpu",
        callbacks=[Turns(Baton(given.shape, flat(model.net)))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
