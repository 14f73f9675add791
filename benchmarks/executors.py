# SPDX-License-Identifier: Apache-2.0
"""What clients in worker processes save of a round, beside clients one after the other.

    python -m benchmarks.executors [--shape W1] [--pairs 31] [--workers 2] [--keep-memory] [--bare] [--out DIR]

One fit trains its rounds in turn with sequential and with parallel clients, which give the same bits, so a pair of
neighbouring rounds does comparable work under the same conditions. Times are those of the wall clock, whole rounds with
loops, logging and server step. Pairs in which the machine's processors spent more than a tenth of the time on something
else are left out and counted; -1 says that too few were left, and all are used. ``--bare`` times hand-written loops
over half of the clients in two processes and in two threads.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import platform
import resource
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pipe
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fl_lightning as fl
from benchmarks._kernels.memory import keep_freed_memory
from benchmarks._rounds.shape import SHAPES, Shape
from benchmarks._rounds.timing import Median
from benchmarks._rounds.workloads import Classifier, federated
from fl_lightning.clients.base import CohortExecutor, CohortRunner
from fl_lightning.clients.client_runner import ClientRunner
from fl_lightning.clients.parallel import ParallelRunner
from fl_lightning.clients.update_rows import Upload
from fl_lightning.lightning.batches import ClientTask

WARM_UP = 1


@dataclass
class Alternating(CohortExecutor):
    """Even rounds one client after the other, odd ones in workers."""

    workers: int

    def runner(self, clients: ClientRunner) -> CohortRunner:
        """Both kinds."""
        return Alternate(clients, ParallelRunner(clients, self.workers))

    def rows(self, number: int, like: Tensor) -> Tensor:
        """Shared memory for both."""
        return fl.executors.Parallel(self.workers).rows(number, like)


class Alternate(CohortRunner):
    """Lets workers train every second round."""

    def __init__(self, clients: ClientRunner, workers: ParallelRunner) -> None:
        self._clients, self._workers = clients, workers
        self._parallel = True

    def begin_round(self, tasks: Sequence[ClientTask]) -> None:
        """The other kind's turn."""
        self._parallel = not self._parallel
        self._workers.begin_round(tasks)

    def train(self, task: ClientTask) -> Upload:
        """In this process or a worker."""
        return self._workers.train(task) if self._parallel else self._clients.train(task)

    def end_round(self) -> None:
        """Of either kind."""
        if self._parallel:
            self._workers.end_round()

    def close(self) -> None:
        """Ends the workers."""
        self._workers.close()


