# SPDX-License-Identifier: Apache-2.0
"""Carries out the runs of a comparison, one at a time, and keeps what they leave as a file each."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fl_lightning.comparison.bounds import OneLearner, bound_strategy
from fl_lightning.comparison.cost import Timing
from fl_lightning.comparison.fit import Keeper, fit
from fl_lightning.comparison.fitted import Fitted, merged, read_fitted, write_fitted
from fl_lightning.comparison.plan import Run
from fl_lightning.comparison.project import Parts, Project
from fl_lightning.comparison.quiet import quiet
from fl_lightning.comparison.selection import STAGES
from fl_lightning.core.seeding import isolated
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.sources import defines
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.metrics.functional import Mode
from fl_lightning.report.conclusion import LOCAL, POOLED


@dataclass(frozen=True)
class Runner:
    """Knows how to carry out every run.

    Attributes:
        project: makes module, data and trainer.
        strategies: of the methods, by name.
        base: says how the clients of the bounds train.
        folder: of the comparison.
        save_seconds: least time between two checkpoints of a run.
    """

    project: Project
    strategies: Mapping[str, FederatedStrategy]
    base: FederatedStrategy
    folder: Path
    save_seconds: float

    def finished(self, run: Run) -> Fitted | None:
        """What a run has left, or ``None`` if it is not over."""
        return read_fitted(self._file(run))

    def carry_out(self, run: Run, tell: Callable[[], None]) -> None:
        """Carries a run out, from where it was interrupted, and writes its file.

        Args:
            run: the run.
            tell: called after every round; for ``"local only"`` after every round of every client.
        """
        folder = self.folder / "checkpoints" / run.key
        with self._alone(run):
            if run.method == LOCAL:
                fitted = self._clients_alone(run, folder, tell)
            else:
                parts = self._pooled(run) if run.method == POOLED else self._federated(run)
                fitted = fit(parts, Keeper(folder, self.save_seconds, tell))
                if isinstance(parts.data, OneLearner):
                    fitted = replace(fitted, record=parts.data.renamed(fitted.record))
        rate = fitted.record.learning_rate if run.learning_rate is None else run.learning_rate
        record = replace(
            fitted.record, method=run.method, seed=run.seed, division=run.division, learning_rate=rate,
            status="finished", is_bound=run.method in (LOCAL, POOLED),
        )  # fmt: skip
        write_fitted(self._file(run), Fitted(record, fitted.seconds))
        shutil.rmtree(folder, ignore_errors=True)

    def time(self, run: Run) -> Timing:
        """Trains one round of a run and evaluates, to see how long it takes; nothing is kept.

        For ``"local only"``, that is a round of one client, that of median size.
        """
        folder = self.folder / "checkpoints" / f"timing--{run.key}"
        shutil.rmtree(folder, ignore_errors=True)
        with self._alone(run):
            fits, began = 1, time.perf_counter()
            if run.method == LOCAL:
                learner = self._learner(run)
                clients = sorted(learner.clients, key=learner.sizes.__getitem__)
                fits, parts = len(clients), self._client_alone(run, learner, clients[len(clients) // 2])
            else:
                parts = self._pooled(run) if run.method == POOLED else self._federated(run)
            parts.trainer.logger = None
            rounds = parts.trainer.max_epochs or 1
            parts.trainer.fit_loop.max_epochs = 1
            record = fit(parts, Keeper(folder, float("inf"), lambda: None)).record
            seconds = time.perf_counter() - began
        series = record.rounds
        of_round = sum((*series.training_seconds, *series.server_seconds, *series.evaluation_seconds))
        found = {stage: record.last_values(stage) for stage in STAGES}
        metrics: dict[str, Mapping[str, Mode]] = {
            stage: dict(values.modes) for stage, values in found.items() if values is not None
        }
        return Timing(fits, rounds, of_round, max(0.0, seconds - of_round), metrics)

    def check_divisions(self, run: Run) -> None:
        """Refuses divisions that would all be the same.

        Args:
            run: any run.

        Raises:
            ValueError: nothing about the division follows from the seed of the data.
        """
        found = []
        for division in (0, 1):
            one = replace(run, division=division)
            with self._alone(one):
                data = self._build(one, bound_strategy(self.base, 1)).data
                data.prepare_data()
                data.setup("fit")
                stages = [stage for stage in ("train", "val", "test") if defines(data, f"{stage}_dataloader")]
                loaders = [getattr(data, f"{stage}_dataloader")() for stage in stages]
                each = [one for some in loaders for one in (some if isinstance(some, list) else [some])]
                found.append([one.fingerprint() for one in each if isinstance(one, ClientLoaders)])
        if found[0] == found[1]:
            raise ValueError(
                "divisions must be 1 where the seed of the data decides nothing, found more: clients and their "
                "evaluation data are given. FederatedDataModule(holdout=...) draws what is set aside by the seed"
            )

    def _federated(self, run: Run) -> Parts:
        return self._build(run, self.strategies[run.method])

    def _pooled(self, run: Run) -> Parts:
        learner = self._learner(run)
        learner.choose(learner.clients, None)
        parts = self._build(run, bound_strategy(self.base, len(learner.clients)))
        return replace(parts, data=learner)

    def _client_alone(self, run: Run, learner: OneLearner, client: int) -> Parts:
        learner.choose([client], [client])
        parts = self._build(run, bound_strategy(self.base, 1))
        parts.trainer.logger = None  # a folder of logs per client helps nobody
        return replace(parts, data=learner)

    def _clients_alone(self, run: Run, folder: Path, tell: Callable[[], None]) -> Fitted:
        learner, fits = self._learner(run), dict[int, Fitted]()
        for client in learner.clients:
            place = folder / f"client-{client:06d}"
            fitted = read_fitted(place.with_suffix(".json"))
            if fitted is None:
                parts = self._client_alone(run, learner, client)
                fitted = fit(parts, Keeper(place, self.save_seconds, tell))
                write_fitted(place.with_suffix(".json"), fitted)
                shutil.rmtree(place, ignore_errors=True)
            fits[client] = fitted
        record = merged({client: one.record for client, one in fits.items()}, learner.names, learner.sizes)
        return Fitted(record, sum(one.seconds for one in fits.values()))

    def _learner(self, run: Run) -> OneLearner:
        return OneLearner(self._build(run, bound_strategy(self.base, 1)).data)

    def _build(self, run: Run, strategy: FederatedStrategy) -> Parts:
        root = self.folder / "logs" / run.key
        return self.project.build(run, strategy.with_arguments(seed=run.seed, partition=None), root)

    def _file(self, run: Run) -> Path:
        return self.folder / "runs" / f"{run.key}.json"

    @contextmanager
    def _alone(self, run: Run) -> Iterator[None]:
        """What a run prints goes to its log; it computes with one thread and leaves generators as they were."""
        threads = torch.get_num_threads()
        with quiet(self.folder / "logs" / run.key / "log.txt"), isolated(run.seed, torch.device("cpu")):
            torch.set_num_threads(1)
            try:
                yield
            except Exception:
                traceback.print_exc()
                raise
            finally:
                torch.set_num_threads(threads)
