# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedulers, gradient clipping and accumulation, each against a loop by hand."""

from functools import partial

import pytest
import torch
from cases import in_turn
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from plain_loop import assert_trained_to, evaluate, federate, sgd
from support import FEATURES, Classifier, fit, fresh, on_path, train, weights
from torch import nn

import fl_lightning as fl

PATHS = {"lean": on_path(True), "full": on_path(False)}

# ---- learning-rate schedulers


class Scheduled(Classifier):
    scheduler = staticmethod(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1))
    interval = "epoch"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        config = {"scheduler": self.scheduler(optimizer), "interval": self.interval, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Exponential(Scheduled):
    scheduler = staticmethod(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))


class Plateau(Scheduled):
    scheduler = staticmethod(
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.2)
    )


@pytest.mark.parametrize(
    ("kind", "rate"), [(Scheduled, lambda r: 0.1 * 0.1 ** (r // 2)), (Exponential, lambda r: 0.1 * 0.5**r)]
)
def test_schedulers_step_once_per_round(kind, rate):
    module = fresh(kind)
    trainer = train(module, 4).trainer
    assert_trained_to(module, federate(fresh(kind), 4, sgd(rate)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate(4))


def test_plateau_scheduler_follows_the_validation_of_the_global_model(tmp_path):
    monitor, module = LearningRateMonitor(), fresh(Plateau)
    fit(module, 6, logger=CSVLogger(tmp_path), callbacks=[monitor])

    dummy = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = Plateau.scheduler(dummy)
    rates = []

    def after_round(expected, index):
        scheduler.step(evaluate(expected)[1][0])
        expected.train()

    def train_client(expected, batches, index):
        if len(rates) == index:
            rates.append(dummy.param_groups[0]["lr"])
        sgd(rates[index])(expected, batches, index)

    assert_trained_to(module, federate(fresh(Plateau), 6, train_client, after_round=after_round))
    assert len(set(rates)) > 1
    assert monitor.lrs["lr-SGD"] == pytest.approx(rates)  # one value per round


# ---- gradients


CLIPPED = {
    "norm": (partial(nn.utils.clip_grad_norm_, max_norm=0.05), {"gradient_clip_val": 0.05}),
    "value": (
        partial(nn.utils.clip_grad_value_, clip_value=0.01),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
}


@pytest.mark.parametrize(("kind", "path"), [("norm", "lean"), ("norm", "full"), ("value", "lean")])
def test_gradient_clipping_by_norm_and_by_value(kind, path):
    clip, options = CLIPPED[kind]
    module = fresh()
    train(module, **options, **PATHS[path])
    assert_trained_to(module, federate(fresh(), 3, sgd(change_gradients=clip)))
    assert not torch.allclose(weights(module), weights(federate(fresh(), 3, sgd())), atol=1e-2)


@pytest.mark.parametrize("path", PATHS)
def test_a_callback_may_begin_to_clip_during_a_fit(path):
    class Later(Callback):
        def on_train_epoch_start(self, trainer, module):
            trainer.gradient_clip_val = 0.05 if trainer.current_epoch else None

    clip = CLIPPED["norm"][0]

    def train_client(expected, batches, index):
        sgd(change_gradients=clip if index else None)(expected, batches, index)

    module = fresh()
    train(module, callbacks=[Later()], **PATHS[path])
    assert_trained_to(module, federate(fresh(), 3, train_client))


def test_the_modules_own_gradient_clipping_and_gradient_hooks_see_every_local_step():
    calls = []

    class Hooked(Classifier):
        def on_after_backward(self):
            calls.append("after_backward")
            for p in self.parameters():
                p.grad.mul_(2.0)

        def on_before_optimizer_step(self, optimizer):
            calls.append("before_step")
            for p in self.parameters():
                p.grad.add_(0.001)

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            calls.append("clip")
            self.clip_gradients(optimizer, 0.1, "norm")

    def change(parameters):
        for p in parameters:
            p.grad.mul_(2.0).add_(0.001)
        nn.utils.clip_grad_norm_(parameters, 0.1)

    module = fresh(Hooked)
    trainer = train(module).trainer
    assert_trained_to(module, federate(fresh(Hooked), 3, sgd(change_gradients=change)))
    assert calls == ["after_backward", "before_step", "clip"] * trainer.strategy.last_round.local_steps


# ---- sparse gradients


class Words(Classifier):
    """An embedding, which may have sparse gradients, in front of the network."""

    def __init__(self, sparse):
        super().__init__()
        self.embedding = nn.Embedding(8, FEATURES, sparse=sparse)

    def forward(self, x):
        return super().forward(x + self.embedding((2 * x[:, 0].abs()).long().clamp(max=7)))


SPARSE = {
    "SCAFFOLD": {"algorithm": fl.algorithms.SCAFFOLD},
    "FedDyn": {"algorithm": fl.algorithms.FedDyn},
    "Ditto": {"algorithm": fl.algorithms.Ditto},
    "FairReg": {"algorithm": fl.algorithms.FairReg},
    "full gradients": {"algorithm": fl.algorithms.FedAvg, "full_gradients": True},
}


def clips_sparse_gradients():
    """Whether torch takes the norm of a dense and a sparse gradient; 2.6 does not."""
    dense, sparse = (torch.ones(2, requires_grad=True) for _ in range(2))
    dense.grad, sparse.grad = torch.ones(2), torch.ones(2).to_sparse()
    try:
        torch.nn.utils.clip_grad_norm_([dense, sparse], 1.0)
    except RuntimeError:  # it is not implemented there
        return False
    return True


@pytest.mark.parametrize(("name", "path", "clip"), in_turn(SPARSE, PATHS, [{}, {}, {"gradient_clip_val": 0.05}]))
def test_sparse_gradients_train_like_dense_ones(name, path, clip):
    if name == "Ditto" and clip and not clips_sparse_gradients():  # the others make them dense
        pytest.skip("this torch clips no sparse gradients")
    options, found = {**SPARSE[name], **clip}, []
    for sparse in (True, False):
        module = fresh(Words, sparse=sparse)
        train(module, **{**options, "algorithm": options["algorithm"]()}, **PATHS[path])
        found.append(weights(module))
    assert torch.allclose(*found, atol=1e-5, rtol=0)


class Embedded(Words):
    """Trains the embedding alone."""

    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.embedding.parameters(), 0.01)


@pytest.mark.parametrize(
    ("method", "on_client_error"),
    [(fl.algorithms.FedProx, "raise"), (fl.algorithms.FedDyn, "drop"), (fl.algorithms.FedISM, "drop")],
)
def test_optimizers_of_sparse_gradients_are_refused_where_a_method_makes_dense_ones(method, on_client_error):
    words = rf"^{method.__name__} gives every parameter a dense gradient, and SparseAdam takes .* Embedded\.config"
    with pytest.raises(ValueError, match=words):
        train(fresh(Embedded, sparse=True), algorithm=method(), on_client_error=on_client_error)


@pytest.mark.parametrize("method", [fl.algorithms.FedAvg, fl.algorithms.FedFV, partial(fl.algorithms.FedProx, mu=0.0)])
def test_optimizers_of_sparse_gradients_train_with_other_methods(method):
    module = train(fresh(Embedded, sparse=True), algorithm=method())[0]
    assert not torch.equal(module.embedding.weight, fresh(Embedded, sparse=True).embedding.weight)
