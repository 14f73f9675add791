# SPDX-License-Identifier: Apache-2.0
"""Collects every client's metric values while one evaluation runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import nan
from typing import Any

import torch

from fl_lightning.arguments import trusted
from fl_lightning.core.records import EvaluationRecord, named
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.fit.evaluation.between_evaluations import Division, Notices
from fl_lightning.fit.evaluation.client_parts import ClientPart, ClientParts
from fl_lightning.fit.evaluation.one_client import Alone
from fl_lightning.fit.evaluation.personal import PREFIX, PersonalEvaluation
from fl_lightning.fit.loaders import EvaluationLoader, own_batches
from fl_lightning.lightning.batches import ClientBatch, num_loaders
from fl_lightning.lightning.inspection import averaging
from fl_lightning.lightning.logged_values import ClientValues, LoggedRow, active_results
from fl_lightning.lightning.module.kept_objects import Items
from fl_lightning.lightning.module.undefined_metrics import Noticed
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.ranks import Ranks
from fl_lightning.metrics.functional import Mode


class ClientEvaluation:
    """Collects per-client values while an evaluation runs.

    The evaluation itself goes through all batches as it would without clients, so what it logs is what plain Lightning
    logs. :class:`ClientParts` keeps apart what each client adds. Where anything else passes from client to client, each
    client's batches are evaluated once more, from what the module held before the first of them. So they are where the
    evaluation walks over several loaders, each of which has batches of every client. ``loaders`` are walked one after
    the other; ``None`` stands for data that is not divided among clients. Those of ``trained`` have a row in any case.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Sequence[EvaluationLoader | None],
        stage: str,
        round: int,  # noqa: A002
        notices: Notices,
        personal: PersonalEvaluation | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
        trained: Sequence[int] = (),
    ) -> None:
        self._trainer, self._stage, self._round = trainer, stage, round
        self._loaders, self._several = loaders, len(loaders) > 1
        self._divided = [one for one in loaders if one is not None]
        self._loader = loader = self._divided[-1]
        self._side_by_side = num_loaders(trainer) > 1 and not self._several
        self._notices, self._memory, self._noticed = notices, notices.memory, Noticed()
        self._personal, self._seed, self._trained = personal, seed, trained
        self._values = ClientValues(active_results(trainer), self._noticed)
        self._alone = Alone(trainer, stage, self._noticed)
        self._division = Division(trainer, loader, stage, notices, ranks)
        if not trainer.sanity_checking:
            self._division.divide_again()
        self._last_client = loader.last_client
        self._parts: ClientParts | None = None
        self._clients: dict[int, ClientPart] = {}
        self._warned: set[int] = set()
        self._samples = 0
        self._last: Any = None
        self._steps_log = False
        self._steps = ExitStack()

    def begin(self) -> None:
        """The first batch is next, which may be of data that is not divided."""
        if not self._trainer.sanity_checking:
            several = self._several or self._loader.num_evaluated > 1
            self._parts = ClientParts(self._alone.module, self._values, self._noticed, several, not self._several)
            self._memory.begin(self._alone.module, self._parts.start)
            self._alone.metrics = self._parts.start.metrics.values()

    @contextmanager
    def batch(self, batch: ClientBatch) -> Iterator[None]:
        """Around everything that Lightning does with a batch, its hooks included."""
        parts = self._parts
        if parts is None or not any(batch.source is one for one in self._divided):
            yield  # side by side, clients are those of the last loader
            return
        if self._several:
            yield
            self._clients.setdefault(batch.client_id, ClientPart({}, [], 0, LoggedRow())).size += batch.num_samples
            return
        if batch.is_first:
            self._begin_client(parts, batch.client_id)
        with self._division.watching():
            yield
        if parts.lists:
            parts.after_batch()
        self._samples += batch.num_samples
        if batch.is_last:
            self._last = batch.batch
            self._steps.close()
            self._end_client(parts, batch.client_id)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the whole evaluation."""
        with self._noticed.installed(), self._steps:
            yield

    def _begin_client(self, parts: ClientParts, client: int) -> None:
        parts.begin()
        self._steps.enter_context(parts.in_steps())
        self._steps.enter_context(isolated(derive_seed(self._seed, client), self._trainer.strategy.root_device))
        self._samples = 0
        self._noticed.reasons.clear()

    def _end_client(self, parts: ClientParts, client: int) -> None:
        row = self._values.read()
        self._steps_log |= bool(row.values)
        if self._noticed.reasons:
            self._warned.add(client)
        part = self._clients[client] = parts.end(self._samples, row)
        if self._alone.has_hook and parts.separable:
            with parts.only(part, before=False):
                part.row = self._alone.end(row)
            if not self._memory.is_empty:
                with parts.only(part, before=True):
                    self._memory.forget()
                    self._memory.compare(part.row, self._alone.end(row))
        if client == self._last_client and not self._division.is_divided:
            parts.join()

    def record(self) -> EvaluationRecord:
        """What was collected; a metric that a client did not log is NaN for it."""
        parts = self._parts
        if parts is not None:
            self._clients = dict(sorted(self._clients.items()))
            self._look_again(parts)
            if self._division.is_divided:
                self._clients = self._division.of_all(self._clients, parts, self._values)
                parts.join(list(self._clients.values()))
        self._explain_failures()
        called = max((one.loaders.names for one in self._divided), key=len)
        self._add_those_without_data(called)
        rows = {client: part.row for client, part in self._clients.items()}
        self._forget(rows)
        for client, part in self._clients.items():
            if part.own is not None:
                rows[client].update(part.own, PREFIX)
        names = list(dict.fromkeys(name for row in rows.values() for name in row.values))
        values = {n: torch.tensor([r.values.get(n, nan) for r in rows.values()], dtype=torch.float64) for n in names}
        undefined = {n: {c: r.undefined[n] for c, r in rows.items() if n in r.undefined} for n in names}
        one_class = {n: some for n in names if (some := tuple(c for c, r in rows.items() if n in r.one_class))}
        modes: dict[str, Mode] = {
            name: "max" if better else "min" for row in rows.values() for name, better in row.larger_is_better.items()
        }
        return trusted(EvaluationRecord)(
            self._round, self._stage, tuple(rows),
            torch.tensor([part.size for part in self._clients.values()], dtype=torch.int64), values,
            undefined={name: found for name, found in undefined.items() if found}, modes=modes,
            client_names=tuple(called[c] for c in rows), one_class=one_class,
        )  # fmt: skip

    # ---- once all batches are over

    def remember(self) -> None:
        """The evaluation is over, the module's last hook included: what it leaves is everybody's."""
        if self._parts is not None:
            lends = averaging(self._trainer.callbacks) is not None  # type: ignore[attr-defined]
            self._memory.end(self._parts.start, set(map(id, self._alone.module.buffers())) if lends else set())
        self._division.divide_next(self._parts, self._values)

    def _look_again(self, parts: ClientParts) -> None:
        """Runs what the batches alone have not told, from what the module held before the first of them."""
        in_steps = self._steps_log and not self._side_by_side
        lists = parts.grown if in_steps and parts.separable and len(self._clients) > 1 else []
        again = self._warned or not (self._personal is None and self._memory.is_empty and parts.separable)
        if not (lists or again):
            return
        with parts.start.apart():
            if lists and self._reads(parts, lists):
                parts.passed_on.append("a list that its steps read")
            if not parts.separable:
                self._separate(parts)
            # Steps of these clients have warned of something undefined; which value it was, only a recording tells.
            for client in sorted(self._warned) if parts.separable else ():
                for name, reason in self._replayed(parts, client).undefined.items():
                    self._clients[client].row.add(name, nan, reason)
            if in_steps and parts.separable and not self._memory.is_empty:
                self._memory.compare(self._one_step(parts), self._one_step(parts, before=True))
            if self._personal is not None:
                self._evaluate_own(parts, self._personal)

    def _evaluate_own(self, parts: ClientParts, personal: PersonalEvaluation) -> None:
        for client, part in self._clients.items():
            # A client that is not in training has no model of its own, whoever's number it has elsewhere.
            own = personal.standing_in(client) if client < self._loader.loaders.num_trained else None
            if own is not None:
                part.own = self._once_more(parts, client, "personal", own)

    def _separate(self, parts: ClientParts) -> None:
        """Gives every client the values of its batches alone, or none."""
        step, found = f"{type(self._alone.module).__name__}.{self._alone.step_name}", ", ".join(parts.passed_on)
        if self._side_by_side:
            self._notices.warn(
                f"clients have no values of their own, because {step} gathers in what cannot be told apart with "
                f"several loaders: {found}. Log in the step, or gather in torchmetrics or in lists"
            )
            for part in self._clients.values():
                part.row = LoggedRow(dict.fromkeys(part.row.values, nan))
            return
        why = "runs on several loaders" if self._several else f"carries on {found} from one client to the next"
        advice = "" if self._several else ". Gathering in torchmetrics or in lists that steps only append to saves that"
        self._notices.inform(
            f"{step} {why}: each client's batches are evaluated once more, so that its values are its own{advice}"
        )
        for client, part in self._clients.items():
            part.row = self._replayed(parts, client)

    def _replayed(self, parts: ClientParts, client: int) -> LoggedRow:
        row = self._once_more(parts, client, "alone")
        if not self._memory.is_empty:
            self._memory.compare(row, self._once_more(parts, client, "alone", before=True))
        return row

    def _once_more(
        self, parts: ClientParts, client: int, purpose: str, mode: AbstractContextManager[None] | None = None,
        before: bool = False,
    ) -> LoggedRow:  # fmt: skip
        with self._from_start(parts, client, purpose, before):
            return self._alone.steps(own_batches(self._loaders, client), mode)

    def _one_step(self, parts: ClientParts, before: bool = False) -> LoggedRow:
        with self._from_start(parts, -1, "alone", before):
            return self._alone.one_step(self._last)

    @contextmanager
    def _from_start(self, parts: ClientParts, client: int, purpose: str, before: bool) -> Iterator[None]:
        """The module as it was before the first batch, with empty metrics.

        With ``before``, metrics hold what they held then, and the rest does not hold what earlier evaluations have
        left: both is in the module, or neither, where nothing depends on it.
        """
        parts.start.put()
        self._memory.forget() if before else parts.start.empty_metrics()
        seed = derive_seed(torch.initial_seed(), purpose, client)
        with isolated(seed, self._trainer.strategy.root_device):
            yield

    def _reads(self, parts: ClientParts, lists: list[Items]) -> bool:
        """Whether what a step logs depends on the lists in which steps gather."""
        expected = self._one_step(parts)
        try:
            with self._from_start(parts, -1, "alone", before=False):
                for kept in lists:
                    kept.value.append(object())  # nothing can be computed from it
                return repr(self._alone.one_step(self._last).values) != repr(expected.values)  # NaN equals NaN here
        except Exception:  # it has found what is in the lists now
            return True

    def _forget(self, rows: dict[int, LoggedRow]) -> None:
        """Takes away values that depend on what earlier evaluations have left."""
        found = sorted(name for name in self._memory.names if any(name in row.values for row in rows.values()))
        if not found or self._memory.is_empty or self._side_by_side:
            return
        for row in rows.values():
            row.values |= dict.fromkeys(found, nan)
        self._notices.warn(
            f"clients have no values of their own of {', '.join(found)}: it depends on what earlier evaluations of all "
            "clients have left in the module. Log the value of one evaluation as well"
        )

    def _add_those_without_data(self, called: Sequence[str]) -> None:
        """Gives empty rows to clients that train and have no batch here, if others have one."""
        registered = self._loader.loaders.num_trained
        missing = [client for client in self._trained if client < registered and client not in self._clients]
        if not (missing and self._clients):
            return
        empty = {client: ClientPart({}, [], 0, LoggedRow()) for client in missing}
        self._clients = dict(sorted({**self._clients, **empty}.items()))
        self._notices.name_missing(self._stage, [named(client, called[client]) for client in missing])

    def _explain_failures(self) -> None:
        """Where the hook fails for some clients, what the others log is undefined for them."""
        failed = {client: part.row.error for client, part in self._clients.items() if part.row.error is not None}
        if not failed:
            return
        error = next(iter(failed.values()))
        if len(failed) == len(self._clients):
            self._notices.warn(
                f"{type(self._alone.module).__name__}.{self._alone.hook} does not run for a client alone "
                f"({type(error).__name__}: {error}): no client has values of what it logs after that"
            )
            return
        names = {name: None for part in self._clients.values() for name in part.row.values}
        for client, error in failed.items():
            row = self._clients[client].row
            for name in names:
                if name not in row.values:
                    row.add(name, nan, f"{type(error).__name__}: {error}")
