# SPDX-License-Identifier: Apache-2.0
"""Memory and messages of a federation that trains GPT-2's adapters, beside one that trains all its weights.

    python -m benchmarks.adapter_memory

Needs transformers and peft (examples/projects/requirements/lora.txt). Weights are random: sizes do not depend on them.
Four clients take a step each on 64 tokens, in a process per kind on the CPU; with FedLF, which remembers their updates.
"""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import fl_lightning as fl
from benchmarks.leaderboard.traffic import size_of

CLIENTS, TOKENS, RANK = 4, 64, 8
KINDS = ("all weights", "adapters")
COLUMNS = {
    "trained": "trained numbers", "sends": "a client sends", "receives": "a client receives",
    "memory": "most memory of the fit", "checkpoint": "checkpoint",
}  # fmt: skip


class Writer(L.LightningModule):
    """GPT-2 in its smallest published size; ``adapters`` freezes it and trains factors in its attention."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config())
        lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["c_attn"], fan_in_fan_out=True)
        self.model = get_peft_model(model, lora) if kind == "adapters" else model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch of tokens."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.01)


def measured(kind: str) -> dict[str, int]:
    """Bytes of a fit of two rounds and of the messages of one client.

    Args:
        kind: one of :data:`KINDS`.
    """
    tokens = DataLoader(torch.arange(CLIENTS * TOKENS).view(CLIENTS, TOKENS), batch_size=1)
    data = fl.FederatedDataModule(tokens, fl.data.IID(CLIENTS))
    module = Writer(kind)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF())
    trainer = L.Trainer(max_epochs=2, strategy=strategy, enable_checkpointing=False, **quiet)
    trainer.fit(module, data)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_checkpoint(Path(folder) / "fit.ckpt")
        checkpoint = (Path(folder) / "fit.ckpt").stat().st_size
    del trainer
    server = fl.FederatedServer(module, strategy, 1, rounds=1)
    alone = fl.FederatedDataModule(tokens, fl.data.IID(1))
    client = fl.FederatedClient(module, alone, strategy, 0, trainer=quiet)
    server.register(client.introduction())
    server.open_round()
    message = server.message(0)
    answer = client.train(message)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    sizes = {"sends": size_of(vars(answer)), "receives": size_of(vars(message))}
    return {"trained": trained, **sizes, "memory": memory, "checkpoint": checkpoint}


def main() -> None:
    """Prints the table, or what one kind needs."""
    if len(sys.argv) > 1:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        print(json.dumps(measured(sys.argv[1])))
        return
    print(f"| |{'|'.join(f' {name} ' for name in COLUMNS.values())}|\n|---|{'---|' * len(COLUMNS)}")
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.adapter_memory", kind]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        numbers = [f"{found.pop('trained'):,}", *(f"{number / 1e6:,.1f} MB" for number in found.values())]
        print(f"| {kind} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
