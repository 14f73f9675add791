# SPDX-License-Identifier: Apache-2.0
"""What the processes of a fit begin with alike, and what each of them keeps to itself."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from fl_lightning.core.modules import submodules
from fl_lightning.lightning.ranks import Ranks


def broadcast_random_state(ranks: Ranks) -> None:
    """Gives all ranks the random state of the first."""
    python, numeric, generator = ranks.broadcast((random.getstate(), np.random.get_state(), torch.get_rng_state()))
    random.setstate(python)
    np.random.set_state(numeric)
    torch.set_rng_state(generator)
    if ranks.device.type == "cuda":
        torch.cuda.set_rng_state(ranks.broadcast(torch.cuda.get_rng_state(ranks.device)), ranks.device)


def broadcast_module(ranks: Ranks, module: nn.Module) -> None:
    """Overwrites all parameters and buffers with those of the first rank; all must have the same ones."""
    named = [*module.named_parameters(), *module.named_buffers()]
    found = ranks.gather([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named])
    for rank, tensors in enumerate(found):
        if tensors != found[0]:
            first, other = next(pair for pair in zip_longest(found[0], tensors) if pair[0] != pair[1])
            raise ValueError(
                f"all ranks must have the same parameters and buffers, found that rank {rank} has {other} where "
                f"rank 0 has {first}"
            )
    with torch.no_grad():
        for _, tensor in named:
            whole = tensor.data.contiguous()
            dist.broadcast(whole, 0)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.data.copy_(whole)


@contextmanager
def unsynced_metrics(module: nn.Module) -> Iterator[None]:
    """Keeps torchmetrics in a module from joining what other ranks hold, which may be at other clients."""
    changed = [(m, m.distributed_available_fn) for _, m in submodules(module) if isinstance(m, Metric)]
    for metric, _ in changed:
        metric.distributed_available_fn = _alone
    try:
        yield
    finally:
        for metric, available in changed:
            metric.distributed_available_fn = available


@contextmanager
def epoch_logs_quiet() -> Iterator[None]:
    """Silences Lightning's advice to average logged values over ranks: they are those of all clients already."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True")
    own = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):  # somebody has reset the filters
            warnings.filters.remove(own)  # type: ignore[attr-defined]


def _alone() -> bool:
    return False
