# SPDX-License-Identifier: Apache-2.0
"""``python -m fl_lightning audit``."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_lightning.comparison.audit import audit
from fl_lightning.comparison.limits import LIMITS
from fl_lightning.comparison.plan import Run
from fl_lightning.report import FitRecord, record_from_json


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
        files = [file for path in options.records for file in _files(path)]
        records = [_read(file) for file in files]
        found = audit(records, limits, method=options.method, metric=options.metric, strict=options.strict)
        written = [] if options.card is None else found.write(options.card, [*files, *options.weights])
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


def _files(path: Path) -> Iterator[Path]:
    """The file itself; of a comparison's folder, the finished runs of its table."""
    if not path.is_dir():
        yield path
        return
    table = path / "runs.csv"
    if not table.exists():
        raise ValueError(f"{path} must be a record or the folder of a finished comparison, which has a runs.csv")
    with table.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            rate = float(row["learning_rate"]) if row["learning_rate"] else None
            one = Run(row["method"], rate, int(row["seed"]), int(row["division"]))
            if row["picked"] == "1" and row["status"] == "finished":
                yield path / "runs" / f"{one.key}.json"
            elif row["picked"] == "1":
                sys.stderr.write(f"audit: {one} is left out: it failed\n")


def _read(file: Path) -> FitRecord:
    try:
        return record_from_json(file.read_text(encoding="utf-8"))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} must be the record of a fit, or the folder of a comparison: {error}") from error


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
