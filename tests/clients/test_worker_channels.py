# SPDX-License-Identifier: Apache-2.0
"""What passes between a process and its workers: tensors of every kind, and more places than a pipe holds."""

import os
import time
from multiprocessing.connection import Pipe

import pytest
import torch
from worker_processes import FORKS

from fl_lightning.clients.workers import process
from fl_lightning.clients.workers.process import STOP, RoundDone, WorkerPool

COMPLEX = torch.tensor([1 + 2j, 3 - 4j])
TENSORS = {
    "other memory format": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "transposed": torch.arange(6).view(2, 3).T,
    "every second": torch.arange(6.0)[::2],
    "conjugated": COMPLEX.conj(),
    "negated": COMPLEX.conj().imag,
    "negated as a whole": torch._neg_view(torch.arange(3.0)),
    "empty": torch.empty(3, 0),
    "with gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_arrive_as_they_were(kind):
    sent, (ours, theirs) = TENSORS[kind], Pipe()
    process.send(ours, sent)
    received = process.receive(theirs)
    assert torch.equal(received, sent)
    assert received.dtype == sent.dtype
    assert received.requires_grad == sent.requires_grad
    if kind in ("other memory format", "transposed"):
        assert received.stride() == sent.stride()


def count_places(index, channel, queue):
    """Reads places to the end, and says which."""
    seen = []
    while (place := int.from_bytes(os.read(queue, 4), "little", signed=True)) != STOP:
        seen.append(place)
        if len(seen) % 5000 == 0:
            process.send(channel, len(seen))
    process.send(channel, seen)
    process.send(channel, RoundDone())


@pytest.mark.timeout(60)
@FORKS[0]
@FORKS[1]
def test_more_places_than_the_queue_holds(monkeypatch):
    pool, places, write, sizes = WorkerPool(1), list(range(30_000)), os.write, []

    def counted(file, content):
        sizes.append(len(content) % 4)
        return write(file, content)

    monkeypatch.setattr(os, "write", counted)
    try:
        for _ in range(2):
            pool.start(count_places, places)
            time.sleep(0.2)  # the queue runs empty
            heard = []
            while pool.busy:
                heard += [message for _, message in pool.messages()]
            assert heard[-2] == places
        assert not any(sizes), "a part of a place"
    finally:
        pool.stop()
