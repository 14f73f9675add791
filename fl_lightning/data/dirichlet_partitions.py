# SPDX-License-Identifier: Apache-2.0
"""The two divisions that go by the name of Dirichlet."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.arguments import Bounds, checked
from fl_lightning.data.client_indices import Ints, parts_of
from fl_lightning.data.partitions import Partition, by_class, check_clients, generator

_Floats = np.ndarray[Any, np.dtype[np.float64]]


@checked(num_clients=Bounds(1), alpha=Bounds(above=0), min_size=Bounds(0))
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Divides each class by shares over the clients, drawn from a symmetric Dirichlet distribution.

    This is the division of Yurochkin et al. 2019 (arXiv 1905.12022) and NIID-Bench (Li et al. 2022, arXiv 2102.02079).
    Sizes of clients differ. :class:`DirichletClasses` is the other one that goes by this name.

    Nothing is drawn again until it fits, so the time is bounded. Afterwards clients below ``min_size`` are filled one
    sample at a time: each is taken from the client that is largest at that moment, out of the class of which that
    client holds most.

    Args:
        num_clients: number of clients.
        alpha: concentration; small values give clients of few classes and uneven sizes.
        min_size: samples that every client must have at least.
        capped: classes are divided in ascending order, and those who already hold their equal part, ``n / num_clients``
            samples, get nothing of the classes that follow. Sizes are then more even. So do the code of FedMA (Wang et
            al. 2020, arXiv 2002.06440) and NIID-Bench, and many that build on them.
    """

    num_clients: int
    alpha: float
    min_size: int = 1
    capped: bool = False

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draws the clients' shares of each class; refuses fewer samples than ``num_clients * min_size``."""
        clients, (members, _) = self.num_clients, by_class(labels)
        n = sum(map(len, members))
        check_clients(clients, n if self.min_size > 0 else clients)
        if clients * self.min_size > n:
            raise ValueError(
                f"min_size must lie between 0 and {n // clients} for {n} samples and {clients} clients, "
                f"found {self.min_size}"
            )
        rng = generator(seed, "dirichlet")
        owner, sizes = np.empty(n, dtype=np.int64), np.zeros(clients, dtype=np.int64)
        for index in members:
            log_share = _log_gamma(rng, np.full(clients, self.alpha))
            if self.capped:
                log_share[sizes * clients >= n] = -np.inf
            share = np.exp(log_share - log_share.max())
            cuts = np.rint(np.cumsum(share) / share.sum() * len(index)).astype(np.int64)
            counts = np.diff(cuts, prepend=0)
            owner[rng.permutation(index)] = np.repeat(np.arange(clients), counts)
            sizes += counts
        _fill(owner, members, clients, self.min_size, rng)
        return parts_of(owner, clients)


@checked(num_clients=Bounds(1), alpha=Bounds(above=0))
@dataclass(frozen=True)
class DirichletClasses(Partition):
    """Fills each client by shares over the classes, drawn from a Dirichlet distribution around those of all data.

    This is the division of Hsu et al. 2019 (arXiv 1909.06335): a client's shares are ``q ~ Dir(alpha p)``, where ``p``
    holds the classes' shares of all samples, and the classes of its samples are drawn from ``q``. Sizes of clients
    differ by one at most. A class that is used up is drawn no more: the ``q`` of its other classes are then divided by
    their sum. Clients that come late, in random order, therefore get what others have left.

    The numbers of ``alpha p`` add up to ``alpha``. In :class:`Dirichlet` every client has the whole ``alpha``, so equal
    values of ``alpha`` do not make equal divisions.

    Args:
        num_clients: number of clients.
        alpha: concentration; small values give clients of few classes.
    """

    num_clients: int
    alpha: float

    def split(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draws the classes' shares of each client; refuses fewer samples than clients."""
        clients, (members, _) = self.num_clients, by_class(labels)
        left = np.array([len(index) for index in members], dtype=np.int64)
        n = int(left.sum())
        check_clients(clients, n)
        rng = generator(seed, "dirichlet_classes")
        stocks, prior = [rng.permutation(index) for index in members], self.alpha * left / n
        owner = np.empty(n, dtype=np.int64)
        for place, client in enumerate(rng.permutation(clients)):
            log_share = _log_gamma(rng, prior)
            missing = n // clients + (place < n % clients)
            while missing:
                log_share[left == 0] = -np.inf
                share = np.exp(log_share - log_share.max())
                # What a class has no more samples for is drawn again among the others.
                taken = np.minimum(rng.multinomial(missing, share / share.sum()), left)
                for number in np.flatnonzero(taken):
                    owner[stocks[number][left[number] - taken[number] : left[number]]] = client
                left -= taken
                missing -= int(taken.sum())
        return parts_of(owner, clients)


def _log_gamma(rng: np.random.Generator, shape: _Floats) -> _Floats:
    """Logarithms of gamma variables, which in proportion are Dirichlet shares.

    ``Gamma(a)`` is ``Gamma(a + 1) U^(1 / a)``; without logarithms it would underflow for a small ``a``.
    """
    shape = np.maximum(shape, 1e-300)  # logarithms of still smaller ones overflow
    found: _Floats = np.log(rng.standard_gamma(shape + 1.0)) + np.log1p(-rng.random(len(shape))) / shape
    return found


def _fill(owner: Ints, members: list[Ints], num_clients: int, min_size: int, rng: np.random.Generator) -> None:
    sizes = np.bincount(owner, minlength=num_clients)
    if sizes.min() >= min_size:
        return
    class_of = np.empty_like(owner)
    for number, index in enumerate(members):
        class_of[index] = number
    held = parts_of(owner, num_clients)
    largest = [(-int(size), client) for client, size in enumerate(sizes)]
    heapq.heapify(largest)
    stocks: dict[int, list[list[int]]] = {}
    for receiver in np.flatnonzero(sizes < min_size):
        while sizes[receiver] < min_size:
            size, donor = heapq.heappop(largest)
            if -size != sizes[donor]:
                continue  # an entry from before the client received samples
            if donor not in stocks:
                own = rng.permutation(held[donor].numpy())
                stocks[donor] = [own[class_of[own] == number].tolist() for number in np.unique(class_of[own])]
            owner[max(stocks[donor], key=len).pop()] = receiver
            sizes[donor] -= 1
            sizes[receiver] += 1
            heapq.heappush(largest, (-int(sizes[donor]), donor))
