# SPDX-License-Identifier: Apache-2.0
"""A program with a command line: ``python rank_cli.py fit --config FOLDER/fit.yaml``."""

import hashlib
import json
from pathlib import Path

import torch
from lightning.pytorch.cli import LightningCLI
from support import Blobs, Classifier

import fl_lightning as fl


class Data(fl.FederatedDataModule):
    def __init__(self, clients: int = 7):
        super().__init__(Blobs(), fl.data.Dirichlet(clients, 1.0), seed=0)


def main():
    cli = LightningCLI(Classifier, Data, save_config_callback=None)
    flat = torch.cat([tensor.detach().flatten() for tensor in cli.model.state_dict().values()])
    found = {"ranks": cli.trainer.strategy.ranks and cli.trainer.strategy.ranks.size}
    found["weights"] = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    folder = Path(cli.trainer.default_root_dir)
    (folder / f"rank-{cli.trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
