# SPDX-License-Identifier: Apache-2.0
"""FedLF's retreat where a layer has no common direction: fewer rows, or one direction for two layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import Directions

Descend = Callable[[Tensor, bool, int], Directions]
"""From Gram matrices ``[B, m + h, m + h]``, with a fair row or not, and so many remembered rows, newest first."""


class Block(NamedTuple):
    """Neighbouring layers that share one direction, ``size`` columns in all."""

    layers: tuple[int, ...]
    size: int
    gram: Tensor
    coeff: Tensor
    solved: bool
    flagged: bool = False
    fair: bool = False


class BlockSolver(NamedTuple):
    """How to find the direction of a block."""

    descend: Descend
    online: int
    fair: bool

    def __call__(self, block: Block, last: bool = False) -> Block:
        """Tries the rows of the block as FedLF documents, until its direction is not zero."""
        m, h = self.online, block.gram.shape[-1] - self.online
        fitting = max(0, min(h, block.size - m - self.fair))
        attempts = [(self.fair, h), (self.fair, fitting), (False, fitting)]
        if last:
            attempts += [(self.fair, 0), (False, 0)]
        for number, (fair, history) in enumerate(dict.fromkeys(attempts)):
            found = self.descend(block.gram[None], fair, history)
            if bool(found.solved):
                return block._replace(coeff=found.coeff[0], solved=True, flagged=number > 0, fair=bool(found.fair))
        return block._replace(coeff=torch.zeros_like(block.gram[0]), solved=False, flagged=True, fair=False)


def joined_blocks(
    gram: Tensor, found: Directions, starts: Sequence[int], solve: BlockSolver, merge: bool
) -> list[Block]:
    """Directions of all layers; zero ones are combined with the next layer, the last one with the previous.

    From ``gram [L, m + h, m + h]`` on the CPU, directions of the ``L`` layers with all rows taken, and ``L + 1`` first
    columns of the layers. ``solve`` is for layers and blocks without a direction, ``merge`` allows to combine them.
    """
    blocks = [
        Block((layer,), starts[layer + 1] - starts[layer], gram[layer], coeff, bool(solved), fair=bool(fair))
        for layer, (coeff, solved, fair) in enumerate(zip(*found, strict=True))
    ]
    blocks = [block if block.solved else solve(block) for block in blocks]
    while merge and len(blocks) > 1 and not all(block.solved for block in blocks):
        index = min([block.solved for block in blocks].index(False), len(blocks) - 2)
        one, two = blocks[index : index + 2]
        joined = one._replace(
            layers=one.layers + two.layers, size=one.size + two.size, gram=one.gram + two.gram, solved=False
        )
        blocks[index : index + 2] = [solve(joined)]
    return [block if block.solved else solve(block, last=True) for block in blocks]
