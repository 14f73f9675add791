# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning audit``."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_lightning.comparison.audit import audit
from fl_lightning.comparison.files import read_run
from fl_lightning.comparison.limits import LIMITS
from fl_lightning.comparison.plan import Run
from fl_lightning.report import FitRecord


def run(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit status.

    0 if all limits are kept, 1 if one is broken, 2 for options or records that make no sense.
    """
    options = _parser().parse_args(list(arguments))
    try:
        limits: dict[str, float] = {}
        for name, bound in map(_limit, options.limit):
            if name in limits:
                raise ValueError(f"--limit must give {name} once, found {limits[name]:g} and {bound:g}")
            limits[name] = bound
        if options.weights and options.card is None:
            raise ValueError("--weights needs --card, which holds their SHA-256")
        by_file = dict(one for path in options.records for one in _records(path))
        records, files = list(by_file.values()), [*filter(Path.exists, by_file), *options.weights]
        found = audit(records, limits, method=options.method, metric=options.metric, strict=options.strict)
        written = [] if options.card is None else found.write(options.card, files)
    except (ValueError, TypeError, OSError, ImportError) as error:
        sys.stderr.write(f"audit: {error}\n")
        return 2
    sys.stdout.write(f"{found}\n")
    if written:
        sys.stdout.write(f"Card: {', '.join(map(str, written))}\n")
    return 0 if found.passed else 1


def _limit(text: str) -> tuple[str, float]:
    name, _, bound = text.partition("=")
    try:
        return name, float(bound)
    except ValueError:
        raise ValueError(f"--limit must be NAME=NUMBER, such as worst_10=0.6, found {text!r}") from None


def _records(path: Path) -> Iterator[tuple[Path, FitRecord]]:
    """The record in the file; of a comparison's folder, those of the runs in its table."""
    table = path / "runs.csv"
    record = None if path.is_dir() else read_run(path)
    if record is None and not table.exists():
        raise ValueError(f"{path} must be a record or the folder of a finished comparison, which has a runs.csv")
    if record is not None:
        yield path, record
        return
    for run, status in _picked(table):
        file, found = path / "runs" / f"{run.key}.json", None
        if status == "finished" and (found := read_run(file)) is None:
            raise ValueError(f"{file}, a finished run of {table}, must be there: compare again to repeat it")
        lost = FitRecord(run.method, run.seed, run.division, run.learning_rate, status="interrupted")
        yield file, found or lost


def _picked(table: Path) -> list[tuple[Run, str]]:
    try:
        with table.open(encoding="utf-8", newline="") as lines:
            rows = [row for row in csv.DictReader(lines) if row["picked"] == "1"]
        rates = [float(row["learning_rate"]) if row["learning_rate"] else None for row in rows]
        return [
            (Run(row["method"], rate, int(row["seed"]), int(row["division"])), row["status"])
            for row, rate in zip(rows, rates, strict=True)
        ]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{table} must be as compare writes it: compare again to write it ({error!r})") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fl_lightning audit",
        description="Looks whether a method keeps limits for every client, and exits with 1 if one is broken by more "
        "than chance.",
        epilog=f"Limits: {'; '.join(f'{name}: {words}' for name, words in LIMITS.items())}.",
        allow_abbrev=False,
    )
    parser.add_argument("records", nargs="+", type=Path, help="records of fits in JSON, or the folder of a comparison")
    parser.add_argument("--limit", action="append", required=True, metavar="NAME=NUMBER", help="such as worst_10=0.6")
    parser.add_argument("--method", help="which method; needed where there are records of several")
    parser.add_argument("--metric", help="whose values count; default the first where large values are good")
    parser.add_argument("--strict", action="store_true", help="a number on the wrong side may not be chance")
    parser.add_argument("--card", type=Path, metavar="FILE", help="write a page, and beside it the same as JSON")
    parser.add_argument(
        "--weights", nargs="+", type=Path, default=[], metavar="FILE", help="files whose SHA-256 the card holds"
    )
    return parser
