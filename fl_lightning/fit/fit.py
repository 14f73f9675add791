# SPDX-License-Identifier: Apache-2.0
"""One federated fit: rounds are opened, clients trained, rounds closed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from torch import Tensor

from fl_lightning.algorithms._shared.personal_layers import PersonalLayers
from fl_lightning.arguments import altered
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.update_rows import Upload
from fl_lightning.core.errors import RankError
from fl_lightning.core.modules import BatchNorm, submodules
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.storage import kept
from fl_lightning.core.storage.per_client import renumbered, renumbering
from fl_lightning.core.tensors import checksums
from fl_lightning.core.updates import Columns
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.fit.client_side import ClientSide
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.round_start import RoundStart
from fl_lightning.fit.server import Server
from fl_lightning.fit.uploads import Round, merge_left
from fl_lightning.lightning.batches import ClientTask
from fl_lightning.lightning.fit_description import check_resume
from fl_lightning.lightning.names import Trainer, rank_zero_info


class FederatedFit:
    """Everything that lives as long as one ``trainer.fit``, once optimizers exist and the module is on its device."""

    def __init__(self, trainer: Trainer, options: FitOptions, binding: BoundParameters, clients: ClientSide) -> None:
        self._trainer, self._options, self._binding, self.clients = trainer, options, binding, clients
        self._algorithm, self._rule = options.algorithm, options.client_rule
        loaders = clients.loaders
        self._num_clients = len(loaders)
        self._server = Server(options, binding, clients.buffers, clients.runner.rows, self._num_clients, loaders.sizes)
        self._failures, self._failures.names = self._server.failures, loaders.names
        self._server.cohorts.num_samples = int(loaders.sizes.sum())
        renewed = trainer.reload_dataloaders_every_n_epochs > 0  # type: ignore[attr-defined]
        self.description = self._server.description(
            names=loaders.names if isinstance(loaders.names, tuple) else (),  # else they are numbers
            data={} if renewed else loaders.fingerprint(),
            steps_per_round=None if renewed else clients.schedules.steps,
        )
        self._gone: list[str] = []  # names of clients that are not registered any more
        self.start: RoundStart | None = None  # of the open round
        self._round: Round | None = None
        self._drop_outs: frozenset[int] = frozenset()
        self.memory: dict[str, int] = {}  # allocated beside the module, in bytes by name

    # ---- the fit

    def begin(self, states: Mapping[str, Any] | None) -> None:
        """Starts from nothing, or from the states of a checkpoint or an earlier fit."""
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
            if "schedules" in states:  # files of earlier versions have none
                self.clients.schedules.load_state_dict(states["schedules"])
        sizes = self.clients.loaders.sizes if changed else None
        self.memory = server.begin(self._planned_rounds(), self._options.keeps_optimizer, sizes)
        plan = ", ".join(f"{name} {size:,} B" for name, size in self.memory.items())
        reason = self.clients.runner.full_path
        path_taken = "lean" if reason is None else f"full ({reason})"
        steps = self.clients.schedules.steps
        idle = self._binding.not_trained
        idle = idle and f" {idle} require gradients and are in no optimizer: they are not trained."
        rank_zero_info(
            f"Federated fit on {self._binding.theta.device}, {path_taken} path. Memory beside the module: {plan}. A "
            f"round counts as {steps} step{'s' * (steps > 1)} (global_step, max_steps, learning-rate schedules).{idle}"
        )

        self._hint_at_statistics()

    def _hint_at_statistics(self) -> None:
        """Says whose BatchNorm statistics are averaged: where data differ in kind, the mean may fit nobody."""
        module, rule = self._trainer.lightning_module, self._options.client_rule
        own = rule.find(module, self._binding.layout).buffers if isinstance(rule, PersonalLayers) else ()
        norms = [name for name, part in submodules(module) if isinstance(part, BatchNorm) and part.track_running_stats]
        averaged = [name for name in norms if f"{name}.running_mean" not in own]
        if averaged and self._options.buffers == "mean" and self._num_clients > 1:
            rank_zero_info(
                f"{len(averaged)} BatchNorm layer{'s have' if len(averaged) > 1 else ' has'} the mean of the clients' "
                "statistics. Where data differ in kind, as between scanners, it may fit some clients so badly that all "
                "their samples get one class: docs/methods/fedbn.md"
            )

    def _planned_rounds(self) -> int | None:
        """How many rounds the trainer's limits allow; ``None`` without limits."""
        trainer, limits = self._trainer, list[int]()
        if trainer.max_epochs not in (None, -1):
            limits.append(int(trainer.max_epochs))
        if trainer.max_steps != -1:
            limits.append(ceil(trainer.max_steps / self.clients.schedules.steps))
        return min(limits, default=None)

    def reload(self, loaders: ClientLoaders) -> None:
        """Goes on with data loaded anew (``reload_dataloaders_every_n_epochs``), which must be of as many clients."""
        if len(loaders) != self._num_clients:
            raise ValueError(f"reloaded data must have the same {self._num_clients} clients, found {len(loaders)}")
        self.clients.runner.batches.loaders = loaders
        self._server.cohorts.num_samples = int(loaders.sizes.sum())

    @property
    def _columns(self) -> Columns:
        return self.clients.runner.rows.columns

    def evaluation_params(self, params: Tensor) -> Tensor:
        """The parameters ``[n]`` that the method wants evaluated: ``params`` itself, if it is those."""
        mine = self._columns.part(params)
        chosen = self._algorithm.evaluation_params(mine)
        return params if chosen is mine else self._columns.joined(chosen)

    @property
    def evaluates_params(self) -> bool:
        """Whether they are the global parameters."""
        mine = self._columns.part(self._binding.theta)
        return self._algorithm.evaluation_params(mine) is mine

    def states(self) -> dict[str, Any]:
        """Everything that a bit-exact resume needs besides weights and loop counters."""
        return {
            "fit": self.description.state_dict(),
            "gone": self._gone,
            **self._server.states(),
            "client_optimizers": self.clients.runner.optimizers.state_dict(),
            "schedules": self.clients.schedules.state_dict(),
            "non_persistent_buffers": self.clients.buffers.unsaved() if self.start is None else self.start.unsaved,
        }

    def checksums(self) -> dict[str, int]:
        """Numbers that are equal in processes that hold the same model and the same state of the server, by name."""
        rule, optimizer = self._algorithm, self._server.optimizer
        held: dict[str, Any] = {
            "the global parameters": self._binding.theta,
            "buffers": self.clients.buffers.global_values(),
        }
        held["guards"] = kept.common(self._server.guards.state_dict(self._columns))
        held[type(rule).__name__] = kept.common(kept.saved(rule, self._columns))
        held["server_optimizer"] = optimizer and optimizer.state_dict()
        held |= {"skipped_rounds": self._failures.skipped_rounds, "schedules": self.clients.schedules.state_dict()}
        return {name: number for key, part in held.items() for name, number in checksums(part, key).items()}

    # ---- a round

    def begin_round(self) -> None:
        """No hook of the round has run yet."""
        self.start = RoundStart(self._trainer, self._binding, self.clients.buffers)

    def open_round(self, index: int) -> Iterator[ClientTask]:
        """Draws the cohort and yields one task per place."""
        self._binding.check(self._trainer.optimizers)
        loaders, clients = self.clients.loaders, self.clients
        asks = (lambda params, ids: clients.losses_at(index, params, ids)) if clients.needs.requery else None
        self._round = Round(index, asks=asks)
        selection = self._server.drawn(index, loaders.sizes)
        self._drop_outs = frozenset(selection.drop_outs)
        tasks = [
            ClientTask(int(client), place, index, int(loaders.sizes[client]), loaders.num_batches(client))
            for place, client in enumerate(selection.client_ids)
        ]
        self.clients.begin_round([t for t in tasks if t.num_samples > 0 and t.client_id not in self._drop_outs])
        yield from tasks
        for place in range(len(tasks), len(clients.runner.rows)):
            yield ClientTask(None, place, index)

    def train_client(self, task: ClientTask) -> Tensor | None:
        """Trains one client; returns its mean loss, or ``None`` if it was left out."""
        current, client = self._round, task.client_id
        assert current is not None
        assert client is not None
        if client in self._drop_outs:
            current.dropped[client] = "dropped out"
            return None
        if task.num_samples == 0:
            self._failures.drop(current, client, "it has no training data")
            return None
        self.clients.follow_optimizers()
        current.trained += 1
        try:
            upload = self._taken(self.clients.train(task))
        except RankError:
            raise
        except Exception as error:
            self._failures.drop(current, client, f"{type(error).__name__}: {error}", error)
            return None
        self.clients.schedules.arrived(client, upload.pace)
        current.uploads.append(upload)
        return upload.train_loss

    def _taken(self, upload: Upload) -> Upload:
        """What a client has sent; vectors beside its update are in the round's rows now."""
        if upload.report.companions:
            self.clients.runner.rows.take_companions(upload.index, upload.report.companions)
            upload = replace(upload, report=replace(upload.report, companions={}))
        return upload

    def close_round(self) -> RoundRecord:
        """Aggregates the uploads that arrived and applies the step."""
        current, clients, runner = self._round, self.clients, self.clients.runner
        assert current is not None
        clients.end_round()
        trained = current.seconds
        record = self._server.close_round(current)
        runner.optimizers.commit(record.client_ids)
        hand_set = merge_left(runner.visits, current.uploads, record.client_ids)
        self._round = self.start = None
        steps = clients.schedules.count(record.client_ids, hand_set)
        return altered(record, training_seconds=trained, local_steps=steps)
