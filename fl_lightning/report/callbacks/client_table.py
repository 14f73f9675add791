# SPDX-License-Identifier: Apache-2.0
"""Every client's numbers: a CSV file over the rounds, and a table at the end of a test."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fl_lightning.arguments import Example, checked
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.lightning.logged_values import hand_over, run_folder
from fl_lightning.lightning.names import Callback, LightningModule, Trainer
from fl_lightning.report.callbacks._federated import evaluation, federated_strategy, is_fitting, is_fresh_fit
from fl_lightning.report.number_formats import plural

COLUMNS = ("round", "stage", "client", "samples", "metric", "value", "name")
_SUMMARY = {
    "mean": "mean", "weighted_mean": "weighted mean", "std": "std", "angle": "angle (rad)", "worst_5": "worst 5 %",
    "worst_10": "worst 10 %", "best_5": "best 5 %", "best_10": "best 10 %", "min": "min", "max": "max",
}  # fmt: skip
_LISTED, _ENDS = 40, 10  # clients that are all listed, and of more so many at each end
_FEW = 10
"""Samples: a client with fewer is noted, because one of its samples moves its accuracy by more than a tenth."""


class ClientTable(Callback):
    """Writes per-client values to ``clients.csv`` and prints a table after ``trainer.test``.

    The file has one row per client and metric: round, stage, client, samples, metric, value, and the client's name.
    Rows are appended. A fit that resumes first drops the rows of the round in hand and of later ones, which an
    interrupted run left; a fresh fit drops those of all rounds from 1 on; a repeated test or validation replaces its
    own rows. With ``fast_dev_run`` nothing is written.

    At the end of a fit, a validation and a test the file also goes to MLflow and W&B as an artifact, and the table to
    TensorBoard as a text.

    Args:
        dirpath: folder of the file; by default that of the first logger's run. Without either no file is written.
        artifact: whether loggers that keep files and texts get the table.

    Raises:
        ValueError: in a fit, ``clients.csv`` is a file of some other kind.
    """

    @checked()
    def __init__(self, dirpath: str | Path | None = None, artifact: bool = True) -> None:
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.artifact = artifact
        self._fresh = False
        self._tail: tuple[Path, int] | None = None  # file and round of the last rows that this fit wrote
        self._written: tuple[Path, EvaluationRecord] | None = None  # what loggers have not got yet

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses strategies that are not federated."""
        federated_strategy(trainer, self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Notes whether the fit continues an earlier one."""
        self._fresh, self._tail = is_fresh_fit(trainer), None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the clients' validation values."""
        record = evaluation(trainer, self, "val")
        if record is not None:
            self._write(trainer, record)
            if not is_fitting(trainer):
                self._hand_over(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the table to loggers."""
        self._hand_over(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the clients' test values, prints the table and gives it to loggers."""
        record = evaluation(trainer, self, "test")
        if record is not None:
            self._write(trainer, record)
            trainer.print(format_client_table(record))
            self._hand_over(trainer)

    def _hand_over(self, trainer: Trainer) -> None:
        if self.artifact and self._written is not None:
            path, record = self._written
            text = format_client_table(record)
            hand_over(trainer, path, f"clients/{record.stage}", text, record.round)
        self._written = None

    def _write(self, trainer: Trainer, record: EvaluationRecord) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # Trainer sets it outside its class
            return
        folder = run_folder(trainer) if self.dirpath is None else self.dirpath
        if folder is None or not trainer.is_global_zero:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path, fitting = folder / "clients.csv", is_fitting(trainer)
        # Within a fit rounds ascend, so a long file is read once per fit and not once per round.
        continues = fitting and self._tail is not None and self._tail[0] == path and self._tail[1] < record.round
        if path.exists() and not continues:
            abandoned = None
            if fitting:
                abandoned = min(1, record.round) if self._fresh and self._tail is None else record.round
            _drop_rows(path, record, abandoned)
        _append_rows(path, record)
        self._written = path, record
        if fitting:
            self._tail = (path, record.round)


@checked(record=Example("strategy.last_evaluation after a validation or a test"))
def format_client_table(record: EvaluationRecord) -> str:
    """Lays out the clients' values and their summary as aligned plain text.

    Where 5 % of the clients are one, that is the worst or best client, who has the least and the largest value. Clients
    with fewer than 10 samples are noted below. Of more than 40 clients, the worst 10 and the best 10 are listed by the
    first metric where larger is better (or else the first), of the clients' own models if they have any, without
    clients that have no value of it.

    Args:
        record: an evaluation.

    Returns:
        Lines without a final line break.
    """
    title = f"{record.stage} after {plural(record.round, 'round')}: {len(record.client_ids)} clients"
    names = list(record.values)
    if not record.client_ids or not names:
        return f"{title}, no values"
    shown: list[int | None] = list(range(len(record.client_ids)))
    if len(shown) > _LISTED:
        metric = next((name for name in names if record.mode(name) == "max"), names[0])
        metric = own if (own := f"personal/{metric}") in names else metric
        shown = _both_ends(record.ranking(metric))
        title += f", the worst and the best by {metric}"
    rows, one_class = [["client", "samples", *names]], {c for some in record.one_class.values() for c in some}
    for index in shown:
        if index is None:
            rows.append(["..."] * len(rows[0]))
            continue
        values = [_number(float(v[index])) if record.sizes[index] else "-" for v in record.values.values()]
        mark = " *" * (record.client_ids[index] in one_class)
        rows.append([record.client_names[index] + mark, str(int(record.sizes[index])), *values])
    summaries = [record.summary(name) for name in names]
    for key, label in _labels(max(int(s["clients"]) for s in summaries)).items():
        rows.append([label, "", *(_number(float(s[key])) if key in s else "-" for s in summaries)])
    if record.undefined:
        rows.append(["undefined", "", *(str(len(record.undefined.get(name, ()))) for name in names)])
    return "\n".join([title, *_aligned(rows, len(shown) + 1), *_notes(record)])


def _labels(clients: int) -> dict[str, str]:
    """The rows of the summary for so many clients, without those that repeat another one's numbers."""
    five, ten = (max(1, round(percent / 100 * clients)) for percent in (5, 10))
    rows = dict(_SUMMARY)
    if five == 1:
        rows |= {"worst_5": "worst client", "best_5": "best client"}
        del rows["min"], rows["max"]
    if ten == five:
        del rows["worst_10"], rows["best_10"]
    return rows


def _aligned(rows: Sequence[Sequence[str]], end: int) -> list[str]:
    """Rows with columns of equal widths, the first at the left; a rule below the head and below row ``end``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:end], rule, *lines[end:]]


def _notes(record: EvaluationRecord) -> list[str]:
    """Lines about clients with few samples, with one class for all of them, and without any."""
    sizes = list(zip(record.client_names, record.sizes.tolist(), strict=True))
    few, none = ([f"{name} ({n})" for name, n in sizes if 0 < n < _FEW], [name for name, n in sizes if n == 0])
    notes = [f"fewer than {_FEW} samples: {_some(few)}. The best and the worst may be theirs by chance"] * bool(few)
    called, alike = dict(zip(record.client_ids, record.client_names, strict=True)), dict[tuple[int, ...], list[str]]()
    for metric, clients in record.one_class.items():
        alike.setdefault(clients, []).append(metric)
    for clients, metrics in alike.items():
        some = _some([called[client] for client in clients])
        notes.append(f"* one class for all samples, though they are of several ({', '.join(metrics)}): {some}")
    return notes + [f"nothing to be evaluated on: {_some(none)}"] * bool(none)


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _ENDS
    return ", ".join(names[:_ENDS]) + (f" and {rest} more" if rest > 0 else "")


def _both_ends(values: Tensor) -> list[int | None]:
    """Indices of the worst and the best clients from worst to best, ``None`` where clients are left out between."""
    ranked: list[int | None] = [int(index) for index in values.argsort(stable=True) if not values[index].isnan()]
    return ranked if len(ranked) <= 2 * _ENDS else [*ranked[:_ENDS], None, *ranked[-_ENDS:]]


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def _append_rows(path: Path, record: EvaluationRecord) -> None:
    is_new, sizes = not path.exists(), record.sizes.tolist()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        for metric, values in record.values.items():
            columns = zip(record.client_ids, sizes, values.tolist(), record.client_names, strict=True)
            for client, samples, value, name in columns:
                writer.writerow((record.round, record.stage, client, samples, metric, repr(float(value)), name))


def _drop_rows(path: Path, record: EvaluationRecord, abandoned_from: int | None) -> None:
    """Drops the record's own rows, those of rounds from ``abandoned_from`` on, and a row cut short by a killed run."""
    scratch = path.with_suffix(".csv.tmp")
    with path.open(newline="") as old:
        reader = csv.reader(old)
        header = next(reader, list(COLUMNS))
        if tuple(header) != COLUMNS:
            raise ValueError(f"{path} must have the columns {','.join(COLUMNS)}, found {','.join(header)}")
        with scratch.open("w", newline="") as new:
            writer = csv.writer(new, lineterminator="\n")
            writer.writerow(COLUMNS)
            for row in reader:
                if len(row) != len(COLUMNS) or not row[0].isdecimal():
                    continue
                stale = abandoned_from is not None and int(row[0]) >= abandoned_from
                if not stale and (int(row[0]), row[1]) != (record.round, record.stage):
                    writer.writerow(row)
    os.replace(scratch, path)
