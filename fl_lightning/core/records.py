# SPDX-License-Identifier: Apache-2.0
"""Frozen records of what a round did and what an evaluation saw, and names of clients; logs read these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fl_lightning.arguments import Bounds, Text, checked, trusted
from fl_lightning.metrics.functional import Mode, fairness_summary, guessed_mode


@checked(
    round=Bounds(0), train_loss=Bounds(finite=False), step_norm=Bounds(0, finite=False), conflicts=Bounds(0),
    layer_conflicts=Bounds(0), scalars=Bounds(finite=False), seconds=Bounds(0), skipped_rounds=Bounds(0),
    local_steps=Bounds(0), training_seconds=Bounds(0),
)  # fmt: skip
@dataclass(frozen=True)
class RoundRecord:
    """One finished communication round.

    Attributes:
        round: index from 0.
        client_ids: clients whose updates were aggregated.
        dropped: clients that were sampled but left out, with the reason.
        train_loss: sample-weighted mean of the local training losses; NaN if nothing reported one.
        losses: ``[m]`` losses at the global parameters before training, if the rule asked for them.
        step_norm: Euclidean norm of the server's step.
        update_norms: ``[m]`` Euclidean norms of the updates.
        conflicts: clients whose update has a negative inner product with the step, on the whole model; ``None`` if they
            were not counted.
        layer_conflicts: the same count per layer, by layer name; empty if they were not counted.
        flagged: the rule met a degenerate case and fell back.
        weights: ``[m]`` weights of the updates in the step, if the rule reports them.
        scalars: further numbers that the rule reports.
        seconds: wall-clock seconds of the round, validation excluded.
        skipped: why the round changed nothing, ``"2 usable reports, fewer than min_clients=3"`` for instance, or what
            would not have been finite; ``None`` if it counts.
        local_steps: optimizer steps of the fit so far, added up over the clients whose updates were used.
        skipped_rounds: how many rounds of the fit have changed nothing so far, this one included.
        client_names: what people call the clients of ``client_ids``.
        training_seconds: how many of the ``seconds`` passed before the last client had trained.
    """

    round: int
    client_ids: tuple[int, ...]
    dropped: Mapping[int, str]
    train_loss: float
    losses: Tensor | None
    step_norm: float
    update_norms: Tensor
    conflicts: int | None
    layer_conflicts: Mapping[str, int]
    flagged: bool
    weights: Tensor | None
    scalars: Mapping[str, float]
    seconds: float
    skipped: str | None = None
    skipped_rounds: int = 0
    client_names: tuple[str, ...] = ()
    local_steps: int = 0
    training_seconds: float = 0.0


@checked(round=Bounds(0))
@dataclass(frozen=True)
class EvaluationRecord:
    """Per-client values of one validation or test run.

    Attributes:
        round: rounds finished when it ran.
        stage: ``"val"`` or ``"test"``.
        client_ids: clients that have evaluation data, and those that train and have none, ascending.
        sizes: ``[N]`` evaluation samples of these clients (int64).
        values: metric name to ``[N]`` float64 values; NaN where a client has none.
        undefined: metric name to the clients for which it is undefined, and why.
        modes: metric name to which values are good: ``"max"``, ``"min"``, or ``"abs"`` for those near 0.
        client_names: what people call the clients of ``client_ids``.
        one_class: metric name to the clients all of whose samples were given one class though they are of several. Only
            metric objects that count by class tell.
    """

    round: int
    stage: str
    client_ids: tuple[int, ...]
    sizes: Tensor
    values: Mapping[str, Tensor]
    undefined: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    modes: Mapping[str, Mode] = field(default_factory=dict)
    client_names: tuple[str, ...] = ()
    one_class: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.client_names:
            object.__setattr__(self, "client_names", tuple(map(str, self.client_ids)))

    @checked()
    def mode(self, metric: str) -> Mode:
        """Which values of a metric are good; by its name where nothing else is known."""
        return self.modes.get(metric) or trusted(guessed_mode)(metric)

    @checked()
    def summary(self, metric: str, mode: Mode | None = None) -> Mapping[str, Tensor]:
        """How a metric is spread over the clients: :func:`fl_lightning.metrics.functional.fairness_summary`.

        Signed gaps count by their size.

        Args:
            metric: its name.
            mode: which of its values are good; default :meth:`mode`.
        """
        mode = self.mode(metric) if mode is None else mode
        values = self.values[metric].abs() if mode == "abs" else self.values[metric]
        return trusted(fairness_summary)(values, self.sizes, larger_is_better=mode == "max")

    @checked()
    def ranking(self, metric: str, mode: Mode | None = None) -> Tensor:
        """``[N]`` numbers that are the larger the better a client fares; NaN where it has no value."""
        values, mode = self.values[metric], self.mode(metric) if mode is None else mode
        return values if mode == "max" else -(values.abs() if mode == "abs" else values)


def round_metrics(record: RoundRecord, listed: int = 100) -> Mapping[str, float]:
    """The numbers of a round under the names of docs/logged.md; per-client ones for at most ``listed`` clients."""
    metrics: dict[str, Any] = {
        "fed/train_loss": record.train_loss,
        "fed/step_norm": record.step_norm,
        "fed/update_norm": float(record.update_norms.mean()) if record.client_ids else 0.0,
        "fed/flagged": float(record.flagged),
        "fed/clients": len(record.client_ids),
        "fed/dropped": len(record.dropped),
        "fed/local_steps": record.local_steps,
        "fed/skipped_rounds": record.skipped_rounds,
        "fed/seconds": record.seconds,
    }
    if record.conflicts is not None:
        metrics["fed/conflicts"] = record.conflicts
    metrics |= {f"fed/conflicts_in/{name}": count for name, count in record.layer_conflicts.items()}
    if record.losses is not None:
        metrics["fed/start_loss"] = float(record.losses.mean())
        metrics["fed/start_loss_max"] = float(record.losses.max())
    if record.weights is not None:
        weights = record.weights.tolist()
        metrics |= {"fed/weight/min": min(weights), "fed/weight/max": max(weights)}
        if len(weights) <= listed:
            metrics |= {f"fed/client/{slot}": client for slot, client in enumerate(record.client_ids)}
            metrics |= {f"fed/weight/{slot}": weight for slot, weight in enumerate(weights)}
    return metrics | {f"fed/{name}": value for name, value in record.scalars.items()}


# ---- what people call the clients; numbers stay the keys of everything that is kept


def _fits_tables(name: str) -> bool:
    begins = name[:1] in "=+-@" and not name[1:].replace(".", "", 1).isdecimal()
    return 0 < len(name) <= 200 and name.isprintable() and not begins


NAME = Text(
    "1 to 200 printable characters that do not begin with =, +, - or @, as formulas of spreadsheets do", _fits_tables
)
"""What a client or a method may be called, because names stand in tables and files."""


class _Numbers(Sequence[str]):
    """``"0"``, ``"1"`` and so on: nothing is stored for clients without names."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, client_id: int) -> str:  # type: ignore[override]
        return str(range(self._count)[client_id])


def numbered(count: int) -> Sequence[str]:
    """The names of clients that have numbers only."""
    return _Numbers(count)


def client_label(client_id: int, names: Sequence[str]) -> str:
    """How a message speaks of a client: its number, and its name if that is another one."""
    return named(client_id, names[client_id])


def named(client_id: int, name: str) -> str:
    """A client's number, and its name if that is another one."""
    return str(client_id) if name == str(client_id) else f"{client_id} ({name!r})"
