# SPDX-License-Identifier: Apache-2.0
"""The server: it has no data. Flower runs main where the SuperLink is."""

from __future__ import annotations

from pathlib import Path

import task
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from lightning.pytorch.loggers import CSVLogger

import fl_lightning as fl
from fl_lightning.federation.flower import FairStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run; a later one with the same folder goes on from where this one ended."""
    folder = Path(str(context.run_config["folder"])).expanduser()
    server = fl.FederatedServer(task.initial_model(), task.STRATEGY, num_clients=task.SITES)
    federation = FairStrategy(server, checkpoint=folder, round_timeout=600, logger=CSVLogger(folder, name="logs"))
    model = federation.start(grid, num_rounds=int(context.run_config["rounds"]))
    print(f"digest of the weights: {task.digest(model)}", flush=True)
