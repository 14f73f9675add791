# SPDX-License-Identifier: Apache-2.0
"""Validates what comes over a network: how much of it there may be, and what is wrong with a message that is none.

Their classes say what fields may be. :func:`read` lets a message in, or says in one sentence why not. What reads
messages afterwards can rely on all of this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, Text, check, trusted
from fl_lightning.core.records import NAME, EvaluationRecord
from fl_lightning.federation.messages import LOSS, SAMPLES
from fl_lightning.report.number_formats import plural

FEDERATION = Text("1 to 32 hexadecimal digits", lambda text: re.fullmatch(r"[0-9a-f]{1,32}", text) is not None)
"""It becomes the name of a folder at every client."""
LARGEST = 1e30
"""Of an update and of extras, by absolute value: products of two such numbers and sums of many are finite."""
OUTLIER = 100
"""So many times the median; see :func:`outliers`."""
ENTRIES = 100_000
"""Of a message: all that lies in its lists and mappings, keys and tensors among it."""
COMPANIONS = 16
METRICS = 500
DEPTH = 12
"""Of lists and mappings in one another."""
CHARACTERS = 100_000
"""Of a string that is no name."""
STATE_ENTRIES = 10_000
"""Of what a module keeps in attributes and metrics, in one message."""
STATE_BYTES = 2**28
"""Of its tensors and arrays."""
SENTENCE = 1000
"""Characters of what a client says went wrong."""

M = TypeVar("M")


class MessageError(ValueError):
    """What is wrong with what somebody sent, as a sentence about it."""


def read(kind: type[M], found: object) -> M:
    """A message, from its fields as they arrived or as an object made of them; raises MessageError if it is none."""
    if isinstance(found, Mapping):
        _check_values(found)
        try:
            return kind(**found)
        except (TypeError, ValueError) as error:
            raise MessageError(f"the message is not whole: {printable(error)}") from error
    if not isinstance(found, kind):
        raise MessageError(f"the message must be a {kind.__name__} or its fields, found a {type(found).__name__}")
    _check_values(vars(found))
    return found


def loss(found: object) -> float:
    """A client's loss at parameters that the server asked for; raises MessageError unless it is a finite number."""
    try:
        return float(check("its loss", found, float, Bounds(LOSS.least, LOSS.most)))
    except (TypeError, ValueError) as error:
        raise MessageError(printable(error)) from error


def outliers(numbers: Mapping[int, float]) -> tuple[dict[int, float], float]:
    """Clients whose numbers must not set something for all others, with these, and what they are above."""
    most = OUTLIER * median(numbers.values()) if numbers else 0.0
    return {client: number for client, number in numbers.items() if number > most > 0}, most


def evaluation(found: object, client_id: int, index: int, stage: str) -> EvaluationRecord:
    """What one client has found on its own data of a stage after so many rounds; else raises MessageError."""
    record = read(EvaluationRecord, found)
    if (record.client_ids, record.round, record.stage) != ((client_id,), index, stage):
        raise MessageError(
            f"it has evaluated clients {printable(record.client_ids)} after {plural(record.round, 'round')}"
        )
    if len(record.values) > METRICS:
        raise MessageError(f"it must send at most {METRICS} metrics, found {len(record.values)}")
    for name in (*record.values, *record.undefined, *record.modes, *record.one_class):
        if not NAME.admits(name):
            raise MessageError(f"names of metrics must have {NAME.wanted}, found {printable(name)}")
    numbers = {"sizes": record.sizes, **record.values}
    odd = [name for name, value in numbers.items() if value.shape != (1,) or value.is_complex()]
    if odd:
        raise MessageError(
            f"{odd[0]!r} of its evaluation must be one number, found {printable(list(numbers[odd[0]].shape))}"
        )
    size = float(record.sizes[0])
    if not SAMPLES.admits(size):
        raise MessageError(f"the size of its evaluation data must be {SAMPLES.words(True)}, found {size}")
    told = {name: by[client_id] for name, by in record.undefined.items() if client_id in by}
    reasons = {name: {client_id: printable(words)} for name, words in told.items()}
    values = {name: value.double() for name, value in record.values.items()}
    one_class = {name: (client_id,) for name, some in record.one_class.items() if client_id in some}
    return trusted(EvaluationRecord)(
        index, stage, (client_id,), record.sizes.to(torch.int64), values, reasons, record.modes, one_class=one_class
    )


def printable(words: object) -> str:
    """Somebody's words as a line of a log: printable, and no longer than :data:`SENTENCE`."""
    text = str(words)[: SENTENCE + 1]
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= SENTENCE else f"{text[:SENTENCE]}..."


def _check_values(message: Mapping[Any, object]) -> None:
    """Raises MessageError if a message has other values than tensors, numbers, strings, lists and mappings."""
    waiting: list[tuple[object, int]] = [(message, 0)]
    seen = 0
    while waiting:
        value, depth = waiting.pop()
        entries: list[object] = []
        if isinstance(value, Tensor):
            _check_tensor(value)
        elif isinstance(value, Mapping):
            entries = [entry for pair in value.items() for entry in pair]
        elif isinstance(value, (list, tuple)):
            entries = list(value)
        elif isinstance(value, str):
            if len(value) > CHARACTERS:
                raise MessageError(
                    f"the message's strings must have at most {CHARACTERS} characters, found {len(value)}"
                )
        elif not isinstance(value, (type(None), bool, int, float)):
            raise MessageError(
                "the message must hold tensors, numbers, strings, lists and mappings of them, found a "
                f"{type(value).__name__}"
            )
        seen += len(entries)
        if depth > DEPTH or seen > ENTRIES:
            raise MessageError(
                f"the message must have at most {ENTRIES} entries, {DEPTH} deep in one another, found more"
            )
        waiting += [(entry, depth + 1) for entry in entries]


def _check_tensor(value: Tensor) -> None:
    kind = value.layout == torch.strided and not value.is_quantized and value.device.type != "meta"
    plain = kind and not value.requires_grad
    # An expanded tensor says that it is large and takes no memory, until somebody copies it.
    if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise MessageError(
            "the message's tensors must be dense, without gradients, each in memory of its own, found another kind"
        )
