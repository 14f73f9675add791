# SPDX-License-Identifier: Apache-2.0
"""scvi-tools' variational autoencoder of single cells through ``SCVI.train``, which makes data and Trainer itself."""

from __future__ import annotations

from pathlib import Path

import anndata
import lightning as L
import made_data
import scvi
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/single_cells", epochs: int = 3, resume: str | Path | None = None) -> L.Trainer:
    """Trains on cells that three laboratories sequenced, and computes the latent representation of all."""
    scvi.settings.seed = 0
    counts, laboratories = made_data.cells()
    cells = anndata.AnnData(counts, obs={"laboratory": laboratories})
    scvi.model.SCVI.setup_anndata(cells, batch_key="laboratory")
    model = scvi.model.SCVI(cells, n_hidden=16, n_latent=4)
    model.train(
        strategy=fl.FederatedStrategy(partition=fl.data.ByKey(lambda d: [int(row["batch"][0]) for row in d])),  # +
        max_epochs=epochs,
        accelerator="cpu",
        batch_size=32,
        train_size=0.8,
        early_stopping=True,
        check_val_every_n_epoch=1,
        plan_kwargs={"reduce_lr_on_plateau": True},
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
        ckpt_path=resume,
    )
    model.get_latent_representation()
    return model.trainer


if __name__ == "__main__":
    main()
