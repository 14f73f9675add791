# SPDX-License-Identifier: Apache-2.0
"""What every partition must do."""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.arguments import checked, shown
from fl_lightning.data import Partition
from fl_lightning.testing.requiring import SEEDED, require, watched_generators

_SAMPLES, _CLASSES = 600, 10


@checked()
def check_partition(partition: Partition, labels: Tensor | None = None) -> None:
    """Checks that a partition deals every sample to one client, and the same way every time.

    Args:
        partition: what divides the data.
        labels: ``[n]`` labels to divide; default 600 of ten classes.

    Raises:
        AssertionError: it does not; the message says what is wrong.
        ValueError: ``labels`` are no vector.
    """
    if labels is not None and (labels.dim() != 1 or not len(labels)):
        raise ValueError(f"labels must be a vector of one label or more, found {shown(labels)}")
    kind = type(partition).__name__
    name = f"split of {kind}"
    dice = torch.Generator().manual_seed(0)
    given = torch.randint(_CLASSES, (_SAMPLES,), generator=dice) if labels is None else labels
    before = given.clone()
    with watched_generators(f"{name} draws from a generator that others share, or seeds it"):
        parts = partition.split(given, 1)
    listed = isinstance(parts, list) and bool(parts)
    require(listed, f"{name} must return a list with a vector per client, found {shown(parts)}")
    require(torch.equal(before, given), f"{name} changes the labels: copy them")
    for client, part in enumerate(parts):
        form = f"{list(part.shape)} of {part.dtype}" if isinstance(part, Tensor) else type(part).__name__
        right = isinstance(part, Tensor) and part.dim() == 1 and part.dtype == torch.int64
        require(right, f"{name} must return an int64 vector per client, found {form} for client {client}")
    every = torch.cat(parts)
    for sample in every[(every < 0) | (every >= len(given))].tolist():
        require(False, f"{name} deals sample {sample} of {len(given)}")
    times = torch.bincount(every, minlength=len(given))
    for sample in (times != 1).nonzero().flatten().tolist():
        found = f"sample {sample} with {int(times[sample])}"
        require(False, f"{name} must deal every sample to one client, found {found}")
    again = partition.split(given, 1)
    require(all(map(torch.equal, parts, again)), f"{name} divides otherwise the second time, with one seed: {SEEDED}")
    others = len(partition.split(given, 2))
    require(others == len(parts), f"{name} must have as many clients with every seed, found {len(parts)} and {others}")
    told = " at 0x" not in repr(partition)
    require(told, f"{kind} needs a __repr__, which checkpoints and reports compare: a dataclass has one")
