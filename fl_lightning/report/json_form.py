# SPDX-License-Identifier: Apache-2.0
"""Records as JSON text, and back: strict, so that a file of another form is refused and not half understood."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from fl_lightning.arguments import TEXT, checked
from fl_lightning.report.record import VERSION, FitRecord


@checked()
def record_to_json(record: FitRecord) -> str:
    """The record as one JSON object, with a key per attribute.

    Raises:
        ValueError: ``settings``, ``arguments`` or ``configuration`` hold NaN or infinity, which JSON does not know.
    """
    return json.dumps(record, default=_entries, allow_nan=False, separators=(",", ":"))


@checked(text=TEXT)
def record_from_json(text: str) -> FitRecord:
    """What :func:`record_to_json` returned.

    Raises:
        TypeError: a value is of another kind.
        ValueError: the text is no JSON, has another version, lacks a key, has one too many, or a value out of range.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"text of record_from_json must be JSON, found {text[:40]!r}: {error}") from error
    version = found.get("version") if isinstance(found, Mapping) else None
    if version != VERSION:
        raise ValueError(f"the record of a fit must have version {VERSION}, found {version!r}")
    record: FitRecord = _built(FitRecord, found)
    return record


def _entries(record: Any) -> dict[str, Any]:
    if not is_dataclass(record):
        raise TypeError(f"a record must hold plain values, found {type(record).__name__}")
    return {entry.name: getattr(record, entry.name) for entry in fields(record)}


def _built(cls: Any, found: Any) -> Any:
    names = [entry.name for entry in fields(cls)]
    keys = sorted(found) if isinstance(found, Mapping) else found
    if keys != sorted(names):
        raise ValueError(f"{cls.__name__} must be an object with the keys {sorted(names)}, found {keys}")
    hints = _hints(cls)
    return cls(**{name: _nested(hints[name], found[name]) for name in names})


_hints = cache(get_type_hints)


def _nested(annotation: Any, value: Any) -> Any:
    """The value with its dictionaries built, if the annotation is of a record, several or perhaps one."""
    kinds = [kind for kind in (annotation, *get_args(annotation)) if is_dataclass(kind)]
    if not kinds or value is None:
        return value
    return [_built(kinds[0], entry) for entry in value] if isinstance(value, list) else _built(kinds[0], value)
