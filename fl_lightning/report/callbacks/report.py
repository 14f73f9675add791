# SPDX-License-Identifier: Apache-2.0
"""Writes a report of the fit while it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from fl_lightning.arguments import Bounds, checked
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.report.callbacks.fit_recorder import FitRecorder
from fl_lightning.report.page import plotly_js, write_report

_SHARE = 20
"""Writing takes at most one part in so many of the fit's time, the end of the fit apart."""


class Report(FitRecorder):
    """Writes one self-contained HTML file with pictures of the fit: who fares how, and why.

    The file can be opened from the first round on, and reloaded while the fit runs. It is written again at most every
    few seconds, and less often where writing takes long: it takes up to 5 % of the fit's time. It is written once more
    when the fit ends, also by an error, and after ``trainer.test``. The report of a resumed fit has all rounds, because
    the record travels with the checkpoint. Of several processes, the first writes. With ``fast_dev_run`` nothing is
    written.

    :func:`fl_lightning.report.write_report` writes a report of several fits side by side, from their :attr:`record`.

    Args:
        path: the file; a relative one is looked for in the working directory.
        method: what the report calls the method; default the name of its class.
        every: seconds between two versions of the file.

    Raises:
        ImportError: plotly, which the extra ``report`` brings, is missing.

    Example::

        trainer = L.Trainer(strategy=fl.FederatedStrategy(), callbacks=[fl.callbacks.Report("report.html")])
    """

    @checked(every=Bounds(0))
    def __init__(self, path: str | Path = "report.html", method: str | None = None, every: float = 5.0) -> None:
        super().__init__(method)
        plotly_js()  # or a long fit would end without its report
        self.path, self.every = Path(path), every
        self._due = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The file is due from now on."""
        super().on_train_start(trainer, pl_module)
        self._due = 0.0

    def _grown(self, trainer: Trainer) -> None:
        if self._last is not None and time.perf_counter() >= self._due:
            self._write(trainer)

    def _ended(self, trainer: Trainer, status: Literal["finished", "interrupted"] | None = None) -> None:
        super()._ended(trainer, status)
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        fast = trainer.fast_dev_run  # type: ignore[attr-defined]  # Trainer sets it outside its class
        if self._builder is None or fast or not trainer.is_global_zero:
            return
        began = time.perf_counter()
        with self._counted():
            write_report([self.record], self.path)
        took = time.perf_counter() - began
        self._due = began + max(self.every, _SHARE * took)
