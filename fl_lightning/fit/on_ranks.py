# SPDX-License-Identifier: Apache-2.0
"""How the processes of a fit divide its work, and what they compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from math import ceil
from platform import python_version
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.attacks.base import Attack
from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.guards.base import Guard
from fl_lightning.algorithms.records import Federation
from fl_lightning.arguments import altered, trusted
from fl_lightning.clients.base import CohortExecutor, Sequential
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.ranks.column_rows import ColumnState
from fl_lightning.clients.ranks.ranked_runner import Ranked
from fl_lightning.clients.update_rows import UpdateRows
from fl_lightning.core.errors import RankError
from fl_lightning.core.records import RoundRecord
from fl_lightning.core.storage import rule_state
from fl_lightning.core.tensors import checksum, checksums
from fl_lightning.core.updates import Columns
from fl_lightning.fit.client_side import ClientSide
from fl_lightning.fit.options import FitOptions
from fl_lightning.fit.server import Server
from fl_lightning.lightning.fit_description import FitDescription, plain
from fl_lightning.lightning.names import Trainer, rank_zero_info
from fl_lightning.lightning.ranks import Ranks

_NAMED = 3
_TIMES = ("seconds", "training_seconds")
_SEED = ". Seed what draws the data (random_split, for instance), and read it from the same files"
_LIMITS = (
    "accumulate_grad_batches", "check_val_every_n_epoch", "current_epoch", "gradient_clip_algorithm",
    "gradient_clip_val", "max_epochs", "max_steps", "min_epochs", "min_steps", "num_sanity_val_steps", "precision",
    "reload_dataloaders_every_n_epochs", "val_check_interval",
)  # fmt: skip


def shared_work(
    ranks: Ranks, options: FitOptions, binding: BoundParameters, num_clients: int, agreement: Agreement
) -> Ranked:
    """Divides the columns among the ranks, if both halves of the method can work on a share of them."""
    total, rule = binding.theta.numel(), options.client_rule
    if whole_rows_reason(options) is not None:  # each rank has all columns, and what it notes is compared all the same
        return Ranked(ranks, Columns((0, total), note=agreement.note))
    columns = Columns(Columns.cut(total, ranks.size), ranks.rank, ranks.gather_parts, agreement.note)
    if not rule_state.in_columns(rule):
        return Ranked(ranks, columns)
    theta = binding.theta
    federation = trusted(Federation)(num_clients, binding.layout, theta.device, theta.dtype)
    return Ranked(ranks, columns, ColumnState(rule, deepcopy(rule), columns, ranks, federation))


def trainer_settings(trainer: Trainer) -> dict[str, Any]:
    """What a trainer and its optimizers do to a fit, in plain values."""
    found = {name: getattr(trainer, name) for name in _LIMITS}
    callbacks = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    found |= {"callbacks": sorted(callbacks), "optimizers": [type(optimizer) for optimizer in trainer.optimizers]}
    found |= {"module": type(trainer.lightning_module), "options of the optimizers": repr(groups)}
    return {name: plain(value) for name, value in found.items()}


def check_executor(ranks: Ranks, executor: CohortExecutor) -> None:
    """Raises ValueError if the executor makes processes of its own."""
    if not isinstance(executor, Sequential):
        raise ValueError(
            f"executor={executor!r} cannot be used with {ranks.size} processes, each of which trains its share of the "
            "clients: leave executor out"
        )


def check_same_fit(ranks: Ranks, description: FitDescription, trainer: Trainer) -> None:
    """Makes sure that all ranks have the same data, method, options and versions, and the same kind of processor."""
    here = {"python": python_version(), "threads": str(torch.get_num_threads())}
    settings = {**description.settings, **trainer_settings(trainer)}
    description = altered(description, settings=settings, versions={**description.versions, **here})
    first, *others = map(FitDescription.from_state_dict, ranks.gather(description.state_dict()))
    for rank, other in enumerate(others, 1):
        found = first.differences(other)
        if found:
            raise ValueError(
                f"all ranks must run the same fit, found that rank {rank} differs from rank 0 in "
                f"{'; '.join(found.values())}{_SEED * ('data' in found)}"
            )


def check_same_data(ranks: Ranks, stage: str, fingerprint: Mapping[str, Any]) -> None:
    """Makes sure that all ranks evaluate the same data."""
    for rank, other in enumerate(found := ranks.gather(dict(fingerprint))):
        if other != found[0]:
            names = sorted(name for name in fingerprint if other.get(name) != found[0].get(name))
            raise ValueError(
                f"all ranks must evaluate the same data, found that rank {rank} differs from rank 0 in the {stage} "
                f"data: other {', '.join(names)}{_SEED}"
            )


def say_processes(ranks: Ranks, options: FitOptions, sizes: Sequence[int], rows: UpdateRows) -> None:
    """Says what the processes can do for the fit."""
    largest, per_round = max(sizes), len(rows)
    bound = min(ranks.size, per_round * sum(sizes) / (len(sizes) * largest)) if largest else 1.0
    machines = f"{ranks.num_nodes} machine{'s' * (ranks.num_nodes > 1)}"
    clients = f"{per_round} client{'s' * (per_round > 1)}"
    width, total = rows.values.element_size(), rows.columns.total
    shard, reason = max(end - begin for begin, end in rows.columns.spans), whole_rows_reason(options)
    if reason is None:
        trained = ceil(per_round / ranks.size)
        held = (
            f"{(per_round * shard + trained * total) * width:,} B in each process, which holds a shard of the columns"
        )
    else:
        held = f"{per_round * total * width:,} B in each process, which holds them whole because {reason}"
    rank_zero_info(
        f"{ranks.size} processes on {machines}: with {clients} per round, the largest of which trains as "
        f"long as {largest} samples take, at most {max(bound, 1.0):.1f} times as fast as one. Updates take {held}"
    )


def whole_rows_reason(options: FitOptions) -> str | None:
    """Why every rank holds whole updates, as the end of a sentence; ``None`` if each holds a shard of the columns."""
    attacks = () if options.attack is None else (options.attack,)
    parts: tuple[ServerRule | ClientRule | Guard | Attack, ...] = (options.algorithm, options.client_rule)
    for part in (*parts, *options.guards, *attacks):
        if not part.columnwise:
            return f"{type(part).__name__} does not say that it works on columns (columnwise)"
    rule = options.client_rule
    if rule_state.in_columns(rule) and rule_state.has_local_state(rule):
        return f"{type(rule).__name__} has state in columns and clients that keep some"
    return None


def checksums_of(options: FitOptions, server: Server, clients: ClientSide) -> dict[str, int]:
    """Numbers that are equal in processes that hold the same model and the same state of the server, by name."""
    rule, columns, optimizer = options.algorithm, clients.runner.rows.columns, server.optimizer
    held: dict[str, Any] = {
        "the global parameters": clients.runner.global_params,
        "buffers": clients.buffers.global_values(),
        "guards": rule_state.without_shards(
            {name: rule_state.state_dict(guard, columns) for name, guard in options.named_guards.items()}
        ),
        type(rule).__name__: rule_state.without_shards(rule_state.state_dict(rule, columns)),
        "server_optimizer": optimizer and optimizer.state_dict(),
        "skipped_rounds": server.failures.skipped_rounds,
        "schedules": clients.schedules.state_dict(),
    }
    return {name: number for key, part in held.items() for name, number in checksums(part, key).items()}


class Agreement:
    """Finds out a rank that has come to something else than the others."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self._noted = ranks, 0

    def note(self, numbers: Tensor) -> None:
        """Takes numbers that all ranks must come to in this round, such as a step's coefficients."""
        self._noted = (31 * self._noted + checksum(numbers)) % 2**64  # the order counts, too

    def compared(self, record: RoundRecord, sums: Mapping[str, int]) -> RoundRecord:
        """Makes sure that all ranks have come out of a round with the same model, by the same decisions.

        ``sums`` are checksums of what the fit holds after the round, by name. Returns the record with the times that
        the first rank took.
        """
        account = {entry.name: getattr(record, entry.name) for entry in fields(record) if entry.name not in _TIMES}
        sums = {**sums, **checksums(account, "record"), "the coefficients of the step": self._noted}
        found = self.ranks.gather((sums, {name: getattr(record, name) for name in _TIMES}))
        self._noted = 0
        rank, names = _differing([parts for parts, _ in found])
        if names:
            raise RankError(
                f"after round {record.round}, rank {rank} must have {names} of rank 0, found others: use machines of "
                "one kind with the same versions, one thread per process on the CPU (OMP_NUM_THREADS=1), and "
                "deterministic kernels on GPUs, and change nothing on single ranks"
            )
        return altered(record, **found[0][1])


def check_same_start(ranks: Ranks, sums: Mapping[str, int]) -> None:
    """Makes sure that all ranks go on from the same checkpoint, or from the same first model."""
    rank, names = _differing(ranks.gather(dict(sums)))
    if names:
        raise ValueError(
            f"all ranks must begin with the same model and the same state of the method, found that rank {rank} "
            f"differs from rank 0 in {names}: pass the same ckpt_path, a file that all machines see"
        )


def _differing(found: Sequence[Mapping[str, int]]) -> tuple[int, str]:
    """The first rank whose numbers are not those of the first, and the names of some of them; ``""`` if all agree."""
    first = found[0]
    for rank, other in enumerate(found):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            return rank, ", ".join(names[:_NAMED])
    return 0, ""