def others() -> float:
    """Seconds that the machine's processors have spent on anything but this process and its workers so far."""
    ticks = [int(number) for number in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # not idle, not waiting for disks
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy - sum(one.ru_utime + one.ru_stime for one in used)


class Stopwatch(L.Callback):
    """Times rounds from end to end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.others: list[float] = []

    def _now(self) -> tuple[float, float]:
        return others(), time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first round begins."""
        self._mark = self._now()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round is over."""
        now = self._now()
        self.others.append(now[0] - self._mark[0])
        self.seconds.append(now[1] - self._mark[1])
        self._mark = self._now()


@dataclass(frozen=True)
class Result:
    """Of one shape.

    Attributes:
        sequential: seconds of a round with one client after the other.
        parallel: seconds of a round with workers.
        ratio: of neighbouring rounds.
        disturbed: pairs that were left out.
    """

    shape: str
    what: str
    logs: bool
    sequential: Median
    parallel: Median
    ratio: Median
    disturbed: int


def measure(shape: Shape, pairs: int, workers: int, logs: bool) -> Result:
    """Times both kinds of rounds in turn and checks that they train the same weights as sequential rounds alone."""
    x, y = shape.data()
    rounds = 2 * (pairs + WARM_UP)
    clock = Stopwatch()
    fitted(shape, x, y, rounds, Alternating(workers), [clock], logs)
    plain = fitted(shape, x, y, 2, fl.executors.Sequential(), [], logs)
    both = fitted(shape, x, y, 2, Alternating(workers), [], logs)
    assert torch.equal(plain, both), "both kinds of rounds must train the same weights"
    taken = [
        (clock.seconds[i], clock.seconds[i + 1], clock.others[i] + clock.others[i + 1])
        for i in range(2 * WARM_UP, rounds, 2)
    ]
    idle = [(one, two) for one, two, rest in taken if rest < 0.1 * (one + two)]
    used = idle if len(idle) >= 3 else [(one, two) for one, two, _ in taken]
    return Result(
        shape.name, shape.what, logs, Median.of([one for one, _ in used]), Median.of([two for _, two in used]),
        Median.of([two / one for one, two in used]), len(taken) - len(used) if used is idle else -1,
    )  # fmt: skip


def fitted(
    shape: Shape, x: Tensor, y: Tensor, rounds: int, executor: CohortExecutor, callbacks: list[L.Callback], logs: bool
) -> Tensor:
    """The weights ``[n]`` after a fit."""
    module = Classifier(shape, logs)
    strategy = fl.FederatedStrategy(clients_per_round=shape.per_round, executor=executor)
    trainer = L.Trainer(
        max_epochs=rounds, strategy=strategy, callbacks=callbacks, accelerator="cpu", logger=False, limit_val_batches=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, federated(shape, x, y))
    return nn.utils.parameters_to_vector(module.parameters()).detach()


# ---- what the machine allows


def bare(shape: Shape, pairs: int) -> tuple[Median, Median]:
    """Ratios of hand-written loops over half of the clients in two processes, and in two threads, to one loop."""
    x, y = shape.data()

    def loop(net: nn.Module, clients: Sequence[int]) -> None:
        for client in clients:
            local = copy.deepcopy(net)
            optimizer = torch.optim.SGD(local.parameters(), lr=shape.lr)
            order = torch.randperm(shape.samples) + client * shape.samples
            for chosen in order.split(shape.batch):
                optimizer.zero_grad()
                F.cross_entropy(local(x[chosen]), y[chosen]).backward()
                optimizer.step()

    net, everybody = shape.network(), range(shape.per_round)
    half = shape.per_round // 2
    loop(net, range(1))
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        while theirs.recv():
            loop(net, range(half))
            theirs.send(True)
        os._exit(0)
    processes, threads = [], []
    for _ in range(pairs):
        began = time.perf_counter()
        loop(net, everybody)
        alone = time.perf_counter() - began
        began = time.perf_counter()
        ours.send(True)
        loop(net, range(half, shape.per_round))
        ours.recv()
        processes.append((time.perf_counter() - began) / alone)
        began = time.perf_counter()
        thread = threading.Thread(target=loop, args=(net, range(half)))
        thread.start()
        loop(net, range(half, shape.per_round))
        thread.join()
        threads.append((time.perf_counter() - began) / alone)
    ours.send(False)
    os.waitpid(pid, 0)
    return Median.of(processes), Median.of(threads)


def main() -> None:
    """Prints what was seen and writes it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="W1")
    parser.add_argument("--pairs", type=int, default=31, help="pairs of rounds (at least 3)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--logs", action="store_true", help="the module calls self.log once per step")
    parser.add_argument("--keep-memory", action="store_true", help="let glibc keep what is freed, in this process too")
    parser.add_argument("--bare", action="store_true", help="hand-written loops instead of fits")
    parser.add_argument("--clients", type=int, help="registered clients, if memory is short; no difference otherwise")
    parser.add_argument("--out", type=Path, help="file for the result, one line of JSON per run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    memory = keep_freed_memory() if arguments.keep_memory else "as the C library has it"
    shape = SHAPES[arguments.shape]
    if arguments.clients:
        shape = replace(shape, clients=arguments.clients)
    found: dict[str, object] = {"arguments": {k: str(v) for k, v in vars(arguments).items()}}
    found |= {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if arguments.bare:
        processes, threads = bare(shape, arguments.pairs)
        print(f"{shape.name} hand-written: two processes {processes.text()}, two threads {threads.text()} of one loop")
        found |= {"processes": asdict(processes), "threads": asdict(threads)}
    else:
        result = measure(shape, arguments.pairs, arguments.workers, arguments.logs)
        print(
            f"{shape.name} ({memory}): sequential {result.sequential.text(4)} s, parallel {result.parallel.text(4)} s, "
            f"ratio {result.ratio.text()} of {result.ratio.count} pairs, {result.disturbed} left out"
        )
        found |= asdict(result)
    if arguments.out is not None:
        with arguments.out.open("a") as file:
            file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
