# SPDX-License-Identifier: Apache-2.0
"""One optimizer object that is a new one for every client, or the client's own."""

import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from cases import pairwise
from plain_loop import federate, sgd
from support import Classifier, Manual, federated_blobs, fresh, on_path, training_only, weights
from torch import nn

import fl_lightning as fl
from fl_lightning.clients.client_optimizers import ClientOptimizers
from fl_lightning.clients.schedules import load_scheduled_states, scheduled_state
from fl_lightning.core.errors import ModuleError
from fl_lightning.lightning.optimizers import client_learning_rate


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, as published wrappers do: own state, a counter in the groups, and attributes."""

    def __init__(self, base, every=3, alpha=0.5):
        self.optimizer, self.every, self.alpha = base, every, alpha
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)
        self.fast_state = base.state
        self.calls, self.norms = 0, {"last": [torch.zeros(())]}
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.calls += 1
        for group in self.param_groups:
            group["counter"] += 1
            group.setdefault("first", self.calls)
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["counter"] % self.every == 0:
                    slow += self.alpha * (p - slow)
                    p.copy_(slow)
        # Something that every later step depends on.
        self.norms["last"][0] += 1.0
        self.latest = float(self.norms["last"][0])
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(1e-3 * self.latest * p)
        return loss

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


class Counting(torch.optim.SGD):
    """A subclass from elsewhere, with a private counter that bounds the step."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self._steps_done = 0

    def step(self, closure=None):
        self._steps_done += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self._steps_done
        return super().step(closure)


MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "Lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.01)),
    "Counting": lambda p: Counting(p, lr=0.1),
}  # fmt: skip


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def steps(model, optimizer, seed, number=7):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def clients_of(model, optimizer, keep, *schedulers):
    model.device = torch.device("cpu")
    configs = [SimpleNamespace(scheduler=scheduler) for scheduler in schedulers]
    return ClientOptimizers(
        SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=configs, lightning_module=model), keep
    )


def reload(model, start):
    with torch.no_grad():
        for p, s in zip(model.parameters(), start, strict=True):
            p.copy_(s)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_reset_equals_a_new_optimizer_for_every_client(maker):
    model, reference = net(), net()
    start = [p.detach().clone() for p in model.parameters()]
    clients = clients_of(model, optimizer := maker(list(model.parameters())), keep=False)
    for index in range(2):
        clients.begin_round()
        for client in (3, 1, 3):
            reload(model, start), reload(reference, start)
            clients.begin_client(client)
            steps(model, optimizer, 10 * index + client)
            clients.end_client(client)
            steps(reference, maker(list(reference.parameters())), 10 * index + client)
            assert torch.equal(flat(model), flat(reference))
        clients.restore()
        clients.commit([3, 1])
    assert clients.state_dict() == {}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_keep_equals_an_optimizer_per_client(maker):
    model, reference = net(), net()
    start = [p.detach().clone() for p in model.parameters()]
    clients = clients_of(model, optimizer := maker(list(model.parameters())), keep=True)
    own = {client: maker(list(reference.parameters())) for client in (1, 2)}
    for index in range(3):
        clients.begin_round()
        for client in (2, 1) if index else (1, 2):
            reload(model, start), reload(reference, start)
            clients.begin_client(client)
            steps(model, optimizer, 10 * index + client)
            clients.end_client(client)
            steps(reference, own[client], 10 * index + client)
            assert torch.equal(flat(model), flat(reference))
        clients.restore()
        clients.commit([1, 2])
        # What a checkpoint does to it.
        clients.load_state_dict(clients.state_dict())
    kinds = {node[0] for plain in clients.state_dict().values() for node in plain["nodes"]}
    assert ("tensor" in kinds) is (maker is not MAKERS["Counting"])


def test_a_dropped_client_keeps_the_state_of_its_last_round_that_counted():
    model = net()
    clients = clients_of(model, optimizer := MAKERS["Adam"](list(model.parameters())), keep=True)
    for counted in (True, False):
        clients.begin_round()
        clients.begin_client(4)
        steps(model, optimizer, 1)
        clients.end_client(4)
        clients.restore()
        clients.commit([4] if counted else [])
    clients.begin_client(4)
    assert {int(state["step"]) for state in optimizer.state.values()} == {7}
    clients.begin_client(5)
    assert not optimizer.state


