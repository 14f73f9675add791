# SPDX-License-Identifier: Apache-2.0
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from task import SIZES, Model

import fl_lightning as fl
from fl_lightning.federation.flower import FairStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FairStrategy(
        fl.algorithms.FedLF(), Model(), len(SIZES), min_clients=2, round_timeout=400,
        join_timeout=config["join-timeout"], evaluation="none", bind_keys=config["bind-keys"], checkpoint="run",
    )  # fmt: skip
    strategy.start(grid, config["rounds"])
