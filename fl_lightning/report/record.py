# SPDX-License-Identifier: Apache-2.0
"""What a report shows of one fit, as plain values that go through JSON and come back equal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Literal

from fl_lightning.arguments import TEXT, Bounds, checked
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.metrics.functional import Mode

VERSION = 1


_COUNTED = (
    "round", "clients", "step_norm", "conflicts", "drop_outs", "errors", "training_seconds", "server_seconds",
    "evaluation_seconds",
)  # fmt: skip


@checked(**dict.fromkeys(_COUNTED, Bounds(0)))
@dataclass(frozen=True)
class RoundSeries:
    """The rounds of a fit, ascending; all sequences have one entry per round. ``None`` stands for what is not finite.

    Attributes:
        round: index from 0.
        clients: clients whose updates were aggregated.
        train_loss: mean of the local training losses, weighted by samples.
        step_norm: Euclidean norm of the server's step.
        conflicts: clients in conflict with the step, on the whole model; ``None`` where nobody counted.
        drop_outs: clients that the sampler let drop out.
        errors: clients that were left out for any other reason.
        flagged: the method met a degenerate case and fell back.
        skipped: the round changed nothing.
        learning_rate: of the clients, at the beginning of the round; ``None`` without a single one.
        training_seconds: wall-clock seconds in which clients trained.
        server_seconds: wall-clock seconds in which the server aggregated.
        evaluation_seconds: wall-clock seconds of the validation that followed; 0 without one.
    """

    round: tuple[int, ...] = ()
    clients: tuple[int, ...] = ()
    train_loss: tuple[float | None, ...] = ()
    step_norm: tuple[float | None, ...] = ()
    conflicts: tuple[int | None, ...] = ()
    drop_outs: tuple[int, ...] = ()
    errors: tuple[int, ...] = ()
    flagged: tuple[bool, ...] = ()
    skipped: tuple[bool, ...] = ()
    learning_rate: tuple[float | None, ...] = ()
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


@checked(rows=TEXT, width=Bounds(1), counts=Bounds(0))
@dataclass(frozen=True)
class RoundTable:
    """Means per row and stretch of rounds; long fits have longer stretches, so that the table stays small.

    Attributes:
        rows: what the rows are called.
        width: rounds per stretch: column ``k`` stands for the rounds from ``k * width`` on.
        totals: per row and stretch, a sum.
        counts: per row and stretch, how many numbers are in the sum; the mean is total by count.
    """

    rows: tuple[str, ...]
    width: int
    totals: tuple[tuple[float, ...], ...]
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _check_lengths(self, {name: len(getattr(self, name)) for name in ("rows", "totals", "counts")})
        rows = {
            f"{name} of row {k}": len(row) for name in ("totals", "counts") for k, row in enumerate(getattr(self, name))
        }
        _check_lengths(self, rows or {"rows": 0})

    @property
    def means(self) -> tuple[tuple[float | None, ...], ...]:
        """``None`` where nothing was counted."""
        return tuple(
            tuple(total / count if count else None for total, count in zip(*both, strict=True))
            for both in zip(self.totals, self.counts, strict=True)
        )


@checked(columns=TEXT, counts=Bounds(0))
@dataclass(frozen=True)
class Holdings:
    """Which training samples the clients hold.

    Attributes:
        kind: what the columns are, ``"class"`` or ``"domain"`` for instance.
        columns: their names.
        counts: per client, samples in each column.
    """

    kind: str
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows = {f"counts[{client}]": len(row) for client, row in enumerate(self.counts)}
        _check_lengths(self, {"columns": len(self.columns), **rows})


@checked(count=Bounds(0), first_round=Bounds(0), last_round=Bounds(0), client_ids=Bounds(0))
@dataclass(frozen=True)
class Absence:
    """A reason why clients were sampled and left out.

    Attributes:
        reason: in words.
        drop_out: the sampler let them drop out; otherwise something was wrong.
        count: how often it happened.
        first_round: index of the first round of it.
        last_round: index of the last one.
        client_ids: the first clients it happened to.
    """

    reason: str
    drop_out: bool
    count: int
    first_round: int
    last_round: int
    client_ids: tuple[int, ...]


@checked(
    version=Bounds(VERSION, VERSION), division=Bounds(0), planned_rounds=Bounds(1), learning_rate=Bounds(0),
    client_names=TEXT, client_sizes=Bounds(0), memory=Bounds(0), command=TEXT, recording_seconds=Bounds(0),
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
        holdings: which classes or domains the clients hold, if the data say it.
        rounds: the rounds.
        metrics: each metric over the evaluations.
        evaluations: clients' values; of many evaluations some, the first and the last of each stage among them.
        weights: the weights that clients' updates had in the step, one row per client, counted where the client took
            part; ``None`` if the method reports none or there are too many clients.
        layer_conflicts: share of a round's clients in conflict with the step, one row per layer.
        absences: why clients were left out.
        memory: bytes that the fit needs beside the module, by name.
        recording_seconds: wall-clock seconds that recording and writing reports took.
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
    holdings: Holdings | None = None
    rounds: RoundSeries = field(default_factory=RoundSeries)
    metrics: tuple[MetricSeries, ...] = ()
    evaluations: tuple[ClientValues, ...] = ()
    weights: RoundTable | None = None
    layer_conflicts: RoundTable | None = None
    absences: tuple[Absence, ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict)
    recording_seconds: float = 0.0
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_lengths(self, {"client_names": len(self.client_names), "client_sizes": len(self.client_sizes)})

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
