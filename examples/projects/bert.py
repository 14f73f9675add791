# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's BERT for classifying sentences, as for GLUE: AdamW, linear warm-up and decay with every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import made_data
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)

import fl_lightning as fl  # +


class SentenceClassifier(L.LightningModule):
    """A BERT with a head; biases and LayerNorm are not decayed."""

    def __init__(self, config: BertConfig, lr: float = 1e-3, weight_decay: float = 0.01, warmup_steps: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["config"])
        self.model = BertForSequenceClassification(config)
        classes = config.num_labels
        metrics = MetricCollection([MulticlassAccuracy(classes), MulticlassF1Score(classes)])
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.train_metrics.update(output.logits, batch["labels"])
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        self.log("train_loss", output.loss, batch_size=len(batch["labels"]))
        return output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.model(**batch)
        self.val_metrics.update(output.logits, batch["labels"])
        self.log_dict(self.val_metrics)
        self.log("val_loss", output.loss, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        plain = [p for name, p in self.model.named_parameters() if "bias" in name or "LayerNorm" in name]
        decayed = [p for name, p in self.model.named_parameters() if not ("bias" in name or "LayerNorm" in name)]
        groups = [{"params": decayed, "weight_decay": self.hparams.weight_decay}, {"params": plain, "weight_decay": 0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, eps=1e-8)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_linear_schedule_with_warmup(optimizer, self.hparams.warmup_steps, steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 1}]


def main(folder: str | Path = "runs/bert", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains on the sentences of four authors; a sentence's class is its author."""
    L.seed_everything(0)
    sentences = made_data.text(Path(folder) / "sentences.txt", words=560).read_text().splitlines()
    words = sorted({word for sentence in sentences for word in sentence.split()})
    tokenizer = BertTokenizer(
        {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    )
    samples = [{**tokenizer(s[: 20 + i % 40]), "labels": i * 4 // len(sentences)} for i, s in enumerate(sentences)]
    collate = DataCollatorWithPadding(tokenizer)
    train = DataLoader([s for i, s in enumerate(samples) if i % 5], 16, shuffle=True, collate_fn=collate)
    val = DataLoader(samples[::5], 16, collate_fn=collate)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=4,
    )
    model = SentenceClassifier(config)
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF()),  # +
        max_epochs=epochs,
        accelerator="cpu",
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1), LearningRateMonitor(logging_interval="step")],
    )
    trainer.fit(
        model,
        # - train_dataloaders=train,
        # - val_dataloaders=val,
        fl.FederatedDataModule(train, fl.data.Dirichlet(4, alpha=1.0), val=val, labels=lambda s: s["labels"]),  # +
        ckpt_path=resume,
    )
    trainer.validate(model, val)
    return trainer


if __name__ == "__main__":
    main()
