# SPDX-License-Identifier: Apache-2.0
"""The strategy's arguments in one frozen record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.algorithms.attacks.base import Attack
from fl_lightning.algorithms.base import ClientRule, ServerRule, obstacle
from fl_lightning.algorithms.differential_privacy import DifferentialPrivacy, accounting
from fl_lightning.algorithms.guards.base import Guard, check_guards
from fl_lightning.algorithms.records import READS, Needs, Reads
from fl_lightning.arguments import check_unused
from fl_lightning.clients.base import CohortExecutor
from fl_lightning.clients.client_batches import LocalOptions
from fl_lightning.core.seeding import derive_seed
from fl_lightning.core.storage import rule_state
from fl_lightning.core.taken_names import refuse_taken_names
from fl_lightning.data.cohort_samplers import CohortSampler, Selection, UniformSampler
from fl_lightning.fit.checks import Method, paired_client_rule
from fl_lightning.fit.loaders import PartitionLike
from fl_lightning.lightning.fit_description import plain
from fl_lightning.lightning.names import rank_zero_warn
from fl_lightning.metrics.functional import Mode

_GUESSED = 2**32
"""Seeds below can all be tried."""

_COUNTED = 2**30
"""Bytes of a round's updates that are held for nothing but counts of conflicts, unless these are asked for."""

COHORT = "a count of clients (an int such as 10) or a fraction of them (a float above 0 and up to 1.0)"
"""What ``clients_per_round`` is."""


