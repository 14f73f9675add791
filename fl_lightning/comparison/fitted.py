# SPDX-License-Identifier: Apache-2.0
"""What fits leave, as small files that are there as a whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.core.records import EvaluationRecord
from fl_lightning.report import ClientValues, FitRecord, RoundSeries, record_from_json, record_to_json
from fl_lightning.report.record_builder import RecordBuilder
from fl_lightning.report.runs_of_a_method import count_infinite


@dataclass(frozen=True)
class Fitted:
    """What a fit, or a run of several fits, leaves.

    Attributes:
        record: what a report shows of it, with the clients' values at its end.
        seconds: wall-clock seconds, also those before an interruption.
    """

    record: FitRecord
    seconds: float


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its place and moves it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.part")
    with scratch.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def write_fitted(path: Path, fitted: Fitted) -> None:
    """Writes one file."""
    write_text(path, f'{{"seconds":{fitted.seconds!r},"record":{record_to_json(fitted.record)}}}\n')


def read_fitted(path: Path) -> Fitted | None:
    """What :func:`write_fitted` wrote, or ``None`` if there is no such file.

    Raises:
        ValueError: it is damaged, or of another version.
    """
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Fitted(record_from_json(json.dumps(found["record"])), found["seconds"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is no file of a finished run ({error}): delete it, and the run is repeated"
        ) from error


def merged(fits: Mapping[int, FitRecord], names: tuple[str, ...], sizes: tuple[int, ...]) -> FitRecord:
    """One record of fits in which a client each was alone. A client that stopped early keeps its last values.

    Args:
        fits: by the client's id.
        names: of all clients.
        sizes: their training samples.
    """
    base = replace(
        next(iter(fits.values())), client_names=names, client_sizes=sizes, rounds=RoundSeries(), metrics=(),
        evaluations=(), weights=None, layer_conflicts=None, absences=(),
    )  # fmt: skip
    builder = RecordBuilder(base)
    for stage in ("val", "test"):
        found = {client: [v for v in fit.evaluations if v.stage == stage] for client, fit in fits.items()}
        for number in sorted({values.round for several in found.values() for values in several}):
            now = {client: [v for v in several if v.round <= number] for client, several in found.items()}
            last = {client: several[-1] for client, several in now.items() if several}
            builder.add_evaluation(_together(fits, last, number, stage, names))
    return builder.record()


def _together(
    fits: Mapping[int, FitRecord], last: Mapping[int, ClientValues], number: int, stage: str, names: tuple[str, ...]
) -> EvaluationRecord:
    metrics = {name: mode for values in last.values() for name, mode in values.modes.items()}
    return EvaluationRecord(
        round=number,
        stage=stage,
        client_ids=tuple(last),
        sizes=torch.tensor([values.sizes[0] for values in last.values()]),
        values={name: _vector(fits, last, name) for name in metrics},
        modes=metrics,
        client_names=tuple(names[client] for client in last),
    )


def _vector(fits: Mapping[int, FitRecord], last: Mapping[int, ClientValues], metric: str) -> Tensor:
    found = []
    for client, values in last.items():
        value = values.values.get(metric, (None,))[0]
        if value is None:
            infinite = metric in values.values and count_infinite(fits[client], values, metric) > 0
            value = float("nan") if not infinite else float("-inf" if values.modes[metric] == "max" else "inf")
        found.append(value)
    return torch.tensor(found, dtype=torch.float64)
