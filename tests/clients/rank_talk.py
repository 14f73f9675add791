# SPDX-License-Identifier: Apache-2.0
"""A program that several processes run together: what they say to each other, without a fit.

``rank_talk.py OUT 3 talk`` writes ``OUT/rank-<r>.json``.
"""

import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

from fl_lightning.core.errors import RankError
from fl_lightning.lightning.ranks import Ranks
from fl_lightning.lightning.shared_by_ranks import broadcast_module, broadcast_random_state

PLACES = "abcdefg"


def joined(size, seconds=20.0):
    ranks = Ranks(
        CPUAccelerator(),
        [torch.device("cpu", place) for place in range(size)],
        TorchElasticEnvironment(),
        1,
        timedelta(seconds=seconds),
    )
    ranks.join()
    return ranks


def refused(action):
    try:
        action()
    except (RuntimeError, RankError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def vectors(rank, number):
    return torch.full((3,), 10.0 * rank + number)


def exchanged(ranks):
    """Everybody sends two tensors to everybody at once, and one more in another exchange; the first rank turns them."""
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    found = {(rank, number): torch.zeros(3) for rank in others for number in range(3)}

    def begun(numbers, number):
        return ranks.transfer(
            [(vectors(ranks.rank, own), rank) for own in numbers for rank in others],
            [(found[rank, own], rank) for own in numbers for rank in others],
            number,
        )

    exchanges = [((2,), 1), ((0, 1), 0)]
    last, first = (begun(*one) for one in exchanges) if ranks.rank else [begun(*one) for one in exchanges[::-1]][::-1]
    first.wait()
    last.wait()
    return [
        all(torch.equal(value, vectors(*key)) for key, value in found.items()), first.is_over(), last.is_over(),
        ranks.transfer([], []).is_over(),
    ]  # fmt: skip


def waited(ranks):
    """Whether an exchange is over before, and after the other side has begun it."""
    got = torch.zeros(3)
    pending = ranks.transfer([], [(got, 0)]) if ranks.rank == 1 else None
    before = pending is not None and pending.is_over()
    ranks.barrier()
    if ranks.rank == 0:
        ranks.transfer([(vectors(0, 7), 1)], []).wait()
    if pending is None:
        return None
    pending.wait()
    return [before, pending.is_over(), torch.equal(got, vectors(0, 7))]


def notes(ranks):
    key = f"of {ranks.rank}"
    found = [ranks.posted([key])]
    ranks.barrier()
    ranks.post(key, [ranks.rank, "x"])
    ranks.barrier()
    keys = [f"of {rank}" for rank in range(ranks.size)]
    found += [ranks.posted(keys), ranks.posted([*keys, "of nobody"])]
    ranks.barrier()
    ranks.forget(key)
    return [*found, ranks.posted([key])]


def asked(ranks):
    """What a rank hears of the others' requests."""
    heard = []
    ranks.signals = SimpleNamespace(requests=f"of {ranks.rank}", follow=lambda *said: heard.append(said))
    ranks.follow_requests()
    ranks.follow_requests(between_clients=True)
    ranks.follow_requests(ends_round=True)
    return heard


def claimed(ranks):
    """Three divisions of the same places, the last of which the first rank leaves before anybody has begun."""
    found = []
    for leaves in (False, False, True):
        ranks.signals = SimpleNamespace(urgent=leaves and ranks.rank == 0)
        if leaves and ranks.rank > 0:
            ranks.barrier()
        found.append(list(ranks.claims(PLACES)))
        if leaves and ranks.rank == 0:
            ranks.barrier()
        ranks.barrier()
    ranks.signals = SimpleNamespace(urgent=True)
    found.append(list(ranks.until_asked(range(3))))
    ranks.signals = None
    found.append(list(ranks.until_asked(range(3))))
    return found


def talk(size):
    ranks = joined(size)
    me = ranks.rank
    said = {"place": [me, ranks.local_rank, ranks.node_rank, ranks.size, ranks.num_nodes, str(ranks.device)]}
    said["gathered"] = ranks.gather({"of": me})
    said["broadcast"] = [ranks.broadcast(f"of {me}"), ranks.broadcast(f"of {me}", 2)]
    lengths = [2, 0, 3]
    parts = ranks.gather_parts(torch.full((lengths[me], 2), float(me)), lengths)
    said["parts"] = [part.tolist() for part in parts]
    said["columns"] = [
        part.tolist() for part in ranks.gather_parts(torch.arange(6.0).view(2, 3)[:, me : me + 1], [2] * 3)
    ]
    said |= {"exchanged": exchanged(ranks), "waited": waited(ranks), "notes": notes(ranks), "asked": asked(ranks)}
    said["claimed"] = claimed(ranks)
    said["other number"] = refused(lambda: joined(size + 1))
    if me == 1:
        ranks.abandon()
        ranks.barrier()
        said["left"] = [ranks.broadcast("own"), refused(lambda: ranks.gather_parts(torch.zeros(1), [1] * 3))]
    ranks.join()
    said["again"] = [ranks.abandoned, ranks.gather(me)]
    ranks.part()
    return said


class Net(torch.nn.Module):
    """With parameters that lie in columns, and a buffer."""

    def __init__(self, rank, width=2):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, width), float(rank)).T)
        self.register_buffer("mean", torch.full((4,), 10.0 + rank))
        if rank == 2 and width == 3:
            self.register_buffer("more", torch.zeros(1))


def share(size):
    """The first rank's random state and module are everybody's."""
    ranks = joined(size)
    rank = ranks.rank
    torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
    broadcast_random_state(ranks)
    said = {"drawn": [torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random()]]}
    net = Net(rank)
    place = net.weight.data_ptr()
    broadcast_module(ranks, net)
    said["module"] = [net.weight.tolist(), net.mean.tolist(), place == net.weight.data_ptr(), net.weight.requires_grad]
    said["shapes"] = refused(lambda: broadcast_module(ranks, Net(rank, 2 + (rank == 1))))
    dtype = torch.float64 if rank == 2 else torch.float32
    said["dtypes"] = refused(lambda: broadcast_module(ranks, Net(rank).to(dtype)))
    said["more"] = refused(lambda: broadcast_module(ranks, Net(rank, 3)))
    return said


def late(size):
    """The last rank comes too late, or not at all."""
    ranks = joined(size, 2)
    last = ranks.rank == size - 1
    if last:
        time.sleep(4)
        return {"why": None}
    said = {"why": refused(lambda: ranks.gather(0))}
    time.sleep(1)  # the first rank keeps the notes by which others tell who is late
    return said


def gone(size, place=-1):
    """One rank ends at once."""
    ranks = joined(size)
    ranks.barrier()
    if ranks.rank == range(size)[place]:
        return {"why": None}
    said = {"why": refused(lambda: [ranks.gather(0) for _ in range(9)])}
    time.sleep(1)
    return said


def first(size):
    """The first rank ends at once, and with it the notes by which others tell who is late."""
    return gone(size, 0)


def main(out, size, what):
    found = {"talk": talk, "share": share, "late": late, "gone": gone, "first": first}[what](int(size))
    (Path(out) / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
