# SPDX-License-Identifier: Apache-2.0
"""One federated fit: rounds are opened, clients trained, rounds closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.personal_layers import PersonalLayers
from fl_lightning.arguments import altered
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.update_rows import SummedRows, Upload
from fl_lightning.core.errors import RankError
from fl_lightning.core.modules import BatchNorm, submodules
from fl_lightning.core.records import RoundRecord, round_metrics
from fl_lightning.core.storage.declared import renumbered
from fl_lightning.core.storage.rule_state import renumbering
from fl_lightning.core.updates import Columns
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.fit.client_side import ClientSide
from fl_lightning.fit.on_ranks import Agreement, check_same_start, checksums_of
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.server import Server
from fl_lightning.fit.state_callback import RoundStart
from fl_lightning.fit.uploads import Round, merge_module_changes
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.fit_description import check_resume
from fl_lightning.lightning.names import Trainer, rank_zero_info


class FederatedFit:
    """One ``trainer.fit``, once data and optimizers are there: conducts the rounds for the epoch loop.

    ``agreement`` is there if several processes share the work.
    """

    def __init__(
        self, options: FitOptions, binding: BoundParameters, clients: ClientSide, agreement: Agreement | None
    ) -> None:
        self._options, self._binding, self.clients, self._agreement = options, binding, clients, agreement
        loaders = clients.loaders
        self._server = Server(options, binding, clients.buffers, clients.runner.rows, len(loaders), loaders.sizes)
        self._server.failures.names = loaders.names
        self._server.num_samples = int(loaders.sizes.sum())
        renewed = self._trainer.reload_dataloaders_every_n_epochs > 0  # type: ignore[attr-defined]
        self.description = self._server.description(
            names=loaders.names if isinstance(loaders.names, tuple) else (),  # else they are numbers
            data={} if renewed else loaders.fingerprint(),
            steps_per_round=None if renewed else clients.schedules.steps,
        )
        self._gone: list[str] = []  # names of clients that are not registered any more
        self.start: RoundStart | None = None  # of the open round
        self._round: Round | None = None
        self.last_round: RoundRecord | None = None
        self.finished = False
        self._trained: Tensor | None = None  # afterwards, if the module has other parameters

    @property
    def _trainer(self) -> Trainer:
        return self.clients.runner.trainer

    # ---- the fit

    def begin(self, states: Mapping[str, Any] | None) -> dict[str, int]:
        """Starts from nothing, or from the states of a checkpoint or an earlier fit.

        Returns what is allocated beside the module, in bytes by name.
        """
        server, changed = self._server, False
        if states is None:
            server.reset()
        else:
            path = self._trainer.ckpt_path
            source = "the last fit's state" if path is None else f"the checkpoint {path}"
            changed = check_resume(states, self.description, source, self._options.strict_resume)
            ids, self._gone = renumbering(states, self.clients.loaders.names)
            server.load(states, ids)
            self.clients.runner.optimizers.load_state_dict(renumbered(states["client_optimizers"], ids))
            self.clients.schedules.load_state_dict(states["schedules"])
            self.clients.runner.losses.factor = server.loss_batch_factor
        sizes = self.clients.loaders.sizes if changed else None
        memory = server.begin(self._max_rounds(), self._options.keeps_optimizer, sizes)
        usage = ", ".join(f"{name} {size:,} B" for name, size in memory.items())
        reason = self.clients.runner.full_path
        path_taken = "lean" if reason is None else f"full ({reason})"
        steps = self.clients.schedules.steps
        idle = self._binding.not_trained
        idle = idle and f" {idle} require gradients and are in no optimizer: they are not trained."
        summed = isinstance(self.clients.runner.rows, SummedRows)
        more = " Updates are added up as they arrive, so nobody counts conflicts (count_conflicts)." * summed
        rank_zero_info(
            f"Federated fit on {self._binding.theta.device}, {path_taken} path. Memory beside the module: {usage}. A "
            f"round counts as {steps} step{'s' * (steps > 1)} (global_step, max_steps, learning-rate schedules)."
            f"{more}{idle}"
        )
        self._hint_at_statistics()
        trained, theta = (states or {}).get("trained"), self._binding.theta
        # A checkpoint and a fit that is over leave the parameters to evaluate in the module: go on from those that were
        # trained, unless the module was given other weights since. Another device may compute them a little otherwise.
        if trained is not None and _same(self.shown(trained.to(theta)), theta):
            theta.copy_(trained)
        if self._agreement is not None:
            check_same_start(self._agreement.ranks, checksums_of(self._options, self._server, self.clients))
        return memory

    def _hint_at_statistics(self) -> None:
        """Says whose BatchNorm statistics are averaged: where data differ in kind, the mean may fit nobody."""
        module, rule = self._trainer.lightning_module, self._options.client_rule
        own = rule.find(module, self._binding.layout).buffers if isinstance(rule, PersonalLayers) else ()
        norms = [name for name, part in submodules(module) if isinstance(part, BatchNorm) and part.track_running_stats]
        averaged = [name for name in norms if f"{name}.running_mean" not in own]
        if averaged and self._options.buffers == "mean" and len(self.clients.loaders) > 1:
            rank_zero_info(
                f"{len(averaged)} BatchNorm layer{'s have' if len(averaged) > 1 else ' has'} the mean of the clients' "
                "statistics. Where data differ in kind, as between scanners, it may fit some clients so badly that all "
                "their samples get one class: docs/methods/fedbn.md"
            )

    def _max_rounds(self) -> int | None:
        """How many rounds the trainer's limits allow; ``None`` without limits."""
        trainer, limits = self._trainer, list[int]()
        if trainer.max_epochs not in (None, -1):
            limits.append(int(trainer.max_epochs))
        if trainer.max_steps != -1:
            limits.append(ceil(trainer.max_steps / self.clients.schedules.steps))
        return min(limits, default=None)

    def reload(self, loaders: ClientLoaders) -> None:
        """Goes on with data loaded anew (``reload_dataloaders_every_n_epochs``), which must be of as many clients."""
        before = len(self.clients.loaders)
        if len(loaders) != before:
            raise ValueError(f"reloaded data must have the same {before} clients, found {len(loaders)}")
        self.clients.runner.batches.loaders = loaders
        self._server.num_samples = int(loaders.sizes.sum())

    def finish(self) -> None:
        """All rounds are over: the module keeps the parameters that the method wants evaluated."""
        words = self._options.algorithm.end_fit()
        if words is not None:
            rank_zero_info(words)
        theta = self._binding.theta
        final = self.shown(theta)
        if final is not theta:
            self._trained = theta.clone()
            theta.copy_(final)
        self.finished = True

    def close(self) -> None:
        """The fit is over, or was broken off."""
        self.clients.close()
        if self.start is not None:
            self.start.restore()

    @property
    def _columns(self) -> Columns:
        return self.clients.runner.rows.columns

    def shown(self, params: Tensor) -> Tensor:
        """The parameters ``[n]`` that the method wants evaluated: ``params`` itself, if it is those."""
        mine = self._columns.part(params)
        chosen = mine if self.finished else self._options.algorithm.evaluation_params(mine)
        return params if chosen is mine else self._columns.joined(chosen)

    @property
    def saved_theta(self) -> Tensor:
        """The global parameters ``[n]``, or those that an open round has found."""
        return self._binding.theta if self.start is None else self.start.theta

    def states(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs besides weights and loop counters."""
        theta = self.saved_theta
        return {
            "trained": self._trained if self.finished else None if self.shown(theta) is theta else theta,
            "fit": self.description.state_dict(),
            "gone": self._gone,
            **self._server.states(),
            "client_optimizers": self.clients.runner.optimizers.state_dict(),
            "schedules": self.clients.schedules.state_dict(),
            "non_persistent_buffers": self.clients.buffers.unsaved() if self.start is None else self.start.unsaved,
        }

    # ---- a round

    def begin_round(self) -> None:
        """No hook of the round has run yet."""
        self.start = RoundStart(self._trainer, self._binding, self.clients.buffers, self.clients.runner.optimizers)

    def open_round(self) -> Iterator[ClientTask]:
        """Draws the cohort of the current epoch and yields one task per place."""
        self._binding.check(self._trainer.optimizers, lambda: self.clients.runner.isolation.take_snapshot().tensors)
        loaders, clients, index = self.clients.loaders, self.clients, self._trainer.current_epoch
        asks = (lambda params, ids: clients.losses_at(index, params, ids)) if clients.needs.requery else None
        selection = self._options.drawn(index, len(clients.runner.rows), loaders.sizes)
        self._round = Round(index, asks=asks, drop_outs=frozenset(selection.drop_outs))
        tasks = [
            ClientTask(int(client), place, index, int(loaders.sizes[client]), loaders.num_batches(client))
            for place, client in enumerate(selection.client_ids)
        ]
        present = [t for t in tasks if t.num_samples > 0 and t.client_id not in selection.drop_outs]
        clients.begin_round(present)
        if isinstance(clients.runner.rows, SummedRows) and present:
            sizes = torch.tensor([task.num_samples for task in present]).double()
            clients.runner.rows.expect([task.index for task in present], self._options.algorithm.known_weights(sizes))
        yield from tasks
        for place in range(len(tasks), len(clients.runner.rows)):
            yield ClientTask(None, place, index)

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains one client; returns its mean loss, or ``None`` if it was left out.

        The module holds the global weights before and after.
        """
        loss = self._train(task)
        # As text: the Rich bar shows numbers with three decimals.
        self.clients.runner.loop.publish({}, {"round": str(task.round), "client": str(task.client_id)})
        return loss

    def _train(self, task: ClientTask) -> Tensor | None:
        current, client = self._round, task.client_id
        assert current is not None
        assert client is not None
        if client in current.drop_outs:
            current.dropped[client] = "dropped out"
            return None
        if task.num_samples == 0:
            self._server.failures.drop(current, client, "it has no training data")
            return None
        self.clients.follow_optimizers()
        current.trained += 1
        try:
            upload = self._taken(self.clients.train(task))
        except RankError:
            raise
        except Exception as error:
            self._server.failures.drop(current, client, f"{type(error).__name__}: {error}", error)
            return None
        self.clients.schedules.arrived(client, upload.step_counts)
        current.uploads.append(upload)
        return upload.train_loss

    def _taken(self, upload: Upload) -> Upload:
        """What a client has sent; all of its vectors are in the round's rows now."""
        self.clients.runner.rows.complete(upload.index)
        if upload.report.companions:
            self.clients.runner.rows.take_companions(upload.index, upload.report.companions)
            upload = replace(upload, report=replace(upload.report, companions={}))
        return upload

    def close_round(self) -> None:
        """Aggregates the uploads that arrived, moves schedulers and clock to the round's end, and applies the step."""
        current, clients, runner = self._round, self.clients, self.clients.runner
        assert current is not None
        clients.end_round()
        trained = current.seconds
        with self._server.closed(current) as record:  # after an error a checkpoint holds the round's start, and no step
            hand_set = merge_module_changes(runner.isolation, current.uploads, record.client_ids)
            steps = clients.schedules.close_round(record.client_ids, hand_set)
        runner.optimizers.commit(record.client_ids)
        runner.losses.factor = self._server.loss_batch_factor
        self._round = self.start = None
        self.last_round = altered(record, training_seconds=trained, local_steps=steps)

    def publish_round(self) -> None:
        """Logs the round that was closed; all ranks have closed it alike."""
        record = self.last_round
        assert record is not None
        if self._agreement is not None:
            sums = checksums_of(self._options, self._server, self.clients)
            record = self.last_round = self._agreement.compared(record, sums)
        counted = {} if record.conflicts is None else {"conflicts": str(record.conflicts)}
        self.clients.runner.loop.publish(round_metrics(record), counted)
        if self._agreement is not None:
            self._agreement.ranks.follow_requests()  # whoever stops validates first

    def end_epoch(self) -> None:
        """Ranks stop together."""
        if self._agreement is not None:
            self._agreement.ranks.follow_requests(ends_round=True)


def _same(params: Tensor, others: Tensor) -> bool:
    return torch.allclose(params, others, rtol=8 * torch.finfo(params.dtype).eps, atol=0.0, equal_nan=True)