def test_a_state_comes_to_the_device_of_the_module_and_step_counters_stay_on_the_cpu():
    model = net()
    clients = clients_of(model, optimizer := MAKERS["Adam"](list(model.parameters())), True)
    steps(model, optimizer, 1)
    clients.end_client(4), clients.restore(), clients.commit([4])
    model.device = torch.device("meta")
    clients.begin_client(4)
    state = next(iter(optimizer.state.values()))
    assert {name: value.device.type for name, value in state.items()} == {
        "step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta", "max_exp_avg_sq": "meta",
    }  # fmt: skip


def test_attributes_that_refer_to_parameters_are_kept_and_what_cannot_be_written_is_refused():
    model = net()
    optimizer = Counting(list(model.parameters()), lr=0.1)
    parameters = optimizer.param_groups[0]["params"]
    optimizer.anchors = {}
    kept = clients_of(model, optimizer, True)
    kept.begin_client(0)
    optimizer.anchors.update({p: p.detach().clone() for p in parameters})
    kept.end_client(0), kept.commit([0]), kept.begin_client(1)
    assert optimizer.anchors == {}
    kept.begin_client(0)
    assert all(torch.equal(optimizer.anchors[p], p) for p in parameters)
    optimizer.anchors["where"] = sys.stdout
    with pytest.raises(ModuleError, match=r"'keep' cannot keep optimizer 0 \(a .*\): use 'reset'"):
        kept.end_client(0)


def test_what_an_optimizer_refers_to_is_neither_copied_nor_replaced():
    model = net()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer.model = model
    base, groups, fast = optimizer.optimizer, optimizer.param_groups, optimizer.fast_state
    clients = clients_of(model, optimizer, False)
    clients.begin_client(0)
    steps(model, optimizer, 0)
    clients.restore()
    assert optimizer.model is model
    assert optimizer.optimizer is base
    assert base.param_groups is groups is optimizer.param_groups
    assert base.state is fast is optimizer.fast_state
    assert not fast
    assert not hasattr(optimizer, "latest")
    assert "first" not in groups[0]


def test_schedulers_keep_their_objects_and_clients_start_from_what_they_set():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer._opt_called = True
    clients = clients_of(model, optimizer, False, scheduler)
    group = optimizer.param_groups[0]
    for expected in (1.0, 0.5, 0.25):
        clients.begin_round()
        for client in (0, 1):
            clients.begin_client(client)
            assert group["lr"] == expected
            steps(model, optimizer, client, 1)
            group["lr"], group["momentum"], group["extra"] = 7.0, 0.0, 1
            clients.end_client(client)
        clients.restore()
        assert (group["lr"], group["momentum"]) == (expected, 0.9)
        assert "extra" not in group
        scheduler.step()
    assert scheduler.optimizer is optimizer
    assert optimizer.param_groups[0] is group


def client(make_optimizer):
    """A client of the hand-written loop."""

    def train_client(module, batches, index):
        optimizer = make_optimizer(module)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()

    return train_client


class WithMaker(Classifier):
    maker = None

    def configure_optimizers(self):
        return type(self).maker(self.parameters())


@pytest.mark.parametrize(("name", "lean"), [("Adam", True), ("Lookahead", True), ("Adagrad", False)])
def test_reset_in_a_fit(name, lean):
    class Module(WithMaker):
        maker = staticmethod(lambda p: MAKERS[name](list(p)))

    module, expected = fresh(Module), fresh()
    strategy = fl.FederatedStrategy(clients_per_round=3, seed=5)
    training_only(strategy, 2, **on_path(lean)).fit(module, federated_blobs())
    federate(expected, 2, client(lambda m: MAKERS[name](list(m.parameters()))))
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)


def test_keep_in_a_fit():
    own: dict[int, torch.optim.Optimizer] = {}
    order = []

    def make(model):
        client = order.pop(0)
        if client not in own:
            own[client] = torch.optim.Adam(model.parameters(), lr=0.01)
        return own[client]

    class Module(Classifier):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = fresh(Module)
    strategy = fl.FederatedStrategy(clients_per_round=4, seed=5, client_optimizer_state="keep")
    seen = []

    class Sees(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch.client_id)

    trainer = training_only(strategy, 3, callbacks=[Sees()])
    trainer.fit(module, federated_blobs())
    order += seen
    assert len(set(seen)) < len(seen)
    expected = federate(fresh(), 3, client(make), cohort=4)
    assert torch.allclose(weights(module), weights(expected), atol=1e-6, rtol=0)


