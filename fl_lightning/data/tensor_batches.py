# SPDX-License-Identifier: Apache-2.0
"""Batches of tensors in memory, gathered without asking a dataset for its samples one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

_CHUNK_BYTES = 16 * 2**20
"""Tensors are gathered for as many batches at once as fit in here: one gather is cheaper than one per batch."""

_SAMPLES = ("__getitem__", "__getitems__", "__len__", "__getattribute__")


def tensor_source(dataset: Dataset[Any]) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """The tensors behind a dataset and where its samples lie in them; ``None`` if samples must be asked one by one."""
    rows: Tensor | None = None
    while isinstance(dataset, Subset) and _gives_what(dataset, Subset):
        outer = torch.as_tensor(dataset.indices, dtype=torch.int64)
        rows = outer if rows is None else outer[rows]
        dataset = dataset.dataset
    if not (isinstance(dataset, TensorDataset) and _gives_what(dataset, TensorDataset)):
        return None
    if any(type(tensor) is not Tensor or tensor.layout != torch.strided for tensor in dataset.tensors):
        return None
    return dataset.tensors, rows


def _gives_what(dataset: Dataset[Any], kind: type) -> bool:
    """Whether a sample of a dataset is what ``kind`` makes of it, also where the dataset is of a subclass."""
    own = [name for name in _SAMPLES if getattr(type(dataset), name, None) is not getattr(kind, name, None)]
    return not own and not any(name in vars(dataset) for name in _SAMPLES)


def gathered(
    tensors: tuple[Tensor, ...], rows: Tensor | None, order: Tensor, cuts: list[int], pin: bool
) -> Iterator[tuple[Any, int]]:
    """Batches of these tensors and their sizes: the samples of ``order``, which ``rows`` places, cut at ``cuts``."""
    if rows is not None:
        order = rows[order]
    sizes = [stop - start for start, stop in pairwise(cuts)]
    if not sizes:
        return
    sample_bytes = sum(tensor.nbytes // max(len(tensor), 1) for tensor in tensors)
    group = max(1, _CHUNK_BYTES // max(sample_bytes * max(sizes), 1))
    for first in range(0, len(sizes), group):
        some = sizes[first : first + group]
        chosen = order[cuts[first] : cuts[first] + sum(some)]
        columns = [tensor.index_select(0, chosen.to(tensor.device)) for tensor in tensors]
        if pin:
            columns = pinned(columns)
        # Not views of one another for autograd: changing a batch in place leaves the other batches alone.
        pieces = [torch.unsafe_split_with_sizes(column, some) for column in columns]
        yield from zip(map(list, zip(*pieces, strict=True)), some, strict=True)


def pinned(columns: list[Tensor]) -> list[Tensor]:
    """These tensors in memory that GPUs copy from fastest, if there are GPUs."""
    if not torch.cuda.is_available():
        return columns
    return [column if column.is_cuda else column.pin_memory() for column in columns]
