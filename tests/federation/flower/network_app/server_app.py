# SPDX-License-Identifier: Apache-2.0
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from task import SIZES, STRATEGY, Model

from fl_lightning.federation.flower import FairStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FairStrategy(
        Model(), STRATEGY, len(SIZES), "run", round_timeout=400, join_timeout=config["join-timeout"],
        evaluation="none", bind_keys=config["bind-keys"],
    )  # fmt: skip
    strategy.start(grid, config["rounds"])
