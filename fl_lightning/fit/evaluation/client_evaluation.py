# SPDX-License-Identifier: Apache-2.0
"""Collects every client's metric values while one evaluation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from math import nan
from typing import Any
from weakref import ref

import torch
from torchmetrics import Metric

from fl_lightning.core.errors import RankError
from fl_lightning.core.fair_shares import fair_shares
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.fit.evaluation.epoch_end import EpochEnd
from fl_lightning.fit.evaluation.leaks_between_clients import Carried
from fl_lightning.fit.evaluation.loader import EvaluationLoader
from fl_lightning.fit.evaluation.on_ranks import DividedEvaluation, LoggerWatch, batch_callback
from fl_lightning.fit.evaluation.one_client import Alone, top_metrics
from fl_lightning.fit.evaluation.personal import PersonalEvaluation
from fl_lightning.fit.evaluation.said_once import Notices
from fl_lightning.lightning.evaluation_batches import ClientBatch, num_loaders
from fl_lightning.lightning.inspection import averaging
from fl_lightning.lightning.logged_values import ClientValues, active_results
from fl_lightning.lightning.module.logged_row import LoggedRow
from fl_lightning.lightning.module.module_state import state_kept
from fl_lightning.lightning.module.state_copy import StateCopy
from fl_lightning.lightning.module.undefined_metrics import Noticed
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.ranks import Ranks
from fl_lightning.metrics.functional import Mode


class ClientEvaluation:
    """Collects per-client values while an evaluation runs.

    The evaluation itself goes through all batches as it would without clients, so what it logs is what plain Lightning
    logs. A client's own values come from what its batches add. Where the module carries anything else from one client
    to the next, its batches are evaluated once more, on copies of what the module held before the first of them.

    Args:
        trainer: the trainer whose evaluation is running.
        loader: the loader that is being walked.
        stage: ``"val"`` or ``"test"``.
        round: rounds finished.
        notices: what all evaluations of a strategy have in common.
        personal: makes what evaluates clients' own models as well, where the method has them.
        seed: of what steps draw, with the client.
        ranks: the processes among which clients may be divided; ``None``: there is one.
    """

    def __init__(
        self,
        trainer: Trainer,
        loader: EvaluationLoader,
        stage: str,
        round: int,  # noqa: A002
        notices: Notices,
        personal: Callable[[Alone], PersonalEvaluation] | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self._seed, self._ranks = seed, ranks
        self._divided: DividedEvaluation | None = None
        self._watch: LoggerWatch | None = None
        self._older: list[tuple[Metric, int]] = []
        self._trainer, self._loader, self._stage, self._round = trainer, loader, stage, round
        self._notices, self._memory, self._noticed = notices, notices.memory, Noticed()
        self._values = ClientValues(active_results(trainer), self._noticed)
        self._alone = Alone(trainer, stage, self._noticed)
        self._personal = None if personal is None else personal(self._alone)
        lends = averaging(trainer.callbacks) is not None  # type: ignore[attr-defined]
        self._before = StateCopy(self._alone.module, metrics=False, known=notices.uncopied) if lends else None
        self._carried: Carried | None = None
        self._ending: EpochEnd | None = None
        self._rows: dict[int, LoggedRow] = {}
        self._own: dict[int, LoggedRow] = {}
        self._warned: set[int] = set()
        self._failed: dict[int, Exception] = {}
        self._sizes: dict[int, int] = {}
        self._samples = 0
        self._last: Any = None
        self._steps_log = False
        self._steps = ExitStack()

    @contextmanager
    def batch(self, batch: ClientBatch) -> Iterator[None]:
        """Around everything that Lightning does with a batch, its hooks included."""
        if batch.source is not self._loader or self._trainer.sanity_checking:
            yield  # of several loaders, clients are those of the last
            return
        if self._carried is None:
            self._begin()
        assert self._carried is not None
        if batch.is_first:
            self._begin_client(self._carried, batch.client_id)
        with nullcontext() if self._watch is None else self._watch.watching():
            yield
        self._carried.after_batch()
        self._samples += batch.num_samples
        if batch.is_last:
            self._last = batch.batch
            self._steps.close()
            self._end_client(batch.client_id)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the whole evaluation."""
        with self._noticed.installed(), self._steps:
            yield

    def _begin(self) -> None:
        known = self._notices.uncopied
        self._carried = Carried(self._alone.module, known)
        self._memory.begin(self._alone.module, self._carried.start)
        self._older = [(m, int(m._update_count)) for m in top_metrics(self._alone.module) if m._update_count]
        if self._ranks is not None and self._loader.share is not None:
            self._divided = DividedEvaluation(self._ranks, self._alone.module, self._values)
        elif self._ranks is not None:
            self._watch = LoggerWatch(self._trainer)
        if self._alone.has_hook:
            self._ending = EpochEnd(self._alone, self._carried.lengths, self._notices.large)

    def _begin_client(self, carried: Carried, client: int) -> None:
        if not self._passes_on():  # once it does, nothing is put aside, and the evaluation is as it would be without us
            self._values.begin()
            if self._ending is not None:
                self._ending.begin()
        self._steps.enter_context(carried.in_steps({} if self._ending is None else self._ending.aside, self._noticed))
        self._steps.enter_context(isolated(derive_seed(self._seed, client), self._trainer.strategy.root_device))
        self._samples = 0
        self._noticed.reasons.clear()

    def _end_client(self, client: int) -> None:
        assert self._carried is not None
        self._sizes[client] = self._samples
        row = self._values.read()
        self._steps_log |= bool(row.values)
        if self._noticed.reasons:
            self._warned.add(client)
        self._carried.after_client(last=client == self._loader.last_client)
        if self._ending is not None and not self._passes_on():
            late = self._ending.row(row)
            if not self._memory.is_empty:
                with self._memory.other_way():
                    self._memory.compare(late, self._ending.row(row))
            if late.error is not None:
                self._failed[client] = late.error
            late.update(row)
            row = late
        if self._divided is not None:
            self._divided.keep(client, self._samples, row)
        self._values.end()
        if self._ending is not None:
            self._ending.end()
        self._rows[client] = row
        # A client that is not in training has no model of its own, whoever's number it has elsewhere.
        trained = client < self._loader.loaders.num_trained
        if self._personal is not None and trained and not self._carried.lost:
            own = self._personal.row(
                client, self._loader.of_client(client), self._loader.num_batches(client), self._carried.start
            )
            if own is not None:
                self._own[client] = own
                if self._divided is not None:
                    self._divided.keep_own(client, own)

    def _passes_on(self) -> bool:
        """Whether something passes from client to client, or would be changed by what runs for one of them."""
        carried = self._carried
        return carried is not None and bool(carried.lost or (carried.names and self._loader.num_evaluated > 1))

    def record(self) -> EvaluationRecord:
        """What was collected; a metric that a client did not log is NaN for it."""
        self._find_readers()
        if self._divided is not None:
            self._ask_again(self._warned)
            self._join(self._divided)
        elif self._carried is not None and self._passes_on():
            self._separate(self._carried)
        else:
            self._ask_again(self._warned)
        self._explain_failures()
        self._forget()
        for client, own in self._own.items():
            self._rows[client].update(own)
        clients, rows = list(self._rows), list(self._rows.values())
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        values = {n: torch.tensor([row.values.get(n, nan) for row in rows], dtype=torch.float64) for n in names}
        undefined = {n: {c: r.undefined[n] for c, r in self._rows.items() if n in r.undefined} for n in names}
        modes: dict[str, Mode] = {
            name: "max" if better else "min" for row in rows for name, better in row.larger_is_better.items()
        }
        sizes = torch.tensor(list(self._sizes.values()), dtype=torch.int64)
        return EvaluationRecord(
            self._round, self._stage, tuple(clients), sizes, values,
            undefined={name: found for name, found in undefined.items() if found}, modes=modes,
            client_names=tuple(self._loader.loaders.names[client] for client in clients),
        )  # fmt: skip

    # ---- several processes

    def _join(self, divided: DividedEvaluation) -> None:
        """Takes over what other processes have evaluated."""
        reason = self.obstacle
        if reason is not None:
            raise RankError(
                f"{type(self._alone.module).__name__}.{self._alone.step_name} {reason}, which it did not in the first "
                "evaluation, and other processes have evaluated other clients: log values in the step, or gather them "
                "in torchmetrics"
            )
        shares = divided.joined()
        self._rows = {client: share.row for client, share in shares.items()}
        self._own = {client: share.own for client, share in shares.items() if share.own is not None}
        self._sizes = {client: share.size for client, share in shares.items()}
        self._failed = {client: row.error for client, row in self._rows.items() if row.error is not None}

    @property
    def obstacle(self) -> str | None:
        """Why one process must evaluate all clients; ``None`` if they can be divided."""
        carried = self._carried
        if carried is None or num_loaders(self._trainer) > 1:
            return "is not the only one that runs"
        if carried.found or carried.has_grown():
            return f"carries on {', '.join([*carried.names, *carried.lost]) or 'a list'} from one client to the next"
        if self._memory.names or any(metric._update_count != updates for metric, updates in self._older):
            return "depends on what earlier evaluations have left"
        if self._watch is not None and self._watch.touched:
            return "writes to loggers itself"
        if self._values.logs_steps:
            return "logs values of single batches (on_step=True)"
        callback = batch_callback(self._trainer, self._stage)
        return None if callback is None else f"is watched by {callback}"

    def divide_next(self) -> None:
        """Lets the next evaluation divide the clients among the processes, if this one has shown that it can."""
        ranks, loader = self._ranks, self._loader
        if ranks is None or loader.share is not None or loader.num_evaluated < ranks.size:
            return
        reason = self.obstacle
        if any(reasons := ranks.gather(reason)):
            said = next(filter(None, reasons))
            self._notices.inform(
                f"every process evaluates all clients, because {type(self._alone.module).__name__}."
                f"{self._alone.step_name} {said}"
            )
            return
        self._notices.divisible[self._stage] = ref(self._alone.module)
        loader.share = fair_shares(loader.counts, ranks.size)[ranks.rank]

    def divide_again(self) -> None:
        """Divides the clients of this evaluation if an earlier one of the same module has shown that it can."""
        ranks, loader, shown = self._ranks, self._loader, self._notices.divisible.get(self._stage)
        if ranks is None or shown is None or shown() is not self._alone.module or loader.num_evaluated < ranks.size:
            return
        if num_loaders(self._trainer) == 1 and batch_callback(self._trainer, self._stage) is None:
            loader.share = fair_shares(loader.counts, ranks.size)[ranks.rank]

    # ---- clients one at a time

    def _find_readers(self) -> None:
        """Lists are no concern as long as steps only add to them."""
        carried = self._carried
        if carried is None or carried.found or self._loader.num_evaluated < 2 or not carried.has_grown():
            return
        if not self._steps_log or num_loaders(self._trainer) > 1:
            return
        if carried.reads_lists(self._step_once):
            carried.add("a list that its steps read")

    def _step_once(self) -> LoggedRow:
        return self._apart(-1, lambda: self._alone.one_step(self._last))

    def remember(self) -> None:
        """The evaluation is over, the module's last hook included: what it leaves is everybody's."""
        if self._carried is not None:
            now = StateCopy(self._alone.module, metrics=False, known=self._notices.uncopied)
            self._memory.end(self._carried.start, now, self._before)

    def _forget(self) -> None:
        """Takes away values that depend on what earlier evaluations have left."""
        carried, memory = self._carried, self._memory
        if carried is None or memory.is_empty or carried.lost or num_loaders(self._trainer) > 1:
            return
        if not self._passes_on() and self._steps_log:
            with state_kept(self._alone.module), carried.start.in_place():
                one = self._step_once()
                with memory.forgotten():
                    memory.compare(one, self._step_once())
        found = sorted(name for name in memory.names if any(name in row.values for row in self._rows.values()))
        reason = "it depends on what earlier evaluations of all clients have left in the module"
        for row in self._rows.values():
            row.values |= dict.fromkeys(found, nan)
        if found:
            self._notices.warn(
                f"clients have no values of their own of {', '.join(found)}: {reason}. Log the value of one evaluation "
                "as well"
            )

    def _separate(self, carried: Carried) -> None:
        """Gives every client the values of its batches alone, or none."""
        module, notices = type(self._alone.module).__name__, self._notices
        step = f"{module}.{self._alone.step_name}"
        if carried.lost or num_loaders(self._trainer) > 1:
            found = ", ".join(carried.lost or carried.names)
            why = "cannot be copied" if carried.lost else "cannot be told apart with several loaders"
            notices.warn(
                f"clients have no values of their own, because {step} gathers in what {why}: {found}. Log in the step, "
                "or gather in torchmetrics or in lists"
            )
            for client, row in self._rows.items():
                self._rows[client] = LoggedRow(dict.fromkeys(row.values, nan))
            return
        notices.inform(
            f"{step} carries on {', '.join(carried.names)} from one client to the next: each client's batches are "
            "evaluated once more, so that its values are its own. Gathering in torchmetrics or in lists that the steps "
            "only append to saves that"
        )
        self._failed.clear()
        for client in self._rows:
            self._rows[client] = self._replayed(client)

    def _ask_again(self, clients: set[int]) -> None:
        """Steps of these clients have warned of something undefined; which value it was, only a recording tells."""
        for client in sorted(clients):
            for name, reason in self._replayed(client).undefined.items():
                self._rows[client].add(name, nan, reason)

    def _replayed(self, client: int) -> LoggedRow:
        assert self._carried is not None
        start, loader = self._carried.start, self._loader
        batches, count = loader.of_client(client), loader.num_batches(client)
        row = self._apart(client, lambda: self._alone.steps(start, batches, count))
        if not self._memory.is_empty:
            again = loader.of_client(client)
            without = self._apart(client, lambda: self._alone.steps(start, again, count, self._memory.forgotten))
            self._memory.compare(row, without)
        if row.error is not None:
            self._failed[client] = row.error
        return row

    def _apart(self, client: int, run: Callable[[], LoggedRow]) -> LoggedRow:
        seed = derive_seed(torch.initial_seed(), "alone", client)
        with isolated(seed, self._trainer.strategy.root_device):
            return run()

    def _explain_failures(self) -> None:
        """Where the hook fails for some clients, what the others log is undefined for them."""
        if not self._failed:
            return
        error = next(iter(self._failed.values()))
        if len(self._failed) == len(self._rows):
            self._notices.warn(
                f"{type(self._alone.module).__name__}.{self._alone.hook} does not run for a client alone "
                f"({type(error).__name__}: {error}): no client has values of what it logs after that"
            )
            return
        names = {name: None for row in self._rows.values() for name in row.values}
        for client, error in self._failed.items():
            row = self._rows[client]
            for name in names:
                if name not in row.values:
                    row.add(name, nan, f"{type(error).__name__}: {error}")
