# SPDX-License-Identifier: Apache-2.0
"""Manual optimization, several optimizers, precisions and compiled parts, each against a loop by hand."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from plain_loop import assert_trained_to, evaluate, federate, sgd
from support import CLASSES, FEATURES, Classifier, Manual, fit, fresh, on_path, train, weights
from torch import nn

from fl_lightning.algorithms import SCAFFOLD, FedDyn, FedISM
from fl_lightning.core.errors import ClientError
from fl_lightning.executors import Parallel

# ---- manual optimization


class Adversaries(Manual):
    """Two optimizers over parts of the module, the second with momentum, as GANs have them."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Linear(FEATURES, CLASSES)

    def losses(self, x, y):
        return F.cross_entropy(self(x), y), F.cross_entropy(self.critic(x), y)

    def training_step(self, batch, batch_idx):
        for optimizer, which in zip(self.optimizers(), (0, 1), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.losses(*batch)[which])
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.1),
            torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9),
        ]


class FreezesCritic(Adversaries):
    """Thaws one part when its turn comes and leaves it frozen, as pix2pix does; or freezes it for good."""

    for_good = False

    def training_step(self, batch, batch_idx):
        for which, optimizer in reversed([*enumerate(self.optimizers())]):
            self.critic.requires_grad_(which == 1 and not (self.for_good and batch_idx))
            optimizer.zero_grad()
            if which == 0 or self.critic.weight.requires_grad:
                self.manual_backward(self.losses(*batch)[which])
            optimizer.step()


@pytest.mark.parametrize("executor", [None, Parallel(2)])
def test_what_a_step_leaves_frozen_is_as_before_at_the_next_client(executor):
    module = fresh(FreezesCritic)
    train(module, executor=executor)
    assert torch.equal(weights(module), weights(train(fresh(Adversaries)).module))
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("executor", [None, Parallel(2)])
def test_what_a_step_freezes_for_good_is_refused_by_name(executor):
    module = fresh(FreezesCritic)
    module.for_good = True
    with pytest.raises(ClientError, match=r"found 'critic.weight', 'critic.bias' frozen in local"):
        train(module, 1, executor=executor, on_client_error="drop")
    assert all(p.requires_grad for p in module.parameters())


def test_manual_optimization_equals_automatic():
    module = fresh(Manual, log=True)
    trainer = train(module).trainer
    assert_trained_to(module, federate(fresh(), 3, sgd()))
    automatic = train().trainer
    assert trainer.global_step == automatic.global_step
    assert trainer.strategy.last_round.local_steps == automatic.strategy.last_round.local_steps


def test_several_optimizers_equal_a_loop_by_hand():
    def train_client(module, batches, index):
        optimizers = module.configure_optimizers()
        for x, y in batches:
            for optimizer, which in zip(optimizers, (0, 1), strict=True):
                optimizer.zero_grad()
                module.losses(x, y)[which].backward()
                optimizer.step()

    module = fresh(Adversaries)
    strategy = train(module).strategy
    assert_trained_to(module, federate(fresh(Adversaries), 3, train_client))
    assert strategy.last_round.local_steps == 2 * train().strategy.last_round.local_steps


# ---- precision


def test_double_precision():
    seen = set()

    class Double(Classifier):
        def training_step(self, batch, batch_idx):
            seen.add(batch[0].dtype)
            return super().training_step(batch, batch_idx)

    def train_client(module, batches, index):
        sgd()(module, [(x.double(), y) for x, y in batches], index)

    module = fresh(Double)
    train(module, precision="64-true")
    assert seen == {torch.float64}
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    expected = federate(fresh(Double).double(), 3, train_client)
    assert_trained_to(module, expected, atol=1e-12)
    single = federate(fresh(Double), 3, sgd())
    assert not torch.allclose(weights(expected), weights(single), atol=1e-12)


class Scaling(MixedPrecision):
    """Scales losses as ``16-mixed`` does on a GPU, and computes in float32."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**16))

    def autocast_context_manager(self):
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize(
    ("method", "kind"),
    [(SCAFFOLD, Classifier), (SCAFFOLD, Manual), (partial(FedDyn, 0.1), Classifier), (FedISM, Classifier)],
    ids=["SCAFFOLD", "by hand", "FedDyn", "FedISM"],
)
def test_gradients_are_corrected_unscaled(method, kind):
    plain, scaled = fresh(kind), fresh(kind)
    train(plain, algorithm=method(), clients_per_round=1.0, **on_path(False))
    train(scaled, algorithm=method(), clients_per_round=1.0, plugins=[Scaling()])
    torch.testing.assert_close(weights(scaled), weights(plain), rtol=1e-5, atol=1e-6)


def test_mixed_precision():
    def train_client(module, batches, index):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for x, y in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    module = fresh()
    train(module, precision="bf16-mixed")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    expected = federate(fresh(), 3, train_client)
    assert_trained_to(module, expected)
    assert not torch.allclose(weights(expected), weights(federate(fresh(), 3, sgd())), atol=1e-5)


def test_half_precision_weights():
    module = fresh()
    trainer = fit(module, precision="bf16-true").trainer
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert torch.isfinite(weights(module)).all()
    assert float(trainer.callback_metrics["val_loss"]) < evaluate(fresh())[1][0]


# ---- compiled parts


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_submodule_trains_as_the_plain_one(backend):
    module, plain = fresh(), fresh()
    torch._dynamo.reset()
    module.net = torch.compile(module.net, backend=backend, dynamic=True)
    train(module)
    train(plain)
    assert torch.allclose(weights(module), weights(plain), atol=1e-6, rtol=0)
    torch._dynamo.reset()


# ---- optimizers that evaluate the loss themselves


def test_an_optimizer_that_calls_for_a_closure():
    class Newton(Classifier):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=3)

    def train_client(module, batches, index):
        optimizer = module.configure_optimizers()
        for inputs, labels in batches:

            def closure(inputs=inputs, y=labels):
                x = inputs.double()
                optimizer.zero_grad()
                loss = F.cross_entropy(module(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)

    module = fresh(Newton)
    trainer = train(module, 2, precision="64-true").trainer  # curvature from differences magnifies rounding
    assert_trained_to(module, federate(fresh(Newton).double(), 2, train_client))
    assert trainer.global_step == train(rounds=2).trainer.global_step
    single = fresh(Newton)
    train(single, 2)
    assert torch.allclose(weights(single), weights(module), atol=1e-2, rtol=0)
