# SPDX-License-Identifier: Apache-2.0
"""Which clients take part in a round: pure functions of the seed and the round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.arguments import Bounds, checked, trusted
from fl_lightning.core.seeding import derive_seed


@checked(client_ids=Bounds(0), drop_outs=Bounds(0))
@dataclass(frozen=True)
class Selection:
    """The clients of one round.

    Attributes:
        client_ids: distinct ids of all sampled clients, ascending.
        drop_outs: those among them that train but vanish before they report.

    Raises:
        ValueError: ids repeat, or a drop-out was not sampled.
    """

    client_ids: tuple[int, ...]
    drop_outs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.client_ids)) != len(self.client_ids):
            raise ValueError(f"client_ids must be distinct, found {self.client_ids}")
        if not set(self.drop_outs) <= set(self.client_ids):
            raise ValueError(f"drop_outs must be among the clients {self.client_ids}, found {self.drop_outs}")


class CohortSampler(ABC):
    """Chooses the cohort of a round. The same arguments give the same cohort, whatever was drawn before."""

    @abstractmethod
    def select(self, round: int, cohort_size: int, sizes: Tensor, seed: int) -> Selection:  # noqa: A002
        """Draws clients for a round.

        Args:
            round: index of the round, from 0.
            cohort_size: how many clients are wanted.
            sizes: ``[N]`` training samples of all registered clients.
            seed: seed of the run.

        Raises:
            ValueError: ``cohort_size`` is not between 1 and the number of clients.
        """

    def most_reports(self, cohort_size: int, sizes: Tensor) -> int:
        """How many clients can report in a round at most: a client without data never does.

        Args:
            cohort_size: see :meth:`select`.
            sizes: see there.
        """
        return min(cohort_size, int((sizes > 0).sum()))


@checked(always=Bounds(0))
@dataclass(frozen=True)
class UniformSampler(CohortSampler):
    """Draws ``cohort_size`` clients uniformly without replacement.

    Clients without data are drawn like all others; the strategy's ``on_client_error`` says what happens to them.

    Attributes:
        always: ids of clients that are in every cohort, such as one with data of the server; the others are drawn.

    Raises:
        ValueError: an id of ``always`` is negative or, when clients are drawn, not that of a client, or it has more ids
            than a cohort.
    """

    always: tuple[int, ...] = ()

    def __repr__(self) -> str:  # checkpoints name samplers so, and a fit goes on with the one it began with
        return f"UniformSampler(always={self.always})" if self.always else "UniformSampler()"

    def select(self, round: int, cohort_size: int, sizes: Tensor, seed: int) -> Selection:  # noqa: A002
        """Draws the round's clients."""
        n = _check(cohort_size, sizes)
        generator = _generator(seed, round, "uniform")
        if not self.always:
            return _selection(generator.choice(n, cohort_size, replace=False))
        fixed = np.unique(self.always)
        if len(fixed) > cohort_size or fixed[-1] >= n:
            raise ValueError(
                f"always must name at most {cohort_size} clients with ids below {n} (clients_per_round), "
                f"found {self.always}"
            )
        others = np.setdiff1d(np.arange(n), fixed)
        return _selection(np.append(fixed, generator.choice(others, cohort_size - len(fixed), replace=False)))


@dataclass(frozen=True)
class SizeWeightedSampler(CohortSampler):
    """Draws clients one after the other without replacement, each with probability proportional to its samples.

    Clients without data are never drawn; if fewer than ``cohort_size`` have data, all of those are taken.
    """

    def select(self, round: int, cohort_size: int, sizes: Tensor, seed: int) -> Selection:  # noqa: A002
        """Draws the round's clients."""
        n = _check(cohort_size, sizes)
        weights = sizes.cpu().numpy().astype(np.float64)
        # Waiting times with rates proportional to size: the first k arrivals are k successive weighted draws.
        with np.errstate(divide="ignore"):
            waits = _generator(seed, round, "size").standard_exponential(n) / weights
        order = np.argsort(waits, kind="stable")[:cohort_size]
        return _selection(order[weights[order] > 0])


