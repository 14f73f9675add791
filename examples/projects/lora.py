# SPDX-License-Identifier: Apache-2.0
"""LoRA with PEFT: one small language model, and adapters of it for twenty owners of text with four tasks."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import fl_lightning as fl  # +

OWNERS = (
    "argparse", "ast", "calendar", "configparser", "csv", "dataclasses", "difflib", "doctest", "enum", "inspect",
    "locale", "mailbox", "optparse", "pdb", "pickle", "random", "shutil", "statistics", "tarfile", "textwrap",
)  # fmt: skip
"""Modules of Python's standard library. The modules that are left are the general text."""

TASKS = (
    lambda text: text,
    lambda text: text[::-1],
    lambda text: text.swapcase(),
    lambda text: " ".join(re.findall(r"[A-Za-z_]+", text)),
)
"""What the model is to write: the text, the text from its end, the other case, names only."""

LENGTH = 32
LIBRARY = Path(sysconfig.get_path("stdlib"))


def windows(text: str, task: int) -> Tensor:
    """``[n, LENGTH]`` bytes of a text in the form of a task; each window begins with the task's mark."""
    written = torch.tensor(list(TASKS[task](text).encode("ascii", "replace")))
    whole = written[: len(written) // (LENGTH - 1) * (LENGTH - 1)].view(-1, LENGTH - 1)
    return torch.cat([torch.full((len(whole), 1), 128 + task), whole], 1)


class OwnersText(Dataset[Tensor]):
    """Windows of all owners, one owner after the other; every fourth for validation.

    Args:
        validation: whether these are the windows for validation.
        each: windows of an owner, of both kinds.
    """

    def __init__(self, validation: bool, each: int = 32) -> None:
        texts = [windows((LIBRARY / f"{name}.py").read_text("utf8"), k % 4)[:each] for k, name in enumerate(OWNERS)]
        kept = [text[3::4] if validation else text[torch.arange(len(text)) % 4 < 3] for text in texts]
        self.windows = torch.cat(kept)
        self.owners = [name for name, text in zip(OWNERS, kept, strict=True) for _ in text]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


def general_batches(size: int, steps: int) -> Iterator[Tensor]:
    """Windows of the library's other modules."""
    files = [path for path in sorted(LIBRARY.glob("*.py")) if path.stem not in OWNERS]
    some = torch.cat([windows(path.read_text("utf8")[:4000], 0) for path in files])
    for _ in range(steps):
        yield some[torch.randint(len(some), (size,))]


def trained_model(steps: int) -> GPT2LMHeadModel:
    """A GPT-2 with two small blocks, from random weights, trained for a short while on the general text."""
    config = GPT2Config(
        vocab_size=132, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in general_batches(32, steps):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Adapted(L.LightningModule):
    """A language model whose adapters are trained, and nothing else.

    Args:
        model: the model to adapt.
        rank: of the factors.
        lr: learning rate of AdamW.
    """

    def __init__(self, model: GPT2LMHeadModel, rank: int = 4, lr: float = 1e-2) -> None:
        super().__init__()
        layers = ["c_attn", "c_proj", "c_fc"]
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.05, target_modules=layers, fan_in_fan_out=True)
        self.model = get_peft_model(model, lora)
        self.lr = lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        output = self.model(input_ids=batch, labels=batch)
        right = (output.logits[:, :-1].argmax(-1) == batch[:, 1:]).float().mean()
        self.log_dict({"val_loss": output.loss, "val_acc": right}, prog_bar=True, batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr)


def main(folder: str | Path = "runs/lora", epochs: int = 2, resume: str | Path | None = None) -> L.Trainer:
    """Trains the model on the general text, and then its adapters on the owners' text."""
    L.seed_everything(0)
    model = Adapted(trained_model(steps=60))
    train = DataLoader(OwnersText(validation=False), batch_size=8, shuffle=True)
    val = DataLoader(OwnersText(validation=True), batch_size=8)
    trainer = L.Trainer(
        strategy=fl.FederatedStrategy(fl.algorithms.FedLF(), clients_per_round=8),  # +
        max_epochs=epochs,
        accelerator="cpu",
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        callbacks=[ModelCheckpoint(folder, save_top_k=-1)],
    )
    # - trainer.fit(model, train, val, ckpt_path=resume)
    trainer.fit(model, fl.FederatedDataModule(train, fl.data.ByKey("owners"), val=val), ckpt_path=resume)  # +
    return trainer


if __name__ == "__main__":
    main()
