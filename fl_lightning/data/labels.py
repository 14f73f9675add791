# SPDX-License-Identifier: Apache-2.0
"""Finds one integer label per sample without touching the samples where that can be avoided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from fl_lightning.arguments import ANY, FILLED, checked, has_numbers, shown
from fl_lightning.core.seeding import isolated
from fl_lightning.lightning.names import rank_zero_info

Labels = Tensor | Sequence[int] | Callable[[Any], int] | str
"""Labels themselves, a function from a sample to its label, or the name of the dataset's attribute."""

_HINT = (
    "pass labels= as a function of a sample or as an attribute's name (for training data alone a vector will do), or "
    "evaluation='shared', which needs none"
)
_LABEL_KEYS = ("label", "labels", "target", "targets")


def num_samples(dataset: object, name: str = "dataset") -> int:
    """Length of a map-style dataset, which errors call by its name."""
    try:
        readable = not isinstance(dataset, Tensor) or has_numbers(dataset)
        if readable and isinstance(dataset, Sized) and not isinstance(dataset, (str, type, IterableDataset)):
            return len(dataset)
    except TypeError:  # a tensor without dimensions
        pass
    raise TypeError(f"{name} must have a length and integer indices, found {shown(dataset)}")


def integer_vector(name: str, values: Any, flags: bool = True) -> Tensor:
    """``[n]`` int64, on the device of ``values``."""
    try:
        vector: Tensor | None = torch.as_tensor(values)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        vector = None
    if vector is not None and has_numbers(vector) and vector.dim() == 1:
        other = vector.is_floating_point() or vector.is_complex() or (vector.dtype is torch.bool and not flags)
        if not other or vector.numel() == 0:
            return vector.to(torch.int64)
    raise ValueError(f"{name} must be a vector of integers, found {shown(values)}")


@checked(dataset=ANY, labels=FILLED)
def labels_of(dataset: Dataset[Any], labels: Labels | None = None) -> Tensor:
    """One integer label per sample.

    The first of these that applies: the ``labels`` argument; an attribute ``targets`` or ``labels`` with one entry per
    sample, also behind ``Subset`` and ``ConcatDataset``; the last of a ``TensorDataset``'s two or more tensors; one
    pass over the data, which takes the last item of a tuple or the entry ``"label"`` (``"labels"``, ``"target"``,
    ``"targets"``) of a dict. A pass leaves the global random generators as they were and says how much it read.

    Args:
        dataset: a map-style dataset.
        labels: a vector, a function from a sample to its label, or an attribute's name.

    Returns:
        ``[n]`` int64 on the CPU; a column ``[n, 1]`` of labels counts as a vector.

    Raises:
        ValueError: no label was found, the labels are not integers, or their number differs from the samples'.
    """
    return _labels_of(dataset, labels, type(dataset).__name__)


def _labels_of(dataset: Dataset[Any], labels: Labels | None, name: str) -> Tensor:
    n = num_samples(dataset)
    if isinstance(labels, str):
        values, what = attribute_of(dataset, labels), f"attribute {labels!r} of {name}"
    elif callable(labels):
        values, what = _read(dataset, labels, name), f"labels(sample) over {name}"
    elif labels is not None:
        values, what = _array(labels), "labels"
    else:
        known, what = _known(dataset), f"the labels of {name}"
        values = _read(dataset, partial(_label_of_sample, name=name), name) if known is None else known
    if n > 0 and values.shape[:1] == (n,) and values.size == n:
        values = values.reshape(n)  # tables often keep their target as a column
    if values.shape != (n,) or (n > 0 and values.dtype.kind not in "biu"):
        raise ValueError(
            f"{what} must be a vector of {n} integers, found {values.dtype} of shape {list(values.shape)}: {_HINT}"
        )
    return torch.from_numpy(np.array(values, dtype=np.int64))


def labels_at_hand(dataset: object) -> np.ndarray[Any, Any] | None:
    """A vector of one label of any kind per sample, if that takes no pass over the data, else ``None``."""
    try:
        found = _known(dataset)
    except Exception:  # an attribute of this name may be anything
        return None
    return found if found is not None and found.ndim == 1 else None


