# SPDX-License-Identifier: Apache-2.0
"""The hand-written loop on several ranks: each trains its share of a round, and one all_reduce adds up the updates."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks._peers.baton import Baton, options
from benchmarks._rounds.shape import SEED, HandWritten


def main() -> None:
    """Runs the rounds."""
    given = options()
    device = torch.device(given.device)
    if "RANK" in os.environ:
        if given.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    x, y = given.shape.data()
    loop = HandWritten(given.shape, x.to(device), y.to(device))
    baton = Baton(given.shape, parameters_to_vector(loop.weights), (x, y))
    meter, cohorts = baton.meter, torch.Generator().manual_seed(SEED)
    for _ in range(given.rounds):
        chosen = torch.randperm(given.shape.clients, generator=cohorts)[: given.shape.per_round].tolist()
        with meter.part("training"):
            update = loop.updates(chosen[meter.rank :: meter.size])
        if meter.size > 1:
            with meter.part("exchange"):
                flat = parameters_to_vector(update)
                dist.all_reduce(flat)
                vector_to_parameters(flat, update)
        with meter.part("server step"):
            loop.move(update)
        baton.pass_on(parameters_to_vector(loop.weights), loop.steps, divided=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
