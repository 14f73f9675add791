# SPDX-License-Identifier: Apache-2.0
"""The server's side of a round: check uploads, aggregate, apply the step, record what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.algorithms.guards.base import CannotGuardError
from fl_lightning.algorithms.records import Federation, StepReport
from fl_lightning.arguments import trusted
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank
from fl_lightning.clients.update_rows import UpdateRows
from fl_lightning.clients.upload import Upload
from fl_lightning.core.client_names import client_label, numbered
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.columns import Columns
from fl_lightning.core.errors import ClientError, ModuleError
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.storage import kept
from fl_lightning.core.storage.column_parts import for_columns, in_columns
from fl_lightning.fit.cohorts import Cohorts
from fl_lightning.fit.global_step import GlobalStep, RefusedStepError
from fl_lightning.fit.guarding import Guards
from fl_lightning.fit.memory_plan import memory_plan
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.uploads import Round, UsableUploads, usable
from fl_lightning.lightning.names import rank_zero_warn
from fl_lightning.metrics.functional import conflict_counts

_NAMED = 3  # clients in the message about a step that was refused


class Server:
    """Turns a round's uploads into new global parameters.

    Args:
        options: the method and what becomes of a round that fails.
        binding: the bound module, whose global parameters take the step.
        buffers: the module's buffers.
        rows: the rows of a round.
        num_clients: registered clients.
        guards: see the uploads before anybody else.

    Attributes:
        skipped_rounds: rounds that changed nothing.
        failed_rounds: rounds in a row, up to the last one, in which clients trained and nothing came of it: no upload
            was usable, or the step was refused.
        names: what people call the clients.
        cohorts: makes cohorts of uploads.

    Raises:
        TypeError: ``server_optimizer`` does not make an optimizer.
    """

    def __init__(
        self,
        options: FitOptions,
        binding: BoundParameters,
        buffers: BufferBank,
        rows: UpdateRows,
        num_clients: int,
        guards: Guards,
    ) -> None:
        self._options, self._algorithm, self._rule = options, options.algorithm, options.client_rule
        self._binding, self._buffers, self._rows, self._guards = binding, buffers, rows, guards
        self.skipped_rounds, self.failed_rounds = 0, 0
        self._step = GlobalStep(binding, options.server_optimizer)
        self.names = numbered(num_clients)
        self.cohorts = Cohorts(rows, binding.theta, options.client_rule, num_clients)

    @property
    def optimizer(self) -> Optimizer | None:
        """The server optimizer, if there is one."""
        return self._step.optimizer

    # ---- what lasts from round to round

    def begin(self, federation: Federation, keeps_client_optimizers: bool) -> dict[str, int]:
        """All that the first round needs is there; returns bytes that are held beside the module, by name."""
        rules = self._algorithm, self._rule
        for rule in rules:
            rule.begin_fit(federation)
        return memory_plan(federation, rules, self.optimizer is not None, keeps_client_optimizers)

    def reset(self) -> None:
        """Begins anew."""
        kept.reset(self._algorithm)
        kept.reset(self._rule)
        self._guards.reset()

    def states(self, columns: Columns) -> dict[str, Any]:
        """What a bit-exact continuation needs of the method, the guards and the server optimizer.

        Args:
            columns: of this process.
        """
        rules = {"algorithm": self._algorithm, "client_rule": self._rule}
        return {
            **{name: in_columns(kept.state(rule), kept.columns(rule), columns) for name, rule in rules.items()},
            "guards": self._guards.state_dict(columns),
            "server_optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "skipped_rounds": self.skipped_rounds,
            "failed_rounds": self.failed_rounds,
        }

    def load(self, states: Mapping[str, Any], columns: Columns) -> None:
        """Goes on from what :meth:`states` returned; files of earlier versions lack guards and counts."""
        for name, rule in (("algorithm", self._algorithm), ("client_rule", self._rule)):
            kept.load(rule, for_columns(states[name], kept.columns(rule), columns))
        self._guards.load_state_dict(states.get("guards", {}), columns)
        self.skipped_rounds = states.get("skipped_rounds", 0)
        self.failed_rounds = states.get("failed_rounds", 0)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(states["server_optimizer"])

    def drop(
        self, current: Round, client_id: int, reason: str, cause: Exception | None = None, others: bool = True
    ) -> None:
        """Leaves a client out of the round with a warning, or raises, by policy.

        Args:
            current: the round.
            client_id: the client.
            reason: why.
            cause: what its training raised, if anything.
            others: whether other clients of the round may do better.

        Raises:
            ClientError: the policy is ``"raise"``, or the module would fail for every client.
        """
        label = client_label(client_id, self.names)
        at_fault = isinstance(cause, ModuleError)
        if at_fault or self._options.on_client_error == "raise":
            succeeded = cause is None or bool(current.uploads) or current.index > 0
            hint = "no client has succeeded, so look at the module, its learning rate and the data"
            hint = "on_client_error='drop' leaves such clients out" if others and succeeded else hint
            hint = "it is the module's fault" if at_fault else hint
            raise ClientError(f"client {label} in round {current.index}: {reason} ({hint})") from cause
        current.dropped[client_id] = reason
        rank_zero_warn(f"client {label} is left out of round {current.index}: {reason}")

    def close_round(
        self, current: Round, refused: tuple[type[Exception], ...] = (RefusedStepError,)
    ) -> RoundRecord:  # fmt: skip
        """Aggregates the round and applies the step, or leaves everything as it is.

        A round changes nothing if it has too few usable uploads, or if the step, the global parameters or the server
        optimizer would not be finite.

        Args:
            current: the round, with what arrived.
            refused: errors of the method that leave the round out; others are raised, with everything as it was.

        Raises:
            ClientError: the step is not finite and the policy is ``"raise"``, or too many rounds in a row have failed.
            RuntimeError: the rule returned something else than a step.
        """
        reports = self._usable(
            current, lambda upload, why, others: self.drop(current, upload.client_id, why, others=others)
        )
        uploads, count = reports.uploads, len(reports.uploads)
        if count < self._options.min_clients:
            reason = f"{count} usable report{'s' * (count > 1)}, fewer than min_clients={self._options.min_clients}"
            reason = reason if uploads else "no usable report"
            return self._skip(current, uploads, f"had {reason}", reason, current.trained > 0 and count == 0)
        settle = kept.tentatively(self._algorithm, self._rule, *self._guards.each)
        try:
            cohort, reports, scalars = self._guarded(current, reports)
        except BaseException as flaw:
            settle(False)
            if not isinstance(flaw, CannotGuardError):
                raise
            return self._skip(current, uploads, f"had {flaw}", str(flaw), failed=True)
        try:
            step, step_norm = self._aggregate(cohort)
            take = self._step.tried(self._rows.columns.joined(step), step_norm)
            dots = cohort.updates.dots(step).cpu()
            self._rule.commit(cohort)
        except refused as refusal:
            settle(False)
            return self._refused(current, reports, self._flaw(refusal))
        except BaseException:
            settle(False)
            raise
        settle(True)
        for upload in reports.uploads:
            if upload.report.kept:
                kept.keep(self._rule, upload.client_id, upload.report.kept, current.index)
        take()
        self._buffers.commit([upload.buffers for upload in reports.uploads])
        self.failed_rounds = 0
        return self._record(current, cohort, step_norm, reports, dots, scalars)

    def _usable(self, current: Round, drop: Callable[[Upload, str, bool], None]) -> UsableUploads:
        return usable(current.uploads, self._rows, self._buffers, self._rule, drop)

    def trial(self, current: Round) -> str | None:
        """Why the method cannot work with these uploads alone; ``None`` if it can. Everything stays as it was."""
        reports = self._usable(current, lambda upload, why, others: None)
        if not reports.uploads:
            return None
        indices = [upload.index for upload in reports.uploads]
        settle = kept.tentatively(self._algorithm, self._rule)
        try:
            cohort = self.cohorts.of(current, reports, indices, reports.norms)
            step, norm = self._aggregate(cohort)
            self._step.tried(self._rows.columns.joined(step), norm)
            self._rule.commit(cohort)
        except Exception as error:
            return self._flaw(error)
        finally:
            settle(False)
        return None

    def _flaw(self, error: Exception) -> str:
        """What the method's error says."""
        plain = isinstance(error, RefusedStepError)
        return str(error) if plain else f"{type(self._algorithm).__name__} raised {type(error).__name__}: {error}"

    def _guarded(self, current: Round, reports: UsableUploads) -> tuple[Cohort, UsableUploads, dict[str, float]]:
        """The cohort behind the guards, the reports of the clients in it, and numbers to log.

        Raises:
            CannotGuardError: a guard can make nothing of the cohort.
        """
        left = reports

        def rebuilt(places: list[int], changed: bool) -> Cohort:
            nonlocal left
            left = left.at(places)
            return self.cohorts.of(current, left, places, None if changed else left.norms)

        def left_out(place: int, reason: str) -> None:
            current.dropped[reports.uploads[place].client_id] = reason

        indices = [upload.index for upload in reports.uploads]
        cohort = self.cohorts.of(current, reports, indices, reports.norms)
        attack = self._options.attack
        dishonest = [] if attack is None else attack.among(cohort.client_ids)
        if attack is not None and dishonest and attack.conspire(cohort.updates, dishonest):
            places = list(range(len(cohort)))
            cohort = self.cohorts.of(current, reports, places, None)
            left = reports = replace(reports, norms=cohort.updates.norms().cpu())
        found = self._guards.guarded(cohort, rebuilt, left_out)
        return found.cohort, left, found.scalars

    def _aggregate(self, cohort: Cohort) -> tuple[Tensor, float]:
        """The step ``[n]`` and its norm.

        Raises:
            RefusedStepError: the step is not finite.
            RuntimeError: the rule returned something else than a step.
        """
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
        self,
        current: Round,
        cohort: Cohort,
        step_norm: float,
        reports: UsableUploads,
        dots: Tensor,
        scalars: Mapping[str, float],
    ) -> RoundRecord:
        report, layout = self._algorithm.report, self._binding.layout
        counts = trusted(conflict_counts)(dots)
        return trusted(RoundRecord)(
            round=current.index,
            client_ids=cohort.client_ids,
            dropped=dict(current.dropped),
            train_loss=reports.train_loss,
            losses=cohort.losses,
            step_norm=step_norm,
            update_norms=reports.norms,
            conflicts=int(counts.model),
            layer_conflicts=dict(zip(layout.layer_names, counts.layers.tolist(), strict=True)),
            flagged=report.flagged,
            weights=report.weights,
            scalars={**report.scalars, **self._rule.scalars, **scalars},
            seconds=current.seconds,
            skipped_rounds=self.skipped_rounds,
            client_names=tuple(self.names[client] for client in cohort.client_ids),
        )

    def _refused(self, current: Round, reports: UsableUploads, flaw: str) -> RoundRecord:
        """The record of a round whose step was refused, or an error, by policy."""
        largest = reports.norms.sort(descending=True, stable=True).indices[:_NAMED].tolist()
        labels = [client_label(reports.uploads[place].client_id, self.names) for place in largest]
        norms = ", ".join(f"client {who} {float(reports.norms[k]):.3g}" for who, k in zip(labels, largest, strict=True))
        words = f"{flaw}; the largest norms of updates are {norms}"
        if self._options.on_client_error == "raise":
            raise ClientError(
                f"round {current.index}: {words}. The model stays as it was before the round "
                "(on_client_error='drop' goes on with the next one)"
            )
        return self._skip(current, reports.uploads, f"was left out: {words}", flaw, failed=True)

    def _skip(
        self, current: Round, uploads: Sequence[Upload], event: str, reason: str, failed: bool
    ) -> RoundRecord:  # fmt: skip
        """The record of a round that does not count; what did arrive is left out like everybody else.

        Raises:
            ClientError: too many rounds in a row have failed.
        """
        self.skipped_rounds += 1
        self.failed_rounds = self.failed_rounds + 1 if failed else 0 if uploads else self.failed_rounds
        others = {u.client_id: f"the round had {reason}" for u in uploads if u.client_id not in current.dropped}
        dropped = {**current.dropped, **others}
        if failed and self.failed_rounds == self._options.max_failed_rounds:
            some = list(dropped.items())[:_NAMED]
            causes = "; ".join(f"client {client_label(client, self.names)}: {why}" for client, why in some)
            number = f"{self.failed_rounds} round{'s' * (self.failed_rounds > 1)} in a row"
            raise ClientError(
                f"{number} changed nothing although clients trained, up to round {current.index}, which {event} "
                f"({causes}). The model is that of the last round that counted; max_failed_rounds="
                f"{self._options.max_failed_rounds} of FederatedStrategy stops the fit here, None never does"
            )
        rank_zero_warn(f"round {current.index} {event}: the global model is unchanged")
        return trusted(RoundRecord)(
            current.index, (), dropped, nan, None, 0.0, torch.zeros(0), 0, {}, True, None, {}, current.seconds, reason,
            self.skipped_rounds,
        )  # fmt: skip
