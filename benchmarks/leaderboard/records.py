# SPDX-License-Identifier: Apache-2.0
"""The runs of a suite as one small file, and back.

``NAME.jsonl.xz`` has a line per finished run, with all that the tables need: the clients' values at the end, the curve
of the mean, and the seconds and conflicts of every round. What a run's own file has besides, such as weights and values
per client over the rounds, is left out. Of a run that failed the file has the error.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.leaderboard.traffic import Traffic
from benchmarks.papers.records import encode, read
from benchmarks.papers.records import replace as write_at_once
from fl_lightning.comparison.files import read_run, write_run
from fl_lightning.core.storage.files import write_text
from fl_lightning.report import ClientValues, FitRecord, RoundSeries, record_from_json, record_to_json

CURVE = ("mean", "worst_10", "angle")
DIGITS = 6  # of seconds: means of them are printed to a tenth, packed or not
_TRACEBACK = "Traceback (most recent call last)"


def packed_file(folder: Path) -> Path:
    """Where the runs of a suite's folder are packed."""
    return folder.with_name(f"{folder.name}.jsonl.xz")


def pack(folder: Path) -> int:
    """Adds the runs of a folder to its packed file, and returns how many finished ones that has now."""
    runs = packed(folder)
    for path in sorted((folder / "runs").glob("*.json")):
        record = read_run(path)
        assert record is not None
        runs[path.stem] = lean(record)
    lines = [{"run": key, "record": _plain(record)} for key, record in sorted(runs.items())]
    lines += [{"run": key, "failed": why} for key, why in sorted(failed(folder).items())]
    content = lzma.compress(encode(lines), preset=6 | lzma.PRESET_EXTREME)
    file = packed_file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_at_once(file, content, file.with_suffix(".new"))
    return len(runs)


def unpack(folder: Path) -> None:
    """Writes the packed runs that the folder lacks into it."""
    for key, record in packed(folder).items():
        path = folder / "runs" / f"{key}.json"
        if not path.exists():
            write_run(path, record)


def packed(folder: Path) -> dict[str, FitRecord]:
    """The packed runs of a suite, by key."""
    return {line["run"]: _read(line["record"]) for line in read(packed_file(folder)) if "record" in line}


def _read(record: dict[str, Any]) -> FitRecord:
    """A record, perhaps one of a form that had other entries."""
    evaluations = [{"one_class": {}, **evaluation} for evaluation in record["evaluations"]]
    rounds = {entry.name: list(record["rounds"][entry.name]) for entry in fields(RoundSeries)}
    if rounds["evaluation_seconds"]:
        rounds["evaluation_seconds"][-1] += record.get("recording_seconds", 0.0)
    new = {"division": 0, "class_names": (), "class_counts": ()}
    own = {**new, **{entry.name: record[entry.name] for entry in fields(FitRecord) if entry.name in record}}
    return record_from_json(json.dumps({**own, "absences": (), "rounds": rounds, "evaluations": evaluations}))


def finished(folder: Path) -> dict[str, FitRecord]:
    """All finished runs of a suite, packed or not, by key."""
    own = {path.stem: read_run(path) for path in sorted((folder / "runs").glob("*.json"))}
    return {**packed(folder), **{key: record for key, record in own.items() if record is not None}}


def failed(folder: Path) -> dict[str, str]:
    """By key, why runs came to nothing: the error at the end of their logs."""
    logs = {path.parent.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("logs/*/log.txt"))}
    own = {key: text.strip().splitlines()[-1] for key, text in logs.items() if _TRACEBACK in text}
    known = {line["run"]: line["failed"] for line in read(packed_file(folder)) if "failed" in line}
    over = finished(folder)
    return {key: why for key, why in {**known, **own}.items() if key not in over}


def write_traffic(folder: Path, found: Mapping[str, Traffic]) -> None:
    """Writes down what clients of each method send and receive, beside the packed file."""
    write_text(_traffic_file(folder), json.dumps({name: asdict(one) for name, one in found.items()}, indent=1) + "\n")


def read_traffic(folder: Path) -> dict[str, Traffic]:
    """What was counted, by method."""
    file = _traffic_file(folder)
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: Traffic(**entries) for name, entries in found.items()}


def _traffic_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.traffic.json")


def lean(record: FitRecord) -> FitRecord:
    """A record with what the tables need."""
    rounds, unknown = record.rounds, (None,) * len(record.rounds)
    seconds = {
        name: tuple(round(value, DIGITS) for value in getattr(rounds, name))
        for name in ("training_seconds", "server_seconds", "evaluation_seconds")
    }
    last = (record.last_values("val"), record.last_values("test"))
    return replace(
        record,
        rounds=replace(rounds, train_loss=unknown, **seconds),
        metrics=tuple(
            replace(series, summaries={name: series.summaries[name] for name in CURVE if name in series.summaries})
            for series in record.metrics
            if series.stage == "val" and not series.metric.endswith("_loss")
        ),
        evaluations=tuple(_without_losses(values) for values in last if values is not None),
        class_names=(),
        class_counts=(),
        absences=(),
        configuration={},
        command="",
    )


def _without_losses(values: ClientValues) -> ClientValues:
    kept = [name for name in values.values if not name.endswith("_loss")]
    return replace(
        values,
        values={name: values.values[name] for name in kept},
        modes={name: values.modes[name] for name in kept},
    )


def _plain(record: FitRecord) -> Any:
    """The record but for its division, where that is the first."""
    return {name: value for name, value in json.loads(record_to_json(record)).items() if name != "division" or value}