def attribute_of(dataset: object, name: str) -> np.ndarray[Any, Any]:
    """Values of an attribute with one entry per sample, also behind ``Subset`` and ``ConcatDataset``."""
    found = _column(dataset, name)
    if found is None:
        raise ValueError(
            f"dataset must have an attribute {name!r} with {num_samples(dataset)} entries, found none in "
            f"{type(dataset).__name__}: name another one, or pass a function"
        )
    return found


class Samples:
    """A dataset as partitions see it: how many samples, of which stage, and their labels on demand.

    Args:
        dataset: a map-style dataset.
        stage: ``"train"``, ``"val"`` or ``"test"``.
        labels: see :func:`labels_of`.
    """

    @checked(dataset=ANY, labels=FILLED)
    def __init__(self, dataset: Dataset[Any], stage: str, labels: Labels | None = None) -> None:
        num_samples(dataset)
        self.dataset = dataset
        self.stage = stage
        kind = type(dataset).__name__
        self._given, self._name = labels, kind if stage == "train" else f"the {stage} data ({kind})"

    def __len__(self) -> int:
        return num_samples(self.dataset)

    @cached_property
    def labels(self) -> Tensor:
        """``[n]`` int64 labels, looked up once."""
        return _labels_of(self.dataset, self._given, self._name)

    @property
    def labels_known(self) -> bool:
        """Whether :attr:`labels` takes no pass over the data."""
        known = labels_at_hand(self.dataset) if self._given is None else None
        return "labels" in vars(self) or (known is not None and known.dtype.kind in "biu")


def _known(dataset: object) -> np.ndarray[Any, Any] | None:
    """Labels that take no pass over the data."""
    return _column(dataset, "targets", "labels", last_tensor=True)


def _column(dataset: object, *names: str, last_tensor: bool = False) -> np.ndarray[Any, Any] | None:
    """The first attribute with an entry per sample, perhaps the last tensor; also behind torch's wrappers."""
    found = next((own for name in names if (own := _own(dataset, name)) is not None), None)
    if found is not None:
        return found
    if isinstance(dataset, Subset):
        inner = _column(dataset.dataset, *names, last_tensor=last_tensor)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_column(part, *names, last_tensor=last_tensor) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if last_tensor and isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return _array(dataset.tensors[-1])
    return None


def _own(dataset: object, name: str) -> np.ndarray[Any, Any] | None:
    value = getattr(dataset, name, None)
    # A list of class names is often called `labels` too: only one entry per sample counts.
    if isinstance(value, (str, Mapping)) or not isinstance(value, Sized) or isinstance(dataset, type):
        return None
    if isinstance(value, Tensor) and value.dim() == 0:
        return None
    return _array(value) if len(value) == num_samples(dataset) else None


def _read(dataset: Any, label: Callable[[Any], Any], name: str) -> np.ndarray[Any, Any]:
    n = num_samples(dataset)
    rank_zero_info(f"Reading {n} samples of {name} once for their labels; to avoid it, {_HINT}.")
    # Random transforms would otherwise move the generators that training draws from.
    with isolated(0, torch.device("cpu")):
        return _array([label(_sample(dataset, index, name)) for index in range(n)])


def _sample(dataset: Any, index: int, name: str) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        raise ValueError(
            f"sample {index} of {name} cannot be read for its label ({type(error).__name__}: {error}): leave it out, "
            f"or {_HINT}"
        ) from error


def _label_of_sample(sample: Any, name: str) -> Any:
    found = type(sample).__name__
    if isinstance(sample, Mapping):
        keys = [key for key in _LABEL_KEYS if key in sample]
        if keys:
            return sample[keys[0]]
        found = f"the keys {sorted(map(str, sample))}"
    elif isinstance(sample, (tuple, list)) and len(sample) > 1:
        return sample[-1]
    raise ValueError(f"labels must be found in each sample of {name}, found only {found}: {_HINT}")


def _array(values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, Tensor):
        return np.asarray(values.detach().cpu())
    try:
        found = np.asarray(values)
    except ValueError:
        return np.fromiter(values, dtype=object, count=len(values))
    # Beside text, numpy makes text of everything: a missing key, NaN, would be called "nan", and 1 be the client "1".
    mixed = found.dtype.kind in "US" and not isinstance(values, np.ndarray)
    if mixed and not all(isinstance(value, (str, bytes)) for value in values):
        return np.fromiter(values, dtype=object, count=len(values))
    return found