@dataclass(frozen=True)
class FitOptions(LocalOptions):
    """What shapes a fit; see :class:`fl_lightning.FederatedStrategy`, whose arguments these are."""

    algorithm: ServerRule
    client: ClientRule | ServerRule | None
    clients_per_round: int | float
    full_gradients: bool
    server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    sampler: CohortSampler
    buffers: Literal["mean", "global", "largest"]
    fairness_metric: str | None
    fairness_mode: Mode | Mapping[str, Mode]
    on_client_error: Literal["raise", "drop"]
    guard: Guard | Sequence[Guard] | None
    executor: CohortExecutor
    min_clients: int
    max_failed_rounds: int | None
    strict_resume: bool
    log_client_names: bool
    count_conflicts: bool | None
    partition: PartitionLike | None
    client_rule: ClientRule = field(init=False)  # that of client, or the algorithm's own

    def __post_init__(self) -> None:
        _check_names(self.algorithm, self.client, self.sampler, self.attack, *self.guards)
        rule = paired_client_rule(self.algorithm, self.client, self.full_gradients)
        _check_names(rule)
        object.__setattr__(self, "client_rule", rule)
        self._check_local_training()
        if self.server_optimizer is not None and self.needs.exact_step:
            raise ValueError(
                f"server_optimizer must be left out with {type(self.algorithm).__name__}, which goes back to earlier "
                f"parameters by steps of its own, found {self.server_optimizer!r}: it would take other steps"
            )
        if self.guard is not None and not self.guards:
            raise ValueError(f"guard of FederatedStrategy must be None or at least one guard, found {self.guard!r}")
        if self.fairness_metric is None and isinstance(self.fairness_mode, str):
            check_unused("fairness_mode", self.fairness_mode, "max", "without fairness_metric, or map metrics to modes")
        if isinstance(self.clients_per_round, int):
            self.check_rounds(self.clients_per_round)
        elif self.clients_per_round > 1:
            raise ValueError(f"clients_per_round must be {COHORT}, found {self.clients_per_round}")
        self._check_privacy()

    def _check_local_training(self) -> None:
        fewest = self.client_rule.fewest_epochs
        if self.local_steps is None and self.local_epochs < fewest:
            raise ValueError(
                f"local_epochs must be at least the {fewest} passes over its data that a client of "
                f"{self.method.client} needs, found {self.local_epochs}"
            )
        if self.local_steps is not None:
            check_unused("local_epochs", self.local_epochs, 1, f"with local_steps={self.local_steps}")
        if self.needs.full_gradients:
            why = f"with {self.method.asking('full_gradients')}, which sends full gradients and trains nothing locally"
            check_unused("client_optimizer_state", self.client_optimizer_state, "reset", why)
        if self.needs.full_gradients and (self.local_epochs != 1 or self.local_steps is not None):
            asking = "full_gradients=True" if self.full_gradients else type(self.algorithm).__name__
            raise ValueError(
                f"{asking} trains nothing locally: leave local_epochs and local_steps out, "
                f"found local_epochs={self.local_epochs}, local_steps={self.local_steps}"
            )

    def _check_privacy(self) -> None:
        """Raises an error where differential privacy would not hold what it promises, or could not say it."""
        rule = self.client_rule
        if not isinstance(rule, DifferentialPrivacy):
            return
        accounting()
        if rule.where == "central" and self.guard is not None:
            raise ValueError(
                "guard must be left out with DifferentialPrivacy(where='central'), whose noise covers a plain mean: "
                f"use where='local', found {self.guard!r}"
            )
        if rule.amplified and self.sampler != UniformSampler():
            raise ValueError(
                "sampler must be UniformSampler() with DifferentialPrivacy(amplified=True), which counts on uniform "
                f"draws, found {self.sampler!r}"
            )
        if rule.amplified and rule.seed is None and self.seed < _GUESSED:
            rank_zero_warn(
                f"DifferentialPrivacy(amplified=True) counts on nobody knowing who was drawn, but seed={self.seed} of "
                "FederatedStrategy can be guessed, and it decides who is drawn: give seed=secrets.randbits(63) and "
                "keep it secret"
            )

    @property
    def needs(self) -> Needs:
        """What both halves of the method ask for."""
        return self.method.needs

    @cached_property
    def method(self) -> Method:
        """The method under the names that the user gave its halves."""
        server, given, rule = self.algorithm, self.algorithm if self.client is None else self.client, self.client_rule
        own = server.needs | Needs(full_gradients=self.full_gradients)
        return Method(type(server).__name__, type(given).__name__, own, own | rule.needs, rule)

    @property
    def called(self) -> str:
        """The method in a user's words."""
        half = "" if self.client is None else f" with client={type(self.client).__name__}"
        return type(self.algorithm).__name__ + half

    @cached_property
    def guards(self) -> tuple[Guard, ...]:
        """The guards, in the order in which they see the updates."""
        if self.guard is None:
            return ()
        return (self.guard,) if isinstance(self.guard, Guard) else tuple(self.guard)

    @property
    def named_guards(self) -> dict[str, Guard]:
        """The guards under the names that they have in checkpoints."""
        return {f"{type(guard).__name__} {place}": guard for place, guard in enumerate(self.guards)}

    def adds_up(self, size: int) -> bool:
        """Whether a round's updates, of so many bytes, are added up as they arrive: nothing reads single ones."""
        if self.count_conflicts or (self.count_conflicts is None and size <= _COUNTED):
            return False
        server, rule, alone = self.algorithm, self.client_rule, self.attack is None and not self.guards
        known = server.known_weights(torch.ones(1, dtype=torch.float64)) is not None
        sums = known and server.reads == rule.reads == "sums" and not rule_state.in_columns(rule)
        return sums and alone and self.on_client_error == "raise"  # else clients may be left out, and weights change

    def drawn(self, index: int, size: int, sizes: Tensor) -> Selection:
        """At most ``size`` clients for a round, by all clients' training samples ``sizes [N]``; else ValueError."""
        selection = self.sampler.select(index, size, sizes, derive_seed(self.seed, "sampler"))
        ids = selection.client_ids
        if len(ids) > size or max(ids, default=0) >= len(sizes):
            who = f"{type(self.sampler).__name__}.select"
            raise ValueError(f"{who} must give at most {size} ids from 0 to {len(sizes) - 1}, found {tuple(ids)}")
        return selection

    def check_rounds(self, cohort_size: int, sizes: Tensor | None = None) -> None:
        """Raises ValueError if no round can have ``min_clients`` usable uploads, or so many as a guard needs.

        ``sizes [N]`` are training samples of all registered clients, once they are known.
        """
        most, who = cohort_size, f"sampled per round (clients_per_round={self.clients_per_round})"
        if sizes is not None and self.sampler.most_reports(cohort_size, sizes) < most:
            most, who = self.sampler.most_reports(cohort_size, sizes), f"that have data and report by {self.sampler!r}"
        if self.min_clients > most:
            raise ValueError(
                f"min_clients must be at most the {most} clients {who}, found {self.min_clients}: no round would "
                "change the model"
            )
        check_guards(self.guards, most, f"the {most} clients {who}")

    @property
    def reads(self) -> Reads:
        """What the server must see of the updates, for either half of the method."""
        return max(self.algorithm.reads, self.client_rule.reads, key=list(READS).index)

    @property
    def clients_also_send(self) -> list[str]:
        """What clients tell the server beside updates and sizes."""
        return [name for name in ("losses", "accuracies", "features", "groups") if getattr(self.needs, name)]

    def client_settings(self) -> dict[str, Any]:
        """The options of local training that change results, apart from the method, as plain values."""
        names = ("local_epochs", "local_steps", "client_optimizer_state", "buffers", "seed", "loss_batch_size")
        return {**plain({name: getattr(self, name) for name in names}), "full_gradients": self.needs.full_gradients}

    def settings(self) -> dict[str, Any]:
        """Those of the clients, and what decides who takes part."""
        own = {"sampler": self.sampler, "attack": self.attack, "min_clients": self.min_clients, "guard": self.guards}
        return {**self.client_settings(), **plain(own)}

    def for_federation(self) -> FitOptions:
        """Those of one side of a real federation: rules, guards and sampler are copies, which begin anew.

        Raises:
            ValueError: the client rule does not say where its state lives, or ``partition`` is given.
        """
        words = obstacle(self.client_rule)
        if words is not None:
            raise ValueError(f"server and clients of a real federation cannot work apart: {words}")
        if self.partition is not None:
            raise ValueError(
                "partition of FederatedStrategy must be left out in a real federation, whose clients have their data: "
                f"give a client its own, or a FederatedDataModule with those of all, found {self.partition!r}"
            )
        shared = (self.executor, self.server_optimizer)
        copied = deepcopy(self, {id(part): part for part in shared})
        object.__setattr__(copied, "on_client_error", "drop")
        rule_state.in_memory(copied.client_rule)
        return copied


def _check_names(*parts: object) -> None:
    bases: tuple[type[Any], ...] = (ServerRule, ClientRule, Guard, Attack, CohortSampler)
    for part, base in product(parts, bases):
        if isinstance(part, base):
            refuse_taken_names(part, base)
