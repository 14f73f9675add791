# SPDX-License-Identifier: Apache-2.0
"""What is trained is what an optimizer holds: everything else is as if it were frozen."""

from functools import partial

import pytest
import torch
from resuming import ALGORITHMS
from support import CLASSES, FEATURES, Classifier, federated_blobs, fit, fresh
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fl_lightning as fl


class Partly(Classifier):
    """A backbone that no optimizer holds, and an average of the network, as they lie in diffusion projects.

    Args:
        frozen: both are frozen by hand, which says the same.
    """

    def __init__(self, frozen, **options):
        super().__init__(**options)
        head = nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.net = nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), *head)
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        if frozen:
            self.average.requires_grad_(False)
            self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2:].parameters(), self.hparams.lr, self.hparams.momentum, weight_decay=0.01)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)


METHODS = {
    **{name: {"algorithm": make} for name, make in ALGORITHMS.items()},
    "Ditto alone": {"algorithm": partial(fl.algorithms.Ditto, lam=0.0)},
    "FedLF of gradients": {"algorithm": partial(fl.algorithms.FedLF, gradient_source="full")},
    "gradients": {"full_gradients": True},
    "AdamW": {"server_optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)},
    "kept": {"client_optimizer_state": "keep"},
    "plans": {"planned_steps": "always"},
    "processes": {"executor": fl.executors.Parallel(2)},
    **{f"{where} noise": {
        "client": partial(fl.algorithms.DifferentialPrivacy, 1.0, 0.1, where, uncovered="allow", seed=1, delta=0.1),
        "algorithm": partial(fl.algorithms.FedAvg, "uniform"),
    } for where in ("central", "local")},
}  # fmt: skip


def states_of(frozen, options, rounds=2, **trainer):
    made = {name: value() if name in ("algorithm", "client") else value for name, value in options.items()}
    module = fresh(Partly, frozen=frozen, momentum=0.5)
    strategy = fit(module, rounds, data=federated_blobs(3, train=60), **{**made, **trainer})[1]
    own = strategy.client_rule.personal_model(0) if strategy.client_rule.overrides("personal_model") else None
    return {**module.state_dict(), **({} if own is None else {"own": getattr(own, "params", own)})}


@pytest.mark.fit
@pytest.mark.filterwarnings("ignore:.*sends the gradient of all", "ignore:federated_groups never")
@pytest.mark.parametrize("name", METHODS)
def test_all_methods_train_what_an_optimizer_holds(name):
    found, expected = states_of(False, METHODS[name]), states_of(True, METHODS[name])
    assert found.keys() == expected.keys()
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[key]), key
        else:
            assert torch.equal(value.values.params, expected[key].values.params), key
    start = fresh(Partly, frozen=True).state_dict()
    assert torch.equal(found["net.0.weight"], start["net.0.weight"])
    assert not torch.equal(found["net.2.weight"], start["net.2.weight"])
