# SPDX-License-Identifier: Apache-2.0
"""pfl: federated averaging on its simulated backend; with workers, as several processes under torchrun."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from benchmarks._peers.baton import Baton, Counted, flat, options


class Model(Counted):
    """What pfl asks of a network."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross entropy of a batch."""
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Only asked for in the first round."""
        return {"loss": Weighted(float(F.cross_entropy(self(x), y, reduction="sum")), len(y))}


class Turns(TrainingProcessCallback):
    """Passes the baton after each round."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """The central model is new."""
        self._baton.pass_on(flat(model.pytorch_model), Counted.steps, divided=True)
        return False, Metrics()


def main() -> None:
    """Runs the rounds."""
    given = options()
    shape = given.shape
    size = shape.samples
    x, y = (part.to(given.device) for part in shape.data())  # of several GPUs pfl has made this process's the current

    def client(index: int) -> Dataset:
        order = index * size + torch.randperm(size)
        return Dataset(raw_data=[x[order], y[order]], user_id=index)

    network = Model(shape.initial()).to(given.device)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    users = FederatedDataset(client, get_user_sampler("random", list(range(shape.clients))))
    baton = Baton(shape, flat(network), (x.cpu(), y.cpu()))
    FederatedAveraging().run(
        NNAlgorithmParams(given.rounds, given.rounds + 1, shape.per_round, None),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=shape.lr, local_batch_size=shape.batch),
        None,
        [Turns(baton)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
