# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from client_rounds import Net, Rounds, assign, by_rule, client_data, descend, flat, mean_of, partial
from method_fits import fit_method
from support import Classifier, fresh
from torch import nn

import fl_lightning as fl
from fl_lightning.algorithms import MOON, FedCKA
from fl_lightning.algorithms.fedcka import linear_cka

MU, LR = 2.0, 0.2


def cka(x, y):
    """As the definition has it, from the cross-covariance."""
    x, y = x - x.mean(0), y - y.mean(0)
    return (y.T @ x).square().sum() / ((x.T @ x).square().sum().sqrt() * (y.T @ y).square().sum().sqrt())


def test_linear_cka():
    torch.manual_seed(0)
    x, y = torch.randn(7, 4).double(), torch.randn(7, 9).double()
    rotation = torch.linalg.qr(torch.randn(4, 4).double())[0]
    torch.testing.assert_close(linear_cka(x, y), cka(x, y))
    assert linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1)
    assert 0 < linear_cka(x, y) < 1
    leaf = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    assert linear_cka(leaf, y[:3]) == 0  # constant outputs, as of a dead layer
    linear_cka(leaf, y[:3]).backward()
    assert leaf.grad.isfinite().all()
    assert linear_cka(x[:1], y[:1]) == 0


def outputs(net, batch):
    hidden = net.encoder[0](batch[0])
    features = net.encoder[2](net.encoder[1](hidden))
    return [hidden, net.head(features)]


def federate(data):
    module, last, path = Net(), {}, []
    for t in range(5):
        models = {}
        for i in partial(t):
            local, received = copy.deepcopy(module), copy.deepcopy(module).eval()
            for batch in data[i]:
                loss = local.loss(batch)
                if i in last:
                    local.encoder[1].momentum = 0.0  # the second pass must not be counted
                    mine = outputs(local, batch)
                    local.encoder[1].momentum = 0.1
                    with torch.no_grad():
                        theirs = [outputs(net, batch) for net in (received, last[i])]
                    for x, new, old in zip(mine, *theirs, strict=True):
                        a, b = cka(x, new), cka(x, old)
                        loss = loss - MU / 2 * torch.log(torch.exp(a) / (torch.exp(a) + torch.exp(b)))
                descend(local, loss, LR)
            models[i] = local
        last |= {i: copy.deepcopy(models[i]).eval() for i in models}
        assign(module, mean_of(models, data))
        path.append(flat(module))
    return torch.stack(path)


def path_of(rounds, data, module=None, **options):
    return by_rule(lambda: FedCKA(MU, **options), data, rounds, lost=lambda when: (), module=module, lr=LR)[0]


def test_equals_the_loop_with_copies():
    data = client_data(seed=9)
    data[2] = data[2][:2]
    expected = federate(data)
    torch.testing.assert_close(path_of(5, data), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(path_of(5, data, layers=["encoder.0", "head"]), expected, rtol=0, atol=1e-9)
    assert not torch.allclose(path_of(5, data, layers=["encoder.0"]), expected, atol=1e-4)


def test_the_first_layers_are_compared():
    data = client_data(seed=9)
    assert torch.equal(path_of(3, data, num_layers=1), path_of(3, data, layers=["encoder.0"]))


def test_activations_that_work_in_place_make_no_difference():
    def path(inplace):
        module = Net(norm=False)
        module.encoder[2] = nn.ReLU(inplace)
        return path_of(3, client_data(seed=9), module)

    assert torch.equal(path(True), path(False))


def test_passes_for_the_term_end_with_the_last_compared_layer():
    method, data = FedCKA(MU, layers=["encoder.0"]), client_data(clients=1)
    run = Rounds(method, method.client_rule(), data, lr=LR)
    calls = dict.fromkeys(("encoder.0", "encoder.2", "head"), 0)

    def counts(name):
        return lambda *_: calls.update({name: calls[name] + 1})

    for name in calls:
        run.module.get_submodule(name).register_forward_hook(counts(name))
    run.round([0])
    run.round([0])
    batches = len(data[0])
    assert calls == {"encoder.0": 5 * batches, "encoder.2": 2 * batches, "head": 2 * batches}
    assert len(run.module.encoder[0]._forward_hooks) == 1  # this test's own


@pytest.mark.parametrize("method", [FedCKA, MOON])
def test_mu_0_takes_no_further_pass(method):
    rule, data, passes = method(0.0), client_data(clients=1), []
    run = Rounds(rule, rule.client_rule(), data)
    run.module.encoder[0].register_forward_hook(lambda *_: passes.append(1))
    for _ in range(2):
        run.round([0])
    assert len(passes) == 2 * len(data[0])


# ---- in a trainer


@pytest.mark.fit
def test_layers_that_are_not_there_are_refused_before_the_first_round():
    with pytest.raises(ValueError, match=r"layers of FedCKA must be submodules of Classifier, found \['net.9'\]"):
        fit_method(FedCKA(layers=["net.0", "net.9"]))
    with pytest.raises(ValueError, match="num_layers of FedCKA must be at most 2 here, found 3"):
        fit_method(FedCKA(num_layers=3))


class Pairs(Classifier):
    def __init__(self):
        super().__init__()
        self.net[1] = self.Two()

    class Two(nn.Module):
        def forward(self, x):
            return (x.relu(), x)

    def forward(self, x):
        return self.net[2](self.net[1](self.net[0](x))[0])


@pytest.mark.parametrize(("layer", "words"), [("net.1", "found tuple"), ("net", "found nothing")])
@pytest.mark.fit
def test_layers_without_one_output_are_named(layer, words):
    with pytest.raises(fl.ClientError, match=f"layer '{layer}' must put out one tensor .* for FedCKA, {words}"):
        fit_method(FedCKA(layers=[layer]), module=fresh(Pairs), clients_per_round=6)
