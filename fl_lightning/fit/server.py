# SPDX-License-Identifier: Apache-2.0
"""The server's side of a round: check uploads, aggregate, apply the step, record what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fl_lightning.algorithms.guards.base import CannotGuardError
from fl_lightning.algorithms.records import Federation, StepReport
from fl_lightning.arguments import trusted
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.update_rows import SummedRows, UpdateRows, Upload
from fl_lightning.core.cohort import Cohort, mean_rate
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.storage import rule_state
from fl_lightning.fit.global_step import GlobalStep, RefusedStepError
from fl_lightning.fit.memory import memory_plan
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.uploads import Failures, Round, UsableUploads, agreed_loss_batch_factor, stacked, usable
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.metrics.functional import conflict_counts

_Errors: TypeAlias = tuple[type[Exception], ...]


class Server:
    """Turns a round's uploads into new global parameters."""

    def __init__(
        self,
        options: FitOptions,
        binding: BoundParameters,
        buffers: BufferBank,
        rows: UpdateRows,
        num_clients: int,
        sizes: Tensor | None = None,
    ) -> None:
        self._options, self._algorithm, self._rule = options, options.algorithm, options.client_rule
        self._binding, self._buffers, self._rows, self._num_clients = binding, buffers, rows, num_clients
        self._stateful = (self._algorithm, self._rule, *options.guards)
        for each in options.guards:
            each.check(num_clients)
        if options.attack is not None:
            options.attack.check(num_clients)
        options.check_rounds(len(rows), sizes)
        self.failures = Failures(options)
        self._step = GlobalStep(binding, options.server_optimizer)
        self.optimizer = self._step.optimizer  # None if steps are subtracted
        self.num_samples: int | None = None  # of all registered clients, if known
        self.loss_batch_factor: int | None = None  # see ClientLosses.measure; once clients agree
        self._summed = isinstance(rows, SummedRows)
        self._counts_conflicts = options.count_conflicts is not False and not self._summed

    def description(self, **entries: Any) -> FitDescription:
        """The fit in plain values, with further entries."""
        name = "none" if self.optimizer is None else type(self.optimizer).__name__
        settings = {"clients_per_round": len(self._rows), **self._options.settings()}
        return FitDescription.of(
            self._algorithm, self._rule, self._binding.layout, called=self._options.called,
            clients=self._num_clients, server_optimizer=name, settings=settings, **entries,
        )  # fmt: skip

    # ---- what lasts from round to round

    def begin(self, rounds: int | None, keeps_client_optimizers: bool, changed: Tensor | None = None) -> dict[str, int]:
        """All that the first round needs is there; returns bytes that are held beside the module, by name.

        ``changed``: training samples ``[N]``, if the clients or their data are others than those of the states.
        """
        rules, theta, columns = (self._algorithm, self._rule), self._binding.theta, self._rows.columns
        federation = trusted(Federation)(
            self._num_clients, self._binding.layout, theta.device, theta.dtype, len(self._rows), rounds,
            columns if len(columns.spans) > 1 else None, self._buffers.nbytes,
        )  # fmt: skip
        for rule in rules:
            if changed is not None:
                rule.clients_changed(federation, changed)
            rule.begin_fit(federation)
        return memory_plan(federation, rules, self.optimizer is not None, keeps_client_optimizers, self._summed)

    def reset(self) -> None:
        """Begins anew."""
        for part in self._stateful:
            rule_state.reset(part)

    def states(self) -> dict[str, Any]:
        """What a bit-exact continuation needs of the method, the guards and the server optimizer."""
        columns = self._rows.columns
        return {
            "algorithm": rule_state.state_dict(self._algorithm, columns),
            "client_rule": rule_state.state_dict(self._rule, columns),
            "guards": {n: rule_state.state_dict(g, columns) for n, g in self._options.named_guards.items()},
            "server_optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "skipped_rounds": self.failures.skipped_rounds,
            "failed_rounds": self.failures.failed_rounds,
            "loss_batch_factor": self.loss_batch_factor,
        }

    def load(self, states: Mapping[str, Any], ids: Mapping[int, int]) -> None:
        """Goes on from what :meth:`states` returned; ``ids`` are those that clients have now, by earlier ones."""
        columns = self._rows.columns
        for name, rule in (("algorithm", self._algorithm), ("client_rule", self._rule)):
            rule_state.load_state_dict(rule, states[name], columns, ids)
        for name, guard in self._options.named_guards.items():  # those that the states lack begin anew
            rule_state.load_state_dict(guard, states["guards"].get(name, {}), columns, ids)
        for part in self._stateful:
            rule_state.set_num_clients(part, self._num_clients)
        self.failures.skipped_rounds, self.failures.failed_rounds = states["skipped_rounds"], states["failed_rounds"]
        self.loss_batch_factor = states["loss_batch_factor"]
        if self.optimizer is not None:
            self.optimizer.load_state_dict(states["server_optimizer"])

    @contextmanager
    def closed(self, current: Round, refused: _Errors = (RefusedStepError,)) -> Iterator[RoundRecord]:
        """Aggregates the round; the step is taken at the end of the ``with`` statement, unless that raises an error.

        A round changes nothing if it has too few usable uploads, or if the step, the global parameters or the server
        optimizer would not be finite. Errors of the method in ``refused`` leave the round out; others are raised, with
        everything as it was. Raises ClientError where the policy is ``"raise"`` or too many rounds in a row have
        failed.
        """
        commit_or_undo = rule_state.transaction(*self._stateful)
        with ExitStack() as undone:
            undone.callback(commit_or_undo, False)
            record, take = self._tried(current, refused)
            if take is None:
                undone.close()
            yield record
            undone.pop_all()
            if take is not None:
                commit_or_undo(True)
                take()

    def _tried(self, current: Round, refused: _Errors) -> tuple[RoundRecord, Callable[[], None] | None]:
        """The record of the round, and what takes its step; ``None`` if it changes nothing."""
        drop, skipped = self.failures.drop, self.failures.skipped
        reports = self._usable(current, lambda upload, why, some: drop(current, upload.client_id, why, any_usable=some))
        uploads, count = reports.uploads, len(reports.uploads)
        if count < self._options.min_clients:
            reason = f"{count} usable report{'s' * (count > 1)}, fewer than min_clients={self._options.min_clients}"
            reason = reason if uploads else "no usable report"
            return skipped(current, uploads, f"had {reason}", reason, current.trained > 0 and count == 0), None
        try:
            cohort, reports, scalars = self._guarded(current, reports)
        except CannotGuardError as flaw:
            return skipped(current, uploads, f"had {flaw}", str(flaw), failed=True), None
        try:
            step, step_norm = self._aggregate(cohort)
            # One client with all data ends where plain Lightning does, bit for bit: a subtraction would round.
            exact = self._rows.reached_by(step) if self._num_clients == 1 else None
            move = self._step.tried(self._rows.columns.joined(step), step_norm, exact)
            dots = cohort.updates.dots(step).cpu() if self._counts_conflicts else None
            self._rule.commit(cohort)
            record = self._record(current, cohort, step_norm, reports, dots, scalars)
        except refused as refusal:
            return self.failures.refused(current, reports, self._flaw(refusal)), None
        return record, partial(self._take, current, reports.uploads, move)

    def _take(self, current: Round, uploads: Sequence[Upload], move: Callable[[], object]) -> None:
        for upload in uploads:
            if upload.report.local_state:
                rule_state.set_local_state(self._rule, upload.client_id, upload.report.local_state, current.index)
        move()
        self._buffers.commit([upload.buffers for upload in uploads])
        self.failures.failed_rounds = 0
        if self.loss_batch_factor is None:
            self.loss_batch_factor = agreed_loss_batch_factor(uploads)

    def _usable(self, current: Round, drop: Callable[[Upload, str, bool], None]) -> UsableUploads:
        return usable(current.uploads, self._rows, self._buffers, self._rule, drop)

    def trial(self, current: Round) -> str | None:
        """Why the method cannot work with these uploads alone; ``None`` if it can. Everything stays as it was."""
        reports = self._usable(current, lambda upload, why, some: None)
        if not reports.uploads:
            return None
        indices = [upload.index for upload in reports.uploads]
        commit_or_undo = rule_state.transaction(self._algorithm, self._rule)
        try:
            cohort = self._cohort(current, reports, indices, reports.norms)
            step, norm = self._aggregate(cohort)
            self._step.tried(self._rows.columns.joined(step), norm)
            self._rule.commit(cohort)
        except Exception as error:
            return self._flaw(error)
        finally:
            commit_or_undo(False)
        return None

    def _flaw(self, error: Exception) -> str:
        plain = isinstance(error, RefusedStepError)
        return str(error) if plain else f"{type(self._algorithm).__name__} raised {type(error).__name__}: {error}"

    def _cohort(self, current: Round, reports: UsableUploads, places: Sequence[int], norms: Tensor | None) -> Cohort:
        """The cohort of some uploads, whose updates move to the front of the rows."""
        uploads, rows, columns = reports.uploads, self._rows, self._rows.columns
        ids = tuple(upload.client_id for upload in uploads)
        names = rows.same_companions(dict(zip(places, ids, strict=True)))
        updates, asks = rows.gathered(places, norms), current.asks
        rates = [upload.client_lr for upload in uploads if upload.client_lr is not None]
        losses = [upload.loss for upload in uploads if upload.loss is not None]
        what = f"extras of {type(self._rule).__name__}"
        return trusted(Cohort)(
            params=columns.part(self._binding.theta),
            updates=updates,
            losses=torch.tensor(losses, dtype=torch.float64) if len(losses) == len(uploads) else None,
            sizes=torch.tensor([upload.size for upload in uploads]),
            client_ids=ids,
            round=current.index,
            client_lr=trusted(mean_rate)(rates) if len(rates) == len(uploads) else None,
            num_clients=self._num_clients,
            extras=stacked([upload.report.extras for upload in uploads], ids, what),
            companions={name: updates.beside(rows.companion(name)[: len(uploads)]) for name in names},
            losses_at=None if asks is None else (lambda params: asks(columns.joined(params), ids)),
            num_samples=self.num_samples,
        )

    def _guarded(self, current: Round, reports: UsableUploads) -> tuple[Cohort, UsableUploads, dict[str, float]]:
        """The cohort behind the guards, the reports of the clients in it, and numbers to log.

        Every guard sees what the one before has left; rows change in place. Numbers have the guard's class before them,
        with ``_2`` for the second of a class.
        """
        cohort = self._cohort(current, reports, [upload.index for upload in reports.uploads], reports.norms)
        attack, scalars, kinds, changed = self._options.attack, dict[str, float](), list[str](), False
        dishonest = [] if attack is None else attack.among(cohort.client_ids)
        if attack is not None and dishonest and attack.conspire(cohort.updates, dishonest):
            cohort = self._cohort(current, reports, range(len(cohort)), None)
            reports = replace(reports, norms=cohort.updates.norms().cpu())
        for guard in self._options.guards:
            verdict = guard.judge(cohort)
            kinds.append(type(guard).__name__)
            number = kinds.count(kinds[-1])
            named = {"left_out": float(len(verdict.left_out)), **verdict.scalars}
            scalars |= {f"{kinds[-1]}{f'_{number}' * (number > 1)}/{name}": each for name, each in named.items()}
            current.dropped |= {cohort.client_ids[k]: reason for k, reason in sorted(verdict.left_out.items())}
            if verdict.left_out or verdict.changes_rows:
                stay, changed = verdict.remaining(len(cohort)), changed or verdict.changes_rows
                reports = reports.at(stay)
                cohort = self._cohort(current, reports, stay, None if changed else reports.norms)
                verdict.change(cohort.updates.rows, stay)
        return cohort, reports, scalars

    def _aggregate(self, cohort: Cohort) -> tuple[Tensor, float]:
        """The step ``[n]`` and its norm; raises RefusedStepError for a step that is not finite."""
        self._algorithm.report = trusted(StepReport)()
        step = self._rule.adjust_step(cohort, self._algorithm.aggregate(cohort))
        shape = cohort.params.shape
        rule = f"{type(self._algorithm).__name__}.aggregate must return a finite step of shape {tuple(shape)}"
        if step.shape != shape or not step.is_floating_point():
            raise RuntimeError(f"{rule}, found shape {tuple(step.shape)} and {step.dtype}")
        norm = float(cohort.updates.norm_of(step))
        if not isfinite(norm):
            raise RefusedStepError(f"{rule}, found norm {norm}")
        return step, norm

    def _record(
        self, current: Round, cohort: Cohort, step_norm: float, reports: UsableUploads, dots: Tensor | None,
        scalars: Mapping[str, float],
    ) -> RoundRecord:  # fmt: skip
        report, layout = self._algorithm.report, self._binding.layout
        counts, names = None if dots is None else trusted(conflict_counts)(dots), layout.layer_names
        return trusted(RoundRecord)(
            round=current.index,
            client_ids=cohort.client_ids,
            dropped=dict(current.dropped),
            train_loss=reports.train_loss,
            losses=cohort.losses,
            step_norm=step_norm,
            update_norms=reports.norms,
            conflicts=None if counts is None else int(counts.model),
            layer_conflicts={} if counts is None else dict(zip(names, counts.layers.tolist(), strict=True)),
            flagged=report.flagged,
            weights=report.weights,
            scalars={**report.scalars, **self._rule.scalars, **scalars},
            seconds=current.seconds,
            skipped_rounds=self.failures.skipped_rounds,
            client_names=tuple(self.failures.names[client] for client in cohort.client_ids),
        )
