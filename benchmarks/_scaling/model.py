# SPDX-License-Identifier: Apache-2.0
"""One round of FedLF on many GPUs, simulated: training, columns on their way, and the server step on slices.

The longest clients begin first; whichever GPU is free takes the next. Columns of updates leave for their owners in
waves, one client of each GPU in a wave. A wave begins when all GPUs have a client for it, and travels while the next
clients train; those in which some GPUs have none begin when all clients are trained. GPUs of a machine share its
network card, which sends one update after the other. When all columns have arrived, every GPU computes the Gram
matrices of its columns. Their sums are exchanged, the small problems are solved, each GPU combines its columns, and all
gather the new weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil, log10

import numpy as np

from benchmarks._scaling.bounds import all_reduce_bytes
from benchmarks._scaling.rates import Rates, Workload
from fl_lightning.core.updates import Columns
from fl_lightning.ops.slices import subtrees


@dataclass(frozen=True)
class Round:
    """What became of a round.

    Attributes:
        ideal: seconds of training if all GPUs were busy all the time.
        largest: seconds of training of the largest client.
        training: until the last client is trained.
        late: from then on, until all columns have arrived.
        busy: seconds that the busiest network card or GPU link sends columns, hidden or not.
        sent: bytes of columns and weights that a GPU sends, mean.
        gram: products of the columns of a GPU.
        sums: exchange of their sums.
        solve: the small problems.
        combine: the step of a GPU's columns.
        weights: gathering the new weights.
        memory: bytes in a GPU.
        fits: whether a GPU has as much.
        adding: seconds of a round that only adds up the clients' updates, by one all_reduce.
    """

    ideal: float
    largest: float
    training: float
    late: float
    busy: float
    sent: float
    gram: float
    sums: float
    solve: float
    combine: float
    weights: float
    memory: float
    fits: bool
    adding: float

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.training + self.late + self.server

    @property
    def server(self) -> float:
        """From the arrival of the columns to the new weights."""
        return self.gram + self.sums + self.solve + self.combine + self.weights

    @property
    def bound(self) -> str:
        """What takes longest; of training, the largest client where nearly all wait for it."""
        if not self.fits:
            return "memory"
        waits_for_one = self.largest > 0.9 * self.training > 0.99 * self.ideal
        waits = {
            "largest client" if waits_for_one else "training": self.training,
            "network": self.late + self.weights + self.sums,
            "server": self.gram + self.solve + self.combine,
        }
        return max(waits, key=waits.__getitem__)


def client_sizes(clients: int, mean: float, alpha: float, seed: int) -> np.ndarray:
    """Samples of clients whose shares of ten classes are Dirichlet-distributed, ``[clients]``.

    Args:
        clients: how many.
        mean: samples.
        alpha: of the Dirichlet distribution; the smaller, the more clients differ.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet([alpha] * clients, size=10)
    return np.asarray(np.maximum(np.rint(shares.sum(0) * mean * clients / 10), 1.0))


@dataclass(frozen=True)
class Shares:
    """How the package divides the columns.

    Attributes:
        columns: of the largest share.
        matrices: Gram matrices, one per layer and part of the tree of sums, that all shares send to each other.
    """

    columns: int
    matrices: int


@cache
def shares(parameters: int, layers: int, gpus: int) -> Shares:
    """Cuts the columns of layers of equal size. A share sends the sums of the layers that it has columns of.

    Args:
        parameters: ``n``.
        layers: ``L``.
        gpus: ``R``.
    """
    borders = list(pairwise(Columns.cut(parameters, gpus)))
    parts = [span for begin, end in borders for span in subtrees(begin, end, parameters)]
    size = parameters / layers
    matrices = sum(min(ceil(end / size), layers) - int(begin / size) for begin, end in parts)
    return Shares(max(end - begin for begin, end in borders), matrices)


