# SPDX-License-Identifier: Apache-2.0
"""A side's end of the race: it runs one round when it is told to, and says how long that took."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import IO

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks._rounds.shape import SHAPES, Shape


@dataclass(frozen=True)
class Options:
    """What a side is told on its command line.

    Attributes:
        shape: what to train.
        rounds: how often it will be asked.
        method: ``"fedavg"`` or ``"fedfv"``.
        threads: of torch, in each process.
        workers: processes or threads that train clients; 1 is the ordinary loop.
    """

    shape: Shape
    rounds: int
    method: str
    threads: int
    workers: int


_out: IO[str] = sys.stdout
"""Where reports go."""


def options() -> Options:
    """Reads the command line, sets torch's threads, and sends what libraries print to the error stream."""
    global _out
    _out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--method", choices=("fedavg", "fedfv"), default="fedavg")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    known, _ = parser.parse_known_args()
    sys.argv[1:] = []  # packages with a command line of their own read it too
    torch.set_num_threads(known.threads)
    return Options(SHAPES[known.shape], known.rounds, known.method, known.threads, known.workers)


class Baton:
    """Waits between rounds.

    Args:
        shape: what is trained; its data serve as the probe.
        initial: the global parameters before the first round, as a vector.
    """

    def __init__(self, shape: Shape, initial: Tensor) -> None:
        x, y = shape.data()
        self._probe = x[:2000].clone(), y[:2000].clone()
        self._network = shape.initial()
        self._last = initial.detach().clone()
        self._steps = 0
        self._say({"ready": True})
        self._wait()

    def pass_on(self, parameters: Tensor, steps: int | None = None) -> None:
        """A round is over: reports it and waits for the next one.

        Args:
            parameters: ``[n]`` the new global parameters.
            steps: local steps so far, if they can be counted.
        """
        seconds = time.perf_counter() - self._began
        parameters = parameters.detach().clone()
        report = {"seconds": seconds, "norm": float((parameters - self._last).norm())}
        if steps is not None:
            report["steps"], self._steps = steps - self._steps, steps
        self._last = parameters
        report["accuracy"] = self._accuracy(parameters)
        self._say(report)
        self._wait()

    @torch.no_grad()
    def _accuracy(self, parameters: Tensor) -> float:
        vector_to_parameters(parameters, self._network.parameters())
        x, y = self._probe
        return float((self._network.eval()(x).argmax(1) == y).float().mean())

    def _say(self, what: dict[str, object]) -> None:
        print(json.dumps(what), file=_out, flush=True)

    def _wait(self) -> None:
        sys.stdin.readline()
        self._began = time.perf_counter()


def flat(model: nn.Module) -> Tensor:
    """A network's parameters as a vector."""
    return parameters_to_vector(model.parameters()).detach()


class Counted(nn.Module):
    """Counts forward passes in training mode, for packages whose local loop is their own.

    Attributes:
        steps: passes so far, over all instances of this process.
    """

    steps = 0

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        if torch.is_grad_enabled():
            Counted.steps += 1
        output: Tensor = self.network(x)
        return output
