# SPDX-License-Identifier: Apache-2.0
"""What a report shows of one fit, as plain values, and the same as JSON text and back.

The form is strict, so that a file of another form is refused and not half understood.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Any, Literal, get_args, get_type_hints

from fl_lightning.arguments import TEXT, Bounds, checked
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.metrics.functional import Mode

VERSION = 1

_COUNTED = ("round", "clients", "conflicts", "training_seconds", "server_seconds", "evaluation_seconds")


@checked(**dict.fromkeys(_COUNTED, Bounds(0)))
@dataclass(frozen=True)
class RoundSeries:
    """The rounds of a fit, ascending; all sequences have one entry per round. ``None`` stands for what is not finite.

    Attributes:
        round: index from 0.
        clients: clients whose updates were aggregated.
        train_loss: mean of the local training losses, weighted by samples.
        conflicts: clients in conflict with the step, on the whole model; ``None`` where nobody counted.
        training_seconds: wall-clock seconds in which clients trained.
        server_seconds: wall-clock seconds in which the server aggregated.
        evaluation_seconds: wall-clock seconds of the validation that followed; 0 without one.
    """

    round: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    train_loss: tuple[float | None, ...] = ()
    conflicts: tuple[int | None, ...] = ()
    training_seconds: tuple[float, ...] = ()
    server_seconds: tuple[float, ...] = ()
    evaluation_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_lengths(self, {entry.name: len(getattr(self, entry.name)) for entry in fields(self)})

    def __len__(self) -> int:
        return len(self.round)


@checked(rounds=Bounds(0))
@dataclass(frozen=True)
class MetricSeries:
    """One metric over all evaluations of a stage, summed up over the clients.

    Attributes:
        metric: the name under which the module logs it.
        stage: ``"val"`` or ``"test"``.
        mode: which values are good: ``"max"``, ``"min"``, or ``"abs"`` for those near 0.
        rounds: rounds finished at each evaluation, ascending.
        summaries: by name, a number per evaluation: ``mean``, ``weighted_mean``, ``std``, ``angle`` (radians),
            ``worst_5``, ``worst_10``, ``best_5``, ``best_10``, ``min``, ``max``, ``clients`` and ``undefined``, see
            :func:`fl_lightning.metrics.functional.fairness_summary`. ``None`` where there is none.
    """

    metric: str
    stage: Literal["val", "test"]
    mode: Mode
    rounds: tuple[int, ...]
    summaries: Mapping[str, tuple[float | None, ...]]

    def __post_init__(self) -> None:
        _check_lengths(self, {"rounds": len(self.rounds), **{name: len(v) for name, v in self.summaries.items()}})


@checked(round=Bounds(0), client_ids=Bounds(0), sizes=Bounds(0))
@dataclass(frozen=True)
class ClientValues:
    """Every client's values in one evaluation.

    Attributes:
        round: rounds finished when it ran.
        stage: ``"val"`` or ``"test"``.
        client_ids: clients with evaluation data, and those that train and have none, ascending.
        sizes: their evaluation samples.
        values: metric name to one value per client; ``None`` where a client has none.
        modes: metric name to which values are good: ``"max"``, ``"min"``, or ``"abs"`` for those near 0.
        one_class: metric name to clients all of whose samples got one class, as in :class:`EvaluationRecord`.
    """

    round: int
    stage: Literal["val", "test"]
    client_ids: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Mapping[str, tuple[float | None, ...]]
    modes: Mapping[str, Mode]
    one_class: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.values.items()}
        _check_lengths(self, {"client_ids": len(self.client_ids), "sizes": len(self.sizes), **lengths})
        if self.values.keys() != self.modes.keys():
            raise ValueError(f"modes of ClientValues must name {sorted(self.values)}, found {sorted(self.modes)}")

    @classmethod
    @checked()
    def of(cls, record: EvaluationRecord) -> ClientValues:
        """The values of an evaluation, ``strategy.last_evaluation`` for instance."""
        return cls(
            round=record.round,
            stage="val" if record.stage == "val" else "test",
            client_ids=record.client_ids,
            sizes=tuple(record.sizes.tolist()),
            values={name: tuple(map(finite, values.double().tolist())) for name, values in record.values.items()},
            modes={name: record.mode(name) for name in record.values},
            one_class=dict(record.one_class),
        )


@checked(count=Bounds(0), first_round=Bounds(0), last_round=Bounds(0), client_ids=Bounds(0))
@dataclass(frozen=True)
class Absence:
    """A reason why clients were sampled and left out.

    Attributes:
        reason: in words.
        count: how often it happened.
        first_round: index of the first round of it.
        last_round: index of the last one.
        client_ids: the first clients it happened to.
    """

    reason: str
    count: int
    first_round: int
    last_round: int
    client_ids: tuple[int, ...]


@checked(
    version=Bounds(VERSION, VERSION), division=Bounds(0), planned_rounds=Bounds(1), learning_rate=Bounds(0),
    client_names=TEXT, client_sizes=Bounds(0), class_names=TEXT, class_counts=Bounds(0), memory=Bounds(0), command=TEXT,
)  # fmt: skip
@dataclass(frozen=True)
class FitRecord:
    """Everything that a report shows of one fit.

    :class:`fl_lightning.callbacks.FitRecorder` makes it, during any fit. All entries but the method have defaults, for
    results that come from elsewhere: :func:`fl_lightning.report.write_report` leaves out the pictures that lack data.

    Attributes:
        method: what the method is called, such as ``"FedLF"`` or ``"FedHEAL with client=SCAFFOLD"``.
        seed: of the strategy.
        division: which division of the data among the clients, where a comparison has several.
        learning_rate: of the clients, in the first recorded round; ``None`` without a single one.
        is_bound: the fit is no method, but bounds what methods can reach: clients that train alone, or on all data.
        status: whether the fit ``"runs"``, is ``"finished"`` or was ``"interrupted"`` when the record was made.
        planned_rounds: rounds that the trainer's limits allow; ``None`` if they do not say.
        settings: options of the strategy that change results.
        arguments: by the rule's name, the arguments of the method.
        configuration: module, data and trainer, in plain values.
        versions: what ran, by name.
        command: the command line to run it again; empty if there is none.
        client_names: what people call the clients, by client id; those that have left come last.
        client_sizes: their training samples.
        class_names: what the classes of the data are called, if the data say it.
        class_counts: per client, training samples of each class.
        rounds: the rounds.
        metrics: each metric over the evaluations.
        evaluations: clients' values; of many evaluations some, the first and the last of each stage among them.
        absences: why clients were left out.
        memory: bytes that the fit needs beside the module, by name.
        version: of this form.
    """

    method: str
    seed: int | None = None
    division: int = 0
    learning_rate: float | None = None
    is_bound: bool = False
    status: Literal["runs", "finished", "interrupted"] = "finished"
    planned_rounds: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    client_names: tuple[str, ...] = ()
    client_sizes: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()
    class_counts: tuple[tuple[int, ...], ...] = ()
    rounds: RoundSeries = field(default_factory=RoundSeries)
    metrics: tuple[MetricSeries, ...] = ()
    evaluations: tuple[ClientValues, ...] = ()
    absences: tuple[Absence, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_lengths(self, {"client_names": len(self.client_names), "client_sizes": len(self.client_sizes)})
        rows = {f"class_counts[{client}]": len(row) for client, row in enumerate(self.class_counts)}
        _check_lengths(self, {"class_names": len(self.class_names), **rows})

    def last_values(self, stage: Literal["val", "test"] | None = None) -> ClientValues | None:
        """Clients' values in the last evaluation of a stage; by default of the test, or else of validation."""
        stages = ("test", "val") if stage is None else (stage,)
        return next((v for stage in stages for v in reversed(self.evaluations) if v.stage == stage), None)


def finite(value: float) -> float | None:
    """The number; ``None`` for one that is not finite."""
    return float(value) if isfinite(value) else None


def _check_lengths(owner: object, lengths: Mapping[str, int]) -> None:
    name, wanted = next(iter(lengths.items()))
    for other, length in lengths.items():
        if length != wanted:
            found = f"found {wanted} and {length}"
            raise ValueError(f"{name} and {other} of {type(owner).__name__} must be equally long, {found}")


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
    """The value with its dictionaries built, if the annotation is of a record or of several."""
    kind = next((kind for kind in (annotation, *get_args(annotation)) if is_dataclass(kind)), None)
    if kind is None:
        return value
    return [_built(kind, entry) for entry in value] if isinstance(value, list) else _built(kind, value)
