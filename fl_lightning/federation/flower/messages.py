# SPDX-License-Identifier: Apache-2.0
"""What goes over Flower's messages, beside the messages of ``federation/messages.py``, and how records hold it.

Tensors go in one ArrayRecord, everything else as JSON in one ConfigRecord. Nothing is pickled, and nothing is
unpickled. Records hold raw bytes, and a value is rebuilt from a short list of kinds: no reader of a file format ever
sees what came over the network.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Literal, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.federation.message_checks import FEDERATION, MessageError, evaluation, printable, read
from fl_lightning.federation.messages import ClientMessage
from fl_lightning.lightning.module.plain_values import DTYPES

HELLO, LOSS = "hello", "loss"
"""Actions of a query: an introduction, and a loss at other parameters."""
FAILED = 100
"""Code of the error that a client app answers with; the reason says what was raised."""


@checked(num_clients=Bounds(1, 10**9), federation=FEDERATION)
@dataclass(frozen=True)
class Origin:
    """What every message of a server says beside its own."""

    num_clients: int
    federation: str  # its name


@checked()
@dataclass(frozen=True)
class Order:
    """What a client is to do with a round's message."""

    trains: bool
    stages: tuple[Literal["val", "test"], ...]  # to evaluate on before, each once
    evaluated: Tensor | None  # [n]; None: those of the message

    def __post_init__(self) -> None:
        if len(set(self.stages)) < len(self.stages):
            raise ValueError(f"stages must be different, found {len(self.stages)}")


@checked()
@dataclass(frozen=True)
class Answer:
    """A client's answer to a round's message."""

    trained: Mapping[str, Any] | None  # fields of its :class:`ClientMessage`; None if it was only to evaluate
    evaluations: Sequence[Mapping[str, Any]]  # fields of records

    @classmethod
    def of(cls, trained: ClientMessage | None, evaluations: Sequence[EvaluationRecord]) -> Answer:
        """The answer with these parts."""
        return cls(None if trained is None else vars(trained), [vars(record) for record in evaluations])

    def evaluation(self, client_id: int, index: int, stage: str) -> EvaluationRecord | None:
        """What the client has found in a stage; ``None`` without data of it."""
        for found in self.evaluations:
            if found.get("stage") == stage:
                return evaluation(found, client_id, index, stage)
        return None


@dataclass(frozen=True)
class Nothing:
    """A message without fields of its own."""


@dataclass(frozen=True)
class Loss:
    """A client's loss at the parameters that it was sent; the server validates it."""

    loss: Any


# ---- as Flower's records

ARRAYS, FIELDS = "arrays", "fields"
_RAW = "torch.bytes"
_FORMAT = 2
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}
_KINDS: dict[str, Callable[..., Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_PLAIN = (type(None), bool, int, float, str)
_M = TypeVar("_M")


def packed(message: object, **besides: Any) -> RecordDict:
    """Writes the fields of a dataclass, and further values, as a Flower record; a TypeError says where others lie."""
    tensors: dict[str, Tensor] = {}
    own = {entry.name: getattr(message, entry.name) for entry in fields(message)}  # type: ignore[arg-type]
    tree = {name: _written(value, name, tensors) for name, value in {**own, **besides}.items()}
    arrays = ArrayRecord({name: _array(tensor) for name, tensor in tensors.items()})
    return RecordDict({ARRAYS: arrays, FIELDS: ConfigRecord({"format": _FORMAT, "json": json.dumps(tree)})})


def unpacked(record: RecordDict) -> dict[str, Any]:
    """The values by name; raises MessageError for a record that :func:`packed` has not written."""
    try:
        config, arrays = record[FIELDS], record[ARRAYS]
        written = config["format"]
        if written == _FORMAT:
            return {name: _read(value, arrays) for name, value in json.loads(str(config["json"])).items()}
    except Exception as error:  # of values of any kind in the place of others
        raise MessageError(f"the message cannot be read ({type(error).__name__}: {printable(error)})") from error
    raise MessageError(
        f"the message has form {printable(written)}, and this fl_lightning reads form {_FORMAT}: use one version"
    )


def taken(kind: type[_M], values: dict[str, Any]) -> _M:
    """A message of a kind from :func:`unpacked` values, of which its fields are taken out."""
    return read(kind, {entry.name: values.pop(entry.name) for entry in fields(kind) if entry.name in values})  # type: ignore[arg-type]


def _written(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        while where in tensors:  # names may hold dots of their own
            where += "'"
        tensors[where] = value
        return {"tensor": where}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_written(entry, f"{where}.{place}", tensors) for place, entry in enumerate(value)]}
    if isinstance(value, Mapping):
        kind = type(value).__name__ if type(value).__name__ in _KINDS else "dict"
        if all(type(key) in _PLAIN for key in value):
            return {kind: [[key, _written(entry, f"{where}.{key}", tensors)] for key, entry in value.items()]}
    raise TypeError(f"{where} must hold tensors, numbers, strings, and lists or dicts of them, found {value!r}")


def _read(value: Any, arrays: Mapping[str, Array]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _tensor(arrays[content])
    if kind in ("list", "tuple"):
        entries = [_read(entry, arrays) for entry in content]
        return entries if kind == "list" else tuple(entries)
    return _KINDS[kind]({key: _read(entry, arrays) for key, entry in content})


def _array(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"tensors of a message must be of {', '.join(_DTYPES)}, found {dtype}")
    return Array(dtype, tuple(tensor.shape), _RAW, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def _tensor(array: Array) -> Tensor:
    """A tensor in memory of PyTorch, which starts at 64-byte boundaries; never larger than what came."""
    dtype, shape, data = _DTYPES[array.dtype], list(array.shape), array.data
    if array.stype != _RAW or any(length < 0 for length in shape) or len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of {array.dtype} and shape {shape} came as {len(data)} bytes of {array.stype}")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.clone().view(shape)