@dataclass(frozen=True)
class AllClients(CohortSampler):
    """Takes every registered client in every round.

    Raises:
        ValueError: ``cohort_size`` is smaller than the number of clients.
    """

    def select(self, round: int, cohort_size: int, sizes: Tensor, seed: int) -> Selection:  # noqa: A002
        """Takes all clients."""
        if cohort_size != len(sizes):
            raise ValueError(f"cohort_size must be all {len(sizes)} clients for AllClients, found {cohort_size}")
        return Selection(tuple(range(len(sizes))))


@checked(availability=Bounds(0, 1, filled=True), drop_out=Bounds(0, 1, filled=True))
@dataclass(frozen=True)
class AvailabilitySampler(CohortSampler):
    """Draws uniformly among the clients that happen to be available, and lets some vanish in mid-round.

    If fewer clients than ``cohort_size`` are available, all of those are taken; if none is, the selection is empty.
    Who is available in a round does not depend on ``cohort_size``.

    Args:
        availability: probability that a client is available in a round; one number, or one per client.
        drop_out: probability that a sampled client trains but does not report; one number, or one per client.

    Raises:
        ValueError: a probability is outside [0, 1], or their number differs from the clients'.
    """

    availability: float | Sequence[float]
    drop_out: float | Sequence[float] = 0.0

    def __post_init__(self) -> None:
        for name in ("availability", "drop_out"):
            value = getattr(self, name)
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(value))

    def select(self, round: int, cohort_size: int, sizes: Tensor, seed: int) -> Selection:  # noqa: A002
        """Draws the round's clients among those available, and the ones that will not report."""
        n = _check(cohort_size, sizes)
        present = _generator(seed, round, "availability").random(n) < _per_client("availability", self.availability, n)
        order = _generator(seed, round, "uniform").permutation(n)
        taken = order[present[order]][:cohort_size]
        vanish = _generator(seed, round, "drop_out").random(n) < _per_client("drop_out", self.drop_out, n)
        return Selection(_ids(taken), _ids(taken[vanish[taken]]))

    def most_reports(self, cohort_size: int, sizes: Tensor) -> int:
        """Leaves clients out that are never available, or never report."""
        n = len(sizes)
        here, gone = _per_client("availability", self.availability, n), _per_client("drop_out", self.drop_out, n)
        return min(cohort_size, int(((here > 0) & (gone < 1) & (sizes.cpu().numpy() > 0)).sum()))


def _check(cohort_size: int, sizes: Tensor) -> int:
    if not 1 <= cohort_size <= len(sizes):
        raise ValueError(f"cohort_size must lie between 1 and the {len(sizes)} clients, found {cohort_size}")
    return len(sizes)


def _generator(seed: int, round_index: int, name: str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "sampler", name, round_index))


def _per_client(name: str, value: float | Sequence[float], n: int) -> Any:
    if isinstance(value, Sequence) and len(value) != n:
        raise ValueError(f"{name} must be one number or one per client ({n}), found {len(value)}")
    return np.asarray(value, dtype=np.float64)


def _ids(clients: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return tuple(int(client) for client in np.sort(clients))


def _selection(clients: np.ndarray[Any, Any]) -> Selection:
    return trusted(Selection)(_ids(clients))


def cohort_size(clients_per_round: int | float, num_clients: int) -> int:
    """The number of clients in a round, by an argument that was checked: a count, or a fraction (rounded up)."""
    if isinstance(clients_per_round, int):
        if clients_per_round > num_clients:
            raise ValueError(f"clients_per_round must be at most the {num_clients} clients, found {clients_per_round}")
        return clients_per_round
    # Guards against 0.1 * 30 = 3.0000000000000004 becoming 4.
    return max(1, ceil(round(clients_per_round * num_clients, 9)))
