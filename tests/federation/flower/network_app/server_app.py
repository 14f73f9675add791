# SPDX-License-Identifier: Apache-2.0
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from task import SIZES, STRATEGY, Model

import fl_lightning as fl
from fl_lightning.federation.flower import FairStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FairStrategy(
        fl.FederatedServer(Model(), STRATEGY, len(SIZES)), round_timeout=400, join_timeout=config["join-timeout"],
        evaluation="none", bind_keys=config["bind-keys"],
    )  # fmt: skip
    strategy.start(grid, config["rounds"])
