# SPDX-License-Identifier: Apache-2.0
"""Figures of matplotlib in the style of the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning.core.optional_packages import how_to_install
from fl_lightning.report.style import matplotlib_style


@contextmanager
def new_figure(caller: str, width: float, height: float, path: str | Path | None) -> Iterator[Any]:
    """A figure to draw into, which is saved at the end if there is a path.

    It is not pyplot's: it works without a display, and leaves nothing open behind it.

    Raises:
        ImportError: matplotlib, which the extra ``plots`` brings, is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{caller} needs matplotlib: {how_to_install('plots')}") from error
    with rc_context(matplotlib_style()):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        if path is not None:
            figure.savefig(path)
