# SPDX-License-Identifier: Apache-2.0
"""Flower's simulation: its FedAvg on the server, the hand-written loop in the clients, which run in Ray's workers."""

from __future__ import annotations

import logging
from functools import cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from benchmarks._peers.baton import Baton, Options, flat, options
from benchmarks._rounds.shape import SHAPES, train

client_app = ClientApp()


@cache
def _memory(name: str, threads: int) -> tuple[Tensor, Tensor, nn.Module]:
    """What a worker keeps between clients."""
    torch.set_num_threads(threads)
    shape = SHAPES[name]
    return *shape.data(), shape.initial()


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    """One client's epoch."""
    config = message.content["config"]
    shape = SHAPES[config["shape"]]
    x, y, model = _memory(shape.name, config["threads"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    steps = train(model, shape, x, y, client * shape.samples + torch.randperm(shape.samples))
    metrics = MetricRecord({"num-examples": shape.samples, "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


class Counting(FedAvg):
    """Adds up the clients' steps."""

    steps = 0

    def aggregate_train(self, server_round: int, replies: object) -> object:
        """One round's replies."""
        replies = list(replies)
        self.steps += sum(int(r.content["metrics"]["steps"]) for r in replies if r.has_content())
        return super().aggregate_train(server_round, replies)


def serve(given: Options, grid: Grid) -> None:
    """The rounds."""
    shape = given.shape
    model = shape.initial()
    baton = Baton(shape, flat(model))
    share = shape.per_round / shape.clients
    strategy = Counting(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=shape.clients)

    def pass_on(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round > 0:
            model.load_state_dict(arrays.to_torch_state_dict())
            baton.pass_on(flat(model), strategy.steps)
        return MetricRecord({})

    strategy.start(
        grid,
        ArrayRecord(model.state_dict()),
        num_rounds=given.rounds,
        train_config=ConfigRecord({"shape": shape.name, "threads": given.threads}),
        evaluate_fn=pass_on,
    )


def main() -> None:
    """Runs the rounds."""
    given = options()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    server_app = ServerApp()
    server_app.main()(lambda grid, context: serve(given, grid))
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    run_simulation(
        server_app,
        client_app,
        num_supernodes=given.shape.clients,
        backend_config={
            "client_resources": resources,
            "init_args": {"num_cpus": given.workers, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    # By its full name, so that Ray's workers find the client's function.
    from benchmarks._peers import side_flwr

    side_flwr.main()
