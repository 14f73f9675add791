# SPDX-License-Identifier: Apache-2.0
"""The hand-written loop, in one process or with a half of the clients in a second one."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch
from torch.nn.utils import parameters_to_vector

from benchmarks._peers.baton import Baton, options
from benchmarks._rounds.shape import HandWritten, Shape


class Halves(HandWritten):
    """Two processes; parameters and the other half's update lie in shared memory.

    What remains between this and half of the loop is the machine's: two processes share its memory.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, *shape.data())
        for weight in self.weights:
            weight.share_memory_()
        self._theirs = [torch.zeros_like(weight).share_memory_() for weight in self.weights]
        self._channel, end = Pipe()
        if os.fork() == 0:
            self._channel.close()
            self._serve(end)
        end.close()

    def _serve(self, channel: Connection) -> None:
        while True:
            try:
                clients = channel.recv()
            except EOFError:
                os._exit(0)  # the other process is gone
            before = self.steps
            for shared, mine in zip(self._theirs, self.updates(clients), strict=True):
                shared.copy_(mine)
            channel.send(self.steps - before)

    def __call__(self) -> None:
        """One round."""
        chosen = self.cohort()
        half = len(chosen) // 2
        self._channel.send(chosen[:half])
        update = self.updates(chosen[half:])
        self.steps += self._channel.recv()
        self.move([mine + theirs for mine, theirs in zip(update, self._theirs, strict=True)])


def main() -> None:
    """Runs the rounds."""
    given = options()
    loop = HandWritten(given.shape, *given.shape.data()) if given.workers == 1 else Halves(given.shape)
    baton = Baton(given.shape, parameters_to_vector(loop.weights))
    for _ in range(given.rounds):
        loop()
        baton.pass_on(parameters_to_vector(loop.weights), loop.steps)


if __name__ == "__main__":
    main()
