# SPDX-License-Identifier: Apache-2.0
"""Lightning's small transformer, which has its training loader with it, on the text of four authors."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import made_data
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
from lightning.pytorch.loggers import CSVLogger

import fl_lightning as fl  # +


def main(folder: str | Path = "runs/language_model", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains the language model on what stands in data/wikitext-2.txt; it is written first."""
    L.seed_everything(0)
    made_data.text(Path("data/wikitext-2.txt"), words=84)  # Lightning's demo would download it to the same place
    data = WikiText2(download=False)
    model = LightningTransformer(vocab_size=data.vocab_size)
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF()),  # +
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=0.5,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1), Timer()],
    )
    # - trainer.fit(model, ckpt_path=resume)
    trainer.fit(model, fl.FederatedDataModule(model, torch.arange(len(data)).chunk(4)), ckpt_path=resume)  # +
    return trainer


if __name__ == "__main__":
    main()
