# SPDX-License-Identifier: Apache-2.0
"""A small language model with frozen weights, and the adapters that clients train in it.

The weights are those of a short training on the modules of Python's standard library that are too small to be clients.
They are made anew in every process, always the same. First weights of adapters follow the seed of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import nan
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional

import fl_lightning as fl
from benchmarks.leaderboard import text
from benchmarks.leaderboard.adapter_tasks import LENGTH, SYMBOLS

WIDTH, HEADS, BLOCKS, RANK, SCALING = 48, 4, 2, 4, 4.0
STEPS, BATCH, RATE = 1200, 64, 3e-3
"""Of the base's training: steps of Adam, windows, and the learning rate, which falls to 0."""


class LoRALinear(nn.Module):
    """A frozen linear layer and two trained factors: ``W x + scaling B (A x)``.

    Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.

    Args:
        base: the layer.
    """

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """The layer with its correction."""
        found: Tensor = self.base(inputs) + SCALING * self.lora_B(self.lora_A(inputs))
        return found


class Block(nn.Module):
    """Attention to what came before, and two layers for each position, both behind LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        """``[b, t, WIDTH]`` to the same."""
        heads = self.attention(self.norms[0](states)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        states = states + self.output(mixed.transpose(1, 2).flatten(2))
        found: Tensor = states + self.down(functional.gelu(self.up(self.norms[1](states))))
        return found


class LanguageModel(nn.Module):
    """Symbols ``[b, t]`` to scores ``[b, SYMBOLS, t]`` of what follows each."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)

    def forward(self, inputs: Tensor) -> Tensor:
        """The scores."""
        states = self.symbols(inputs) + self.places.weight[: inputs.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(states))).transpose(1, 2)
        return scores


@cache
def base() -> LanguageModel:
    """The model before anybody adapts it.

    Raises:
        MissingDataError: the interpreter's standard library is of another version.
    """
    read = text.symbols(text.general())
    windows = read[: len(read) // LENGTH * LENGTH].view(-1, LENGTH)
    marked = torch.cat([torch.full((len(windows), 1), text.CHARACTERS), windows[:, :-1]], 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LanguageModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            some = torch.randint(len(windows), (BATCH,))
            functional.cross_entropy(model(marked[some]), windows[some]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model


def adapted() -> LanguageModel:
    """The frozen base with new adapters in all linear layers of its blocks."""
    model = LanguageModel()
    model.load_state_dict(base().state_dict())
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("attention", "output", "up", "down"):
            setattr(block, name, LoRALinear(getattr(block, name)))
    return model


class AdapterLearner(fl.ClientModule):
    """Trains adapters, and logs ``test_conflicts`` where :class:`ConflictCount` counts them.

    Args:
        network: frozen, with adapters.
        rounds: of the fit. The learning rate falls to a tenth by then.
        lr: learning rate of plain SGD in the first round.
    """

    def __init__(self, network: Callable[[], LanguageModel], rounds: int, lr: float) -> None:
        super().__init__(
            network(),
            optimizer=partial(torch.optim.SGD, lr=lr),
            lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.1 ** (1 / rounds)),
            num_classes=SYMBOLS,
        )
        self.conflicts = nan

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Logs also the share of the clients that the fit's steps worked against in the products of the factors."""
        super().test_step(batch, batch_idx)
        self.log("test_conflicts", self.conflicts, batch_size=len(batch[1]))


def conflicts_in_products(cohort: fl.Cohort, step: Tensor) -> int:
    """Clients whose update has a negative inner product with the step in the products of the factors.

    Two clients can agree in the factors and disagree there. An update ``(dA, dB)`` changes ``B A`` by
    ``B A - (B - dB) (A - dA) = dB (A - dA) + B dA``.

    Args:
        cohort: with all its columns; no parameters but factors.
        step: ``[n]`` of the method.
    """
    layout = cohort.updates.layout
    params = dict(zip(layout.names, layout.views(cohort.params.double()), strict=True))

    def change(update: Tensor) -> Tensor:
        delta = dict(zip(layout.names, layout.views(update.double()), strict=True))
        pairs = [(name, name.replace(".lora_A.", ".lora_B.")) for name in layout.names if ".lora_A." in name]
        return torch.cat([(delta[b] @ (params[a] - delta[a]) + params[b] @ delta[a]).flatten() for a, b in pairs])

    whole = change(step)
    return sum(bool(change(update) @ whole < 0) for update in cohort.updates.rows)


class ConflictCount(L.Callback):
    """Adds up :func:`conflicts_in_products` for an :class:`AdapterLearner`, from what the method aggregates."""

    def __init__(self) -> None:
        self._counts = {"conflicts": 0.0, "clients": 0.0}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Watches the method."""
        method = trainer.strategy.algorithm  # type: ignore[attr-defined]

        def aggregate(cohort: fl.Cohort) -> Tensor:
            step: Tensor = type(method).aggregate(method, cohort)
            self._counts["conflicts"] += conflicts_in_products(cohort, step)
            self._counts["clients"] += len(cohort.updates)
            return step

        method.aggregate = aggregate

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tells the module."""
        pl_module.conflicts = self._counts["conflicts"] / max(1.0, self._counts["clients"])  # type: ignore[assignment]

    def state_dict(self) -> dict[str, float]:
        """The counts so far."""
        return dict(self._counts)

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Goes on from these."""
        self._counts.update(state_dict)
