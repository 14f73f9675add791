# SPDX-License-Identifier: Apache-2.0
"""A side's end of the race: it runs one round when it is told to, and says how long that took."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from dataclasses import dataclass, replace
from typing import IO

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks._peers.meter import Meter
from benchmarks._rounds.shape import SHAPES, Shape


@dataclass(frozen=True)
class Options:
    """What a side is told on its command line.

    Attributes:
        shape: what to train.
        rounds: how often it will be asked.
        method: ``"fedavg"``, ``"fedfv"`` or ``"fedlf"``.
        threads: of torch, in each process.
        workers: processes or threads that train clients; 1 is the ordinary loop.
        device: ``"cpu"`` or ``"cuda"``.
        evaluate: ours evaluates the model on all clients after every round.
        uneven: clients of ours differ in size.
    """

    shape: Shape
    rounds: int
    method: str
    threads: int
    workers: int
    device: str
    evaluate: bool
    uneven: bool


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
    parser.add_argument("--method", choices=("fedavg", "fedfv", "fedlf"), default="fedavg")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--clients", type=int, help="registered clients; default: the shape's")
    parser.add_argument("--per-round", type=int, help="clients per round; default: the shape's")
    known, _ = parser.parse_known_args()
    sys.argv[1:] = []  # packages with a command line of their own read it too
    torch.set_num_threads(known.threads)
    shape = SHAPES[known.shape]
    shape = replace(shape, clients=known.clients or shape.clients, per_round=known.per_round or shape.per_round)
    return Options(
        shape, known.rounds, known.method, known.threads, known.workers, known.device, known.evaluate, known.uneven
    )  # fmt: skip


class Baton:
    """Waits between rounds. Of several processes that torchrun has started, the first one speaks.

    Args:
        shape: what is trained; its data serve as the probe.
        initial: the global parameters before the first round, as a vector.
        probe: samples and labels ``([N, ...], [N])`` for the accuracy; default: the shape's data, made once more.

    Attributes:
        meter: of this process.
    """

    def __init__(self, shape: Shape, initial: Tensor, probe: tuple[Tensor, Tensor] | None = None) -> None:
        self.meter = Meter()
        x, y = shape.data() if probe is None else probe
        self._probe = x[:2000].clone(), y[:2000].clone()
        self._network = shape.initial()
        self._last = initial.detach().cpu().clone()
        self._steps = 0
        self._say({"ready": True})
        self._wait()

    def pass_on(
        self, parameters: Tensor, steps: int | None = None, divided: bool = False, least: float | None = None
    ) -> None:
        """A round is over: reports it and waits for the next one.

        Args:
            parameters: ``[n]`` the new global parameters.
            steps: local steps so far, if they can be counted.
            divided: the processes count their own steps only.
            least: what the division of the round's clients allows, by the time of one process.
        """
        taken = None if steps is None else steps - self._steps
        self._steps = steps or 0
        ranks = self.meter.end(taken)
        if ranks:
            parameters = parameters.detach().cpu().clone()
            seconds = max(rank["seconds"] for rank in ranks)
            report = {"seconds": seconds, "norm": float((parameters - self._last).norm())}
            if taken is not None:
                report["steps"] = sum(rank["steps"] for rank in ranks) if divided else taken
            self._last = parameters
            report["accuracy"] = self._accuracy(parameters)
            self._say({**report, "ranks": ranks, "least": least})
        self._wait()

    @torch.no_grad()
    def _accuracy(self, parameters: Tensor) -> float:
        vector_to_parameters(parameters, self._network.parameters())
        x, y = self._probe
        return float((self._network.eval()(x).argmax(1) == y).float().mean())

    def _say(self, what: dict[str, object]) -> None:
        if self.meter.rank == 0:
            print(json.dumps(what), file=_out, flush=True)

    def _wait(self) -> None:
        if self.meter.rank == 0:
            sys.stdin.readline()
        self.meter.begin()


def flat(model: nn.Module) -> Tensor:
    """A network's parameters as a vector."""
    return parameters_to_vector(model.parameters()).detach()


class Counted(nn.Module):
    """Counts forward passes in training mode, for packages whose local loop is their own.

    Attributes:
        steps: passes so far, over all instances of this process.
    """

    steps = 0
    _lock = threading.Lock()

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        if torch.is_grad_enabled():
            with Counted._lock:  # some packages train clients in threads
                Counted.steps += 1
        output: Tensor = self.network(x)
        return output
