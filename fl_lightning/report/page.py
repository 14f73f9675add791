# SPDX-License-Identifier: Apache-2.0
"""Writes one HTML file from the records of one or several fits."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.arguments import FILLED, checked
from fl_lightning.report.record import FitRecord

_SHOWN = ("mean", "worst_10", "min", "max", "angle")


@checked(records=FILLED)
def write_report(records: Sequence[FitRecord], path: str | Path, title: str | None = None) -> Path:
    """Writes a report of one or several fits, methods and seeds side by side, as one self-contained HTML file.

    The file is complete at every moment: it is written beside its place and moved there.

    Args:
        records: the fits, in the order of the page. Records of one method with different seeds are summed up together.
        path: the file to write; folders that are missing are made.
        title: heading of the page; default the methods' names.

    Returns:
        The path.

    Raises:
        ValueError: there is no record.
        ImportError: plotly, which the extra ``report`` brings, is missing.
    """
    path = Path(path)
    heading = title or ", ".join(dict.fromkeys(record.method for record in records))
    rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in _rows(records))
    text = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(heading)}</title></head>'
        f"<body><h1>{html.escape(heading)}</h1><table>{rows}</table></body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
    return path


def _rows(records: Sequence[FitRecord]) -> list[list[str]]:
    rows = [["method", "seed", "metric", "stage", *_SHOWN]]
    for record in records:
        for series in record.metrics:
            last = [series.summaries.get(name, (None,))[-1] for name in _SHOWN]
            numbers = ["-" if value is None else f"{value:.4f}" for value in last]
            rows.append([record.method, str(record.seed), series.metric, series.stage, *numbers])
    return rows