def simulate(work: Workload, rates: Rates, sizes: Sequence[float], gpus: int, overlap: bool = True) -> Round:
    """Simulates one round.

    Args:
        work: the model.
        rates: the machines.
        sizes: samples of the round's clients.
        gpus: how many, ``R``.
        overlap: send columns while the next client trains; otherwise when all are trained.
    """
    per_machine = int(min(gpus, rates.gpus_per_machine))
    outside = 1 - per_machine / gpus
    row = work.parameters * rates.bytes_per_number
    step = work.batch * work.work / work.rate
    costs = sorted((rates.visit + ceil(size / work.batch) * step for size in sizes), reverse=True)

    # Who trains what, and when it is done.
    free = [(0.0, gpu) for gpu in range(gpus)]
    done: list[list[float]] = [[] for _ in range(gpus)]
    for cost in costs:
        when, gpu = free[0]
        heapq.heapreplace(free, (when + cost, gpu))
        done[gpu].append(when + cost)
    training = max(when for when, _ in free)
    full = min(map(len, done)) if overlap else 0
    waves = [max(times[wave] for times in done) for wave in range(full)]

    # Columns leave one update after the other: by the machine's card, and by the GPU's own link.
    machines = -(-gpus // per_machine)
    cards, links = [0.0] * machines, [0.0] * gpus
    busy_cards, busy_links = [0.0] * machines, [0.0] * gpus
    out, inside = row * outside / rates.network, row * (1 - 1 / gpus - outside) / rates.nvlink
    for wave in range(max(map(len, done))):
        begin = waves[wave] if wave < full else training
        for gpu in (gpu for gpu in range(gpus) if wave < len(done[gpu])):
            card = gpu // per_machine
            cards[card] = max(cards[card], begin) + out
            links[gpu] = max(links[gpu], begin) + inside
            busy_cards[card] += out
            busy_links[gpu] += inside
    arriving = len(costs) * row * outside / machines / rates.network  # at every machine alike
    first = waves[0] if waves else training
    latency = rates.latency if gpus > 1 else 0.0
    arrived = max(*cards, *links, first + arriving, training + latency)

    clients, width = len(costs), rates.bytes_per_number
    cut = shares(work.parameters, work.layers, gpus)
    gram = max(
        clients * (clients + 1) * cut.columns / rates.products_rate, clients * cut.columns * width / rates.memory_rate
    )
    combine = (clients + 1) * cut.columns * width / rates.memory_rate
    matrices = cut.matrices * clients**2 * 8.0 if gpus > 1 else 0.0
    sums = _exchanged(matrices / gpus, gpus, per_machine, rates)
    weights = _exchanged(work.parameters / gpus * 4, gpus, per_machine, rates)
    solve = work.layers * solve_seconds(rates, clients)
    own = matrices + work.layers * clients**2 * 8.0
    held = 2 * clients * work.parameters / gpus * width + rates.weights_kept * work.parameters * 4
    memory = held + own + rates.working_memory
    reduced = all_reduce_bytes(work.parameters, gpus, 4)
    adding = training + max(reduced * outside / rates.network if outside else 0.0, reduced / rates.nvlink) + latency
    return Round(
        ideal=sum(costs) / gpus,
        largest=costs[0],
        training=training,
        late=arrived - training,
        busy=max(*busy_cards, *busy_links, arriving),
        sent=(sum(busy_links) * rates.nvlink + sum(busy_cards) * rates.network + 4 * work.parameters * (gpus - 1))
        / gpus,
        gram=gram,
        sums=sums,
        solve=solve,
        combine=combine,
        weights=weights,
        memory=memory,
        fits=memory <= rates.gpu_memory,
        adding=adding,
    )


def _exchanged(own: float, gpus: int, per_machine: int, rates: Rates) -> float:
    """Seconds until every GPU has sent ``own`` bytes to each other one."""
    if gpus == 1:
        return 0.0
    out = per_machine * own * (gpus - per_machine) / rates.network
    return max(out, own * (per_machine - 1) / rates.nvlink) + rates.latency


def solve_seconds(rates: Rates, clients: int) -> float:
    """Seconds of one layer's problem, by the power of the clients that both measured times show."""
    power = log10(rates.solve_1000 / rates.solve_100)
    return float(rates.solve_100 * (clients / 100) ** power)