def test_a_module_that_gives_no_optimizer_has_nothing_to_keep():
    class Own(Manual):
        def configure_optimizers(self):
            """None: it steps by itself."""

        def training_step(self, batch, batch_idx):
            loss = Classifier.training_step(self, batch, batch_idx)
            with torch.no_grad():
                for p, gradient in zip(
                    self.parameters(), torch.autograd.grad(loss, list(self.parameters())), strict=True
                ):
                    p -= self.hparams.lr * gradient

    module, strategy = fresh(Own), fl.FederatedStrategy(clients_per_round=3, seed=5, client_optimizer_state="keep")
    with pytest.warns(UserWarning, match="returned `None`"):
        training_only(strategy, 3).fit(module, federated_blobs())
    assert torch.allclose(weights(module), weights(federate(fresh(), 3, sgd())), atol=1e-6, rtol=0)


class Replacing(L.Callback):
    """Puts other optimizers in the trainer's places, by assignment or in the list."""

    def __init__(self, make, how):
        self.make, self.how = make, how

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1 and self.how == "assigned":
            trainer.optimizers = [self.make(module.parameters())]
        if trainer.current_epoch == 1 and self.how == "entry":
            trainer.optimizers[0] = self.make(module.parameters())


EXECUTORS = {"alone": None, "workers": fl.executors.Parallel(2)}


@pytest.mark.parametrize(
    ("path", "how", "name"), pairwise(["alone", "full", "workers"], ["assigned", "entry"], ["SGD", "Adam"])
)
def test_optimizers_that_are_replaced_during_a_fit(name, how, path):
    if path == "workers" and sys.platform != "linux":
        pytest.skip("workers are made by fork")
    later = {"SGD": partial(torch.optim.SGD, lr=0.02, momentum=0.9), "Adam": partial(torch.optim.Adam, lr=0.01)}[name]
    strategy = fl.FederatedStrategy(clients_per_round=3, seed=5, executor=EXECUTORS.get(path))
    module, calls = fresh(), iter(range(9))
    trainer = training_only(strategy, 3, callbacks=[Replacing(later, how)], **on_path(path != "full"))
    trainer.fit(module, federated_blobs())

    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.1) if next(calls) < 3 else later(model.parameters())

    assert torch.allclose(weights(module), weights(federate(fresh(), 3, client(make))), atol=1e-6, rtol=0)
    assert strategy.executor_fallback is None


def test_an_optimizer_that_the_method_cannot_use_is_refused_when_it_comes():
    callbacks = [Replacing(torch.optim.Adam, "assigned")]
    trainer = training_only(fl.FederatedStrategy(fl.algorithms.SCAFFOLD()), 3, callbacks=callbacks)
    with pytest.raises(ValueError, match=r"SCAFFOLD needs the clients' learning rate: use one torch\.optim\.SGD"):
        trainer.fit(fresh(), federated_blobs())
    assert trainer.current_epoch == 1


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_scheduled_options_of_a_checkpoint(maker):
    model = net()
    optimizer = maker(list(model.parameters()))
    saved = scheduled_state(optimizer)
    assert saved["state"] == {}
    assert [g["params"] for g in saved["param_groups"]] == [[0, 1, 2, 3]]
    other = maker(list(net().parameters()))
    filled = {id(p): set(state) for p, state in other.state.items()}
    for group in saved["param_groups"]:
        group["lr"] = 0.5
    load_scheduled_states([other], [saved])
    assert other.param_groups[0]["lr"] == 0.5
    assert {id(p): set(state) for p, state in other.state.items()} == filled
    with pytest.raises(ValueError, match=r"parameter groups, sizes \[4\], found \[2\]"):
        load_scheduled_states([maker(list(nn.Linear(2, 2).parameters()))], [saved])


def test_client_learning_rate():
    parameters = list(net().parameters())
    sgd = torch.optim.SGD(parameters, lr=0.1, momentum=0.5)
    assert client_learning_rate([sgd]) == (0.1, 0.5)
    two = torch.optim.SGD([{"params": parameters[:2], "lr": 0.2}, {"params": parameters[2:]}], lr=0.1)
    assert client_learning_rate([two]) == (None, 0.0)
    assert client_learning_rate([sgd, sgd]) == (None, 0.0)
    assert client_learning_rate([torch.optim.Adam(parameters)]) == (None, 0.0)
    assert client_learning_rate([Counting(parameters, lr=0.1)]) == (None, 0.0)
