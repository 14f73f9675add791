# SPDX-License-Identifier: Apache-2.0
"""What is trained is what an optimizer holds: everything else is as if it were frozen."""

from functools import partial

import pytest
import torch
from resuming import ALGORITHMS
from support import CLASSES, FEATURES, Classifier, federated_blobs, fit, fresh, quiet_trainer, train
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fl_lightning as fl
from fl_lightning.algorithms import ClientRule, FedAvg, FedLF
from fl_lightning.algorithms.base import overrides
from fl_lightning.core.errors import ClientError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*sends the gradient of all", "ignore:.*of its own, without these", "ignore:federated_groups never"
)


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

    def on_train_batch_start(self, batch, batch_idx):
        assert batch_idx > 0 or self.net[0].weight.grad is None, "of the client before"

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.update_parameters(self.net)


def trains_by_itself(rule):
    """Whether local training or gradients are the method's own; the others see rows, whatever these are of."""
    return type(rule.client_rule()) is not ClientRule or rule.needs.full_gradients or type(rule) in (FedAvg, FedLF)


OWN = {name: make for name, make in ALGORITHMS.items() if trains_by_itself(make())}
METHODS = {
    **{name: {"algorithm": make} for name, make in OWN.items()},
    "Ditto alone": {"algorithm": partial(fl.algorithms.Ditto, lam=0.0)},
    "FedLF of gradients": {"algorithm": partial(fl.algorithms.FedLF, gradient_source="full")},
    "gradients": {"full_gradients": True},
    "AdamW": {"server_optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)},
    "kept": {"client_optimizer_state": "keep"},
    "processes": {"executor": fl.executors.Parallel(2)},
    **{f"{where} noise": {
        "client": partial(fl.algorithms.DifferentialPrivacy, 1.0, 0.1, where, uncovered="allow", seed=1, delta=0.1),
        "algorithm": partial(fl.algorithms.FedAvg, "uniform"),
    } for where in ("central", "local")},
}  # fmt: skip


def states_of(frozen, options, rounds=2, **trainer):
    made = {name: value() if name in ("algorithm", "client") else value for name, value in options.items()}
    module = fresh(Partly, frozen=frozen, momentum=0.5)
    strategy = train(module, rounds, data=federated_blobs(3, train=60), **{**made, **trainer})[1]
    own = strategy.client_rule.personal_model(0) if overrides(strategy.client_rule, "personal_model") else None
    return {**module.state_dict(), **({} if own is None else {"own": getattr(own, "params", own)})}


@pytest.mark.parametrize("name", METHODS)
def test_methods_train_what_an_optimizer_holds(name):
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


@pytest.mark.parametrize("method", [fl.algorithms.FedAvg, fl.algorithms.Ditto, fl.algorithms.FedPer])
def test_servers_and_clients_apart_train_the_same(method):
    data, module = federated_blobs(3, train=60), fresh(Partly, frozen=False)
    expected = fit(module, 2, data=data, algorithm=method(), seed=5)[1].last_evaluation
    strategy = fl.FederatedStrategy(method(), seed=5)
    server = fl.FederatedServer(fresh(Partly, frozen=False), strategy, 3)
    clients = {
        place: fl.FederatedClient(
            fresh(Partly, 3, frozen=False),
            federated_blobs(3, train=60),
            strategy,
            place,
            trainer={"accelerator": "cpu"},
        )
        for place in range(3)
    }
    assert "frozen parameters: other values" in server.refusal(clients[0].introduction())
    for client in clients.values():
        client._module.net[0].load_state_dict(server.module.net[0].state_dict())  # pretrained
        client._module.average.module[0].load_state_dict(server.module.net[0].state_dict())
        server.register(client.introduction())
    for _ in range(2):
        server.close_round({place: clients[place].train(server.message(place)) for place in server.open_round()})
    for name, value in server.module_state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    for place, client in clients.items():
        for name, value in client.evaluate(server.evaluation_message(place)).values.items():
            assert torch.equal(value[0], expected.values[name][place]), name


def test_own_models_of_a_checkpoint_lie_as_they_were_trained(tmp_path):
    _, strategy, trainer = fit(fresh(Partly, frozen=False), 1, algorithm=fl.algorithms.Ditto())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = quiet_trainer(fl.FederatedStrategy(fl.algorithms.Ditto()))
    other = fresh(Partly, 9, frozen=False)
    again.validate(other, federated_blobs(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    for name, value in strategy.last_evaluation.values.items():
        assert torch.equal(value.nan_to_num(9), again.strategy.last_evaluation.values[name].nan_to_num(9)), name
    resumed = fresh(Partly, 9, frozen=True)  # the same layout, said in another way
    fit(resumed, 2, algorithm=fl.algorithms.Ditto(), ckpt_path=tmp_path / "a.ckpt")
    whole = fit(fresh(Partly, frozen=False), 2, algorithm=fl.algorithms.Ditto())[0]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


class Asks(Partly):
    """A schedule over the whole fit."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.held(), 0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

    def held(self):
        return self.net[2:].parameters()


def changed(**methods):
    """An ``Asks`` with these methods."""
    return type("Asks", (Asks,), methods)(frozen=False)


def add(self, *args):
    """A hook that unfreezes the backbone, as finetuning does."""
    if len(self.optimizers().param_groups) == 1:
        options = {**self.optimizers().param_groups[0], "params": list(self.net[0].parameters())}
        self.optimizers().add_param_group(options)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (
            {"on_train_epoch_end": add},
            r"must not change during a fit, found changes in \['net\.0\.bias', 'net\.0\.weight'\]",
        ),
        (
            {"on_train_batch_start": add},
            r"SGD must keep its 1 parameter groups during a fit, found 2: .* \(it is the module's fault\)$",
        ),
        (
            {"held": lambda module: [torch.zeros(3, requires_grad=True)]},
            r"optimizers must hold parameters of Asks alone, found a tensor of shape \(3,\) that is none",
        ),
        (
            {"held": lambda module: module.net[0].requires_grad_(False).parameters()},
            "an optimizer of configure_optimizers must hold a parameter of Asks that requires gradients, found none",
        ),
    ],
)
def test_optimizers_that_hold_other_things_are_refused(methods, words):
    with pytest.raises((ValueError, ClientError), match=words):
        train(changed(**methods), 3, on_client_error="drop")


def test_a_server_asks_without_a_trainer_and_says_if_that_does_not_do():
    module = Asks(frozen=False)
    strategy = fl.FederatedStrategy()
    server = fl.FederatedServer(module, strategy, 3)
    assert server.fit_description.layout["parameters"][0] == "net.2.weight [8, 9]"
    assert module._trainer is None
    with pytest.raises(ValueError, match=r"configure_optimizers of Asks says .* no data .*, found AttributeError: 'No"):
        fl.FederatedServer(changed(held=lambda module: module.trainer.datamodule.held), strategy, 3)


def test_the_fit_counts_what_requires_gradients_and_is_not_trained(caplog):
    with caplog.at_level("INFO"):
        train(fresh(Partly, frozen=False), 1)
        train(fresh(Partly, frozen=True), 1)
    said = "10 parameters with 366 numbers require gradients and are in no optimizer: they are not trained."
    assert caplog.text.count(said) == caplog.text.count("require gradients and are") == 1


class ByHand(Partly):
    """Moves its parameters itself, without an optimizer."""

    def __init__(self):
        super().__init__(frozen=True)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        parameters = [p for p in self.parameters() if p.requires_grad]
        for p, gradient in zip(
            parameters, torch.autograd.grad(super().training_step(batch, batch_idx), parameters), strict=True
        ):
            p.data.sub_(0.1 * gradient)

    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
def test_a_module_without_optimizers_trains_what_requires_gradients():
    module = train(fresh(ByHand), 1)[0]
    assert not torch.equal(module.net[2].weight, fresh(ByHand).net[2].weight)
