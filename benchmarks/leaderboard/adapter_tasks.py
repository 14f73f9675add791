# SPDX-License-Identifier: Apache-2.0
"""Owners of modules of Python's standard library, each with a task of its own, for adapters of one language model.

Samples are windows of characters behind a mark of the task. All tasks ask what follows: the character itself, the one
before it where the text is read backwards, the character in the other case, or its kind.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import fl_lightning as fl
from benchmarks.leaderboard import text
from benchmarks.leaderboard.data import EVAL_BATCH, HOLDOUT, SEED
from fl_lightning.data import Partition, Samples

TASKS = ("next", "back", "case", "kind")
LENGTH, TRAIN, TEST = 32, 240, 120
"""Characters of a window, and windows of a module to train and to test with."""

SHARES = (1.0, 0.7, 0.5, 0.35, 0.25)
"""Of the windows to train with that owners of the same task have."""

SYMBOLS = text.CHARACTERS + len(TASKS)
"""Characters and marks of tasks."""

_KINDS = {tokenize.COMMENT: "#", tokenize.STRING: '"', tokenize.NUMBER: "0", tokenize.OP: "+", tokenize.NAME: "a"}


@dataclass(frozen=True)
class OneTaskEach(Partition):
    """Some modules, drawn by the seed; client ``k`` has the task ``k % 4`` on its module, and a share of its windows.

    Samples are those of :func:`owners`: blocks of equal size, a module's tasks one after the other.
    """

    num_clients: int

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draws the modules; uses only the number of labels."""
        modules = torch.randperm(len(labels) // (TRAIN * len(TASKS)), generator=torch.Generator().manual_seed(seed))
        chosen = modules[: self.num_clients].tolist()
        blocks = [module * len(TASKS) + client % len(TASKS) for client, module in enumerate(chosen)]
        sizes = [round(TRAIN * SHARES[client // len(TASKS) % len(SHARES)]) for client in range(len(blocks))]
        return [torch.arange(size) + block * TRAIN for block, size in zip(blocks, sizes, strict=True)]

    def match(self, train: Samples, parts: Sequence[Tensor], samples: Samples, seed: int) -> list[Tensor]:
        """The windows of the same module and task."""
        blocks = [int(part[0]) // TRAIN for part in parts]
        return [torch.arange(block * TEST, (block + 1) * TEST) for block in blocks]


def owners(root: Path, clients: int = 20, batch_size: int = 20) -> fl.FederatedDataModule:
    """The modules and packages that are clients of the suite ``text``, with all four tasks.

    Args:
        root: as for :func:`benchmarks.leaderboard.text.corpus`.
        clients: how many are drawn.
        batch_size: of training.

    Raises:
        MissingDataError: the standard library is not that of the version that the table is made with.
    """
    parts = [windows(content, task) for content in text.corpus(root).values() for task in TASKS]
    train, test = (
        TensorDataset(*(torch.cat([pair[side][some] for pair in parts]) for side in (0, 1)))
        for some in (slice(TRAIN), slice(TRAIN, TRAIN + TEST))
    )
    labels = [0] * len(train)
    return fl.FederatedDataModule(
        train, OneTaskEach(clients), test=test, labels=labels, batch_size=batch_size, eval_batch_size=EVAL_BATCH,
        holdout=HOLDOUT, seed=SEED,
    )  # fmt: skip


def windows(content: bytes, task: str) -> tuple[Tensor, Tensor]:
    """``[n, LENGTH]`` inputs and the symbols that follow, for the first windows of a module.

    Args:
        content: the module.
        task: one of :data:`TASKS`.
    """
    content = content[: (TRAIN + TEST) * LENGTH]
    if task == "back":
        content = content[::-1]
    elif task == "case":
        content = content.swapcase()
    read = text.symbols(content).view(-1, LENGTH)
    asked = text.symbols(kinds(content)).view(-1, LENGTH) if task == "kind" else read
    mark = torch.full((len(read), 1), text.CHARACTERS + TASKS.index(task))
    return torch.cat([mark, read[:, :-1]], 1), asked.clone()


def kinds(content: bytes) -> bytes:
    """Each character's kind: that of its token, a space outside of tokens."""
    lines = content.decode("latin-1").splitlines(keepends=True)
    found = [bytearray(b" " * len(line)) for line in lines]
    try:
        for token in tokenize.generate_tokens(io.StringIO("".join(lines)).readline):
            (first, start), (last, stop) = token.start, token.end
            for row in range(first - 1, min(last, len(lines)) if token.type in _KINDS else 0):
                begin, end = start if row == first - 1 else 0, stop if row == last - 1 else len(lines[row])
                found[row][begin:end] = _KINDS[token.type].encode() * (end - begin)
    except (tokenize.TokenError, SyntaxError):
        pass  # the text is cut off in mid-token
    return b"".join(found)
