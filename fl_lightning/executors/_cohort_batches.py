# SPDX-License-Identifier: Apache-2.0
"""The local batches of several clients, stacked step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fl_lightning.bench import Bench, LogCall
from fl_lightning.seeding import derive_seed, isolated

if TYPE_CHECKING:
    from fl_lightning.loop import ClientTask


@dataclass
class ClientSteps:
    """One client's local training: its batches, and what came of them.

    Attributes:
        task: the client.
        sizes: samples of each batch.
        indices: place of each batch in its pass over the data.
        keys: batches with equal keys can be stacked.
        places: where the samples of all batches lie in memory, one after the other.
        batches: the batches themselves, on the device, where the data is not in memory.
        calls: what the client logged.
        loss: sample-weighted mean of its losses.
        buffers: the module's buffers, each with the client's value after training.
    """

    task: ClientTask
    sizes: list[int]
    indices: list[int]
    keys: list[Any]
    places: Tensor | None = None
    batches: list[Any] = field(default_factory=list)
    calls: list[LogCall] = field(default_factory=list)
    loss: Tensor | None = None
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sizes)

    def batch_bytes(self, bench: Bench) -> int:
        """Bytes of the largest batch."""
        if self.places is None:
            return max(sum(t.nbytes for t in tree_flatten(b)[0] if isinstance(t, Tensor)) for b in self.batches)
        return max(self.sizes) * sum(column.nbytes for column in bench.loaders.take(self.places[:1]))


def steps_of(bench: Bench, task: ClientTask) -> ClientSteps:
    """The batches that the client would train on alone, in the same order.

    Raises:
        Exception: what the client's data raises.
    """
    client = task.client_id
    assert client is not None
    local, loaders = bench.local, bench.loaders
    passes = list(local.passes(client, task.round))
    indices = [index for _, take in passes for index in range(take)]
    if loaders.in_memory and not local.hooked:
        sizes, chosen = [], []
        for seed, take in passes:
            places, cuts = loaders.places(client, seed=seed, merge_single=local.merge_single)
            sizes += [stop - start for start, stop in pairwise(cuts[: take + 1])]
            chosen.append(places[: cuts[take]])
        whole = chosen[0] if len(chosen) == 1 else torch.cat(chosen) if chosen else None
        return ClientSteps(task, sizes, indices, sizes, whole)
    sizes, batches = [], []
    with isolated(derive_seed(bench.options.seed, "client", task.round, client), bench.binding.theta.device):
        for seed, take in passes:
            loaded = loaders.batches(client, seed=seed, merge_single=local.merge_single)
            for batch, size in islice(loaded, take):
                batches.append(local.to_device(batch))
                sizes.append(size)
    return ClientSteps(task, sizes, indices, [_key(batch) for batch in batches], None, batches)


class Stacker:
    """Stacks the batches of some clients of a chunk.

    Args:
        bench: the loaders and the device.
        clients: the chunk.
    """

    def __init__(self, bench: Bench, clients: Sequence[ClientSteps]) -> None:
        self._bench, self._clients = bench, clients
        self._starts = [list(accumulate(client.sizes, initial=0)) for client in clients]
        self._even = len({(tuple(client.sizes), tuple(client.indices)) for client in clients}) == 1
        # One matrix for all clients: where their batches begin at the same places, one slice has them.
        self._matrix: Tensor | None = None
        places = [client.places for client in clients if client.places is not None]
        if len(places) == len(clients):
            self._matrix = torch.nn.utils.rnn.pad_sequence(places, batch_first=True)

    def groups(self, step: int, active: int) -> list[Sequence[int]]:
        """Divides the first clients into those whose batches of a step can be stacked and have the same place."""
        if self._even and self._matrix is not None:
            return [range(active)]
        found: list[tuple[Any, list[int]]] = []
        for k, client in enumerate(self._clients[:active]):
            key = (client.indices[step], client.keys[step])
            for other, members in found:
                if other == key:
                    members.append(k)
                    break
            else:
                found.append((key, [k]))
        return [members for _, members in found]

    def stacked(self, chosen: Sequence[int], step: int) -> Any:
        """The batches of the chosen clients; their tensors have a first dimension more."""
        clients = [self._clients[k] for k in chosen]
        size = clients[0].sizes[step]
        if clients[0].places is None:
            return _stack([client.batches[step] for client in clients])
        start, first, stop = self._starts[chosen[0]][step], chosen[0], chosen[-1] + 1
        together = stop - first == len(chosen) and all(self._starts[k][step] == start for k in chosen)
        if self._matrix is not None and together:
            places = self._matrix[first:stop, start : start + size].reshape(-1)
        else:
            places = torch.cat([self._places(k, step) for k in chosen])
        columns = self._bench.loaders.take(places)
        return self._bench.local.to_device([column.view(-1, size, *column.shape[1:]) for column in columns])

    def single(self, k: int, step: int) -> Any:
        """The batch of one client as it is."""
        if self._clients[k].places is None:
            return self._clients[k].batches[step]
        return self._bench.local.to_device(self._bench.loaders.take(self._places(k, step)))

    def _places(self, k: int, step: int) -> Tensor:
        places, starts = self._clients[k].places, self._starts[k]
        assert places is not None
        return places[starts[step] : starts[step + 1]]


def _key(batch: Any) -> Any:
    leaves, tree = tree_flatten(batch)
    parts: list[tuple[Any, Any, Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            parts.append((leaf.shape, leaf.dtype, leaf.device))
        elif leaf is None or isinstance(leaf, (bool, int, float, str, bytes)):
            parts.append((type(leaf), leaf, None))
        else:
            return object()  # equal to nothing else
    return tree, parts


def _stack(batches: Sequence[Any]) -> Any:
    flat = [tree_flatten(batch)[0] for batch in batches]
    leaves = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in zip(*flat, strict=True)]
    return tree_unflatten(leaves, tree_flatten(batches[0])[1])
