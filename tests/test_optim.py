# SPDX-License-Identifier: Apache-2.0
"""Server optimizers against the paper's Algorithm 2, written as loops over single numbers."""

import io
from functools import partial
from math import sqrt

import pytest
import torch
from support import federated_blobs, fresh, training_only, weights
from watching import Recorder

import fl_lightning as fl
from fl_lightning.optim import FedAdagrad, FedAdam, FedYogi

KINDS = {"FedAdam": FedAdam, "FedYogi": FedYogi, "FedAdagrad": FedAdagrad}
LR, TAU = 0.3, 0.05


def sign(x):
    return (x > 0) - (x < 0)


def second_moment(kind, v, delta, beta2):
    if kind == "FedAdagrad":
        return v + delta**2
    if kind == "FedYogi":
        return v - (1 - beta2) * delta**2 * sign(v - delta**2)
    return beta2 * v + (1 - beta2) * delta**2


def algorithm2(kind, x, deltas, beta1, beta2):
    """Numbers ``x`` after rounds with pseudo-gradients ``Delta_t`` (after minus before, as in the paper)."""
    x, m, v = list(x), [0.0] * len(x), [TAU**2] * len(x)
    for round_deltas in deltas:
        for i, delta in enumerate(round_deltas):
            m[i] = beta1 * m[i] + (1 - beta1) * delta
            v[i] = second_moment(kind, v[i], delta, beta2)
            x[i] = x[i] + LR * m[i] / (sqrt(v[i]) + TAU)
    return x


def make(kind, params, beta1=0.9, beta2=0.99):
    if kind == "FedAdagrad":
        return FedAdagrad(params, LR, beta1, TAU)
    return KINDS[kind](params, LR, (beta1, beta2), TAU)


def rounds(count, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(count, n, generator=generator, dtype=torch.float64) * torch.logspace(-4, 1, n).double()
    steps[count // 2] = 0  # a round in which nobody moved
    return steps


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.99), (0.0, 0.5), (0.5, 0.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_paper_number_by_number(kind, beta1, beta2):
    start, steps = torch.linspace(-1, 1, 7, dtype=torch.float64), rounds(9, 7)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make(kind, [parameter], beta1, beta2)
    for step in steps:
        parameter.grad = step.clone()
        optimizer.step()
    expected = algorithm2(kind, start.tolist(), (-steps).tolist(), beta1, beta2)
    torch.testing.assert_close(parameter.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_state_survives_a_checkpoint_bit_for_bit(kind):
    steps = rounds(8, 5, seed=1).float()
    one = torch.nn.Parameter(torch.ones(5))
    optimizer = make(kind, [one])
    for step in steps[:4]:
        one.grad = step.clone()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weights": one.detach()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    two = torch.nn.Parameter(saved["weights"])
    resumed = make(kind, [two])
    resumed.load_state_dict(saved["optimizer"])
    for step in steps[4:]:
        one.grad, two.grad = step.clone(), step.clone()
        optimizer.step()
        resumed.step()
    assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_closures_groups_and_missing_gradients(kind):
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make(kind, [{"params": [used]}, {"params": [unused], "lr": 7.0}])
    before = used.detach().clone()

    def closure():
        used.grad = None
        loss = used.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert (used < before).all()
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"lr": 0.0}, "lr of FedAdam must be a positive, finite number, found 0.0"),
        ({"lr": float("inf")}, "lr of FedAdam must be a positive, finite number, found inf"),
        ({"lr": 1.0, "betas": (1.0, 0.9)}, r"betas\[0\] of FedAdam must be a number from 0 to below 1, found 1.0"),
        ({"lr": 1.0, "betas": (0.9, -0.1)}, r"betas\[1\] of FedAdam must be a number from 0 to below 1, found -0.1"),
        ({"lr": 1.0, "betas": (0.9,)}, r"betas of FedAdam must be 2 entries, .*, found \(0.9,\)"),
        ({"lr": 1.0, "tau": 0.0}, "tau of FedAdam must be a positive, finite number, found 0.0"),
    ],
)
def test_arguments_out_of_range(arguments, words):
    with pytest.raises(ValueError, match=words):
        FedAdam([torch.nn.Parameter(torch.zeros(1))], **arguments)


# ---- in a fit


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_follows_the_paper(kind):
    module, rule = fresh(), Recorder("uniform")
    start = torch.nn.utils.parameters_to_vector(module.parameters()).detach().double().tolist()
    strategy = fl.FederatedStrategy(rule, clients_per_round=3, seed=5, server_optimizer=partial(make, kind))
    training_only(strategy, 3).fit(module, federated_blobs())
    deltas = [(-step.double()).tolist() for step in rule.steps]
    expected = torch.tensor(algorithm2(kind, start, deltas, 0.9, 0.99), dtype=torch.float64)
    torch.testing.assert_close(weights(module), expected, rtol=1e-4, atol=1e-5)
