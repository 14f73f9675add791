# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
import torch.nn.functional as F
from client_rounds import Net, Rounds, assign, buffers_of, client_data, flat
from method_fits import FailsInRoundOne, fit_method, trained
from support import Classifier, federated_blobs, fresh, quiet_trainer, weights

import fl_lightning as fl
from fl_lightning.algorithms import MOON, FedMDFG
from fl_lightning.core.storage import kept

MU, TEMPERATURE, LR = 0.7, 0.5, 0.2


def federate(rounds, cohorts, data, lost=lambda t: (), keep=None):
    """The published code's loop: deep copies of the networks, frozen ones in evaluation mode, cross entropy to 0."""
    module = Net()
    last, path = {}, []
    for t in range(rounds):
        models = {}
        for i in cohorts(t):
            local, received = copy.deepcopy(module), copy.deepcopy(module).eval()
            for batch in data[i]:
                loss = local.loss(batch)
                if i in last:
                    # The loss has counted the batch for BatchNorm; a second pass must not do so again.
                    again = copy.deepcopy(local)
                    again.encoder[0], again.encoder[1].weight, again.encoder[1].bias = (
                        local.encoder[0], local.encoder[1].weight, local.encoder[1].bias,
                    )  # fmt: skip
                    z = again.federated_features(batch)[0]
                    with torch.no_grad():
                        glob, prev = (net.federated_features(batch)[0] for net in (received, last[i]))
                    logits = torch.stack([F.cosine_similarity(z, glob), F.cosine_similarity(z, prev)], 1) / TEMPERATURE
                    loss = loss + MU * F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
                gradients = torch.autograd.grad(loss, list(local.parameters()))
                with torch.no_grad():
                    for p, g in zip(local.parameters(), gradients, strict=True):
                        p -= LR * g
            models[i] = local
        arrived = [i for i in cohorts(t) if i not in lost(t)]
        for i in arrived:
            last.pop(i, None)
            last[i] = copy.deepcopy(models[i]).eval()
        last = dict(list(last.items())[-(keep or len(data)) :])
        sizes = torch.tensor([sum(len(y) for _, y in data[i]) for i in arrived]).double()
        assign(module, (sizes / sizes.sum()) @ torch.stack([flat(models[i]) for i in arrived]))
        path.append(flat(module))
    return torch.stack(path)


def partial(t):
    return [[0, 2], [1, 2, 3], [0, 2], [0, 1, 2, 3], [2, 0], [1, 3]][t]


def lost(t):
    return (3,) if t == 1 else ()


def by_rule(rounds, data, reload_at=None, **options):
    make = lambda: MOON(MU, TEMPERATURE, **options)  # noqa: E731
    method = make()
    run = Rounds(method, method.client_rule(), data, lr=LR)
    path = []
    for t in range(rounds):
        if t == reload_at:
            state, run.server = kept.state(run.client), make()
            run.client = run.server.client_rule()
            kept.load(run.client, state)
            run.begin()
        run.round(partial(t), lost(t))
        path.append(run.params)
    return torch.stack(path), run


@pytest.mark.parametrize("keep", [None, 2])
def test_equals_the_loop_with_copies(keep):
    """Unequal sizes, late joiners, a drop-out, BatchNorm; and with fewer remembered models than clients."""
    data = client_data(seed=5)
    data[2] = data[2][:2]
    path, run = by_rule(6, data, max_models=keep)
    torch.testing.assert_close(path, federate(6, partial, data, lost, keep), rtol=0, atol=1e-9)
    assert len(run.client.models) == (keep or 4)
    assert not torch.allclose(path, federate(6, partial, data, lost, 1), atol=1e-4)


def test_remembers_models_with_their_statistics():
    data = client_data()
    method = MOON()
    run = Rounds(method, method.client_rule(), data)
    row, _, _, after = run.train(1)
    run.round([1])
    model = method.client_rule().models[1]
    torch.testing.assert_close(model.params, run.layout.flatten(run.parameters))
    assert row.any()
    packed = torch.cat([value.reshape(-1).view(torch.uint8) for value in after.values()])
    assert torch.equal(model.buffers, packed)


def test_statistics_and_modes_are_those_of_plain_training():
    """BatchNorm sees every batch once, whatever the term computes."""
    data = client_data()
    after = {}
    for mu in (0.0, 1e-300):  # the term is computed, and changes nothing
        method = MOON(mu)
        run = Rounds(method, method.client_rule(), data)
        run.module.encoder[1].momentum = 0.3
        run.round([0])
        run.module.encoder[3].eval()
        after[mu] = run.train(0)[3]
        assert run.module.training
        assert not run.module.encoder[3].training
    assert after[0.0].keys() == buffers_of(run.module).keys()
    assert all(torch.equal(after[0.0][name], after[1e-300][name]) for name in after[0.0])


def test_resumed_run_continues_bit_for_bit():
    data = client_data()
    whole = by_rule(6, data)[0]
    assert torch.equal(whole, by_rule(6, data, reload_at=3)[0])
    assert torch.equal(whole, by_rule(6, data, model_device="cpu")[0])


# ---- in a trainer


class Bare(Classifier):
    federated_features = None


class Wrong(Classifier):
    def federated_features(self, batch):
        return self.answer(batch)


@pytest.mark.fit
def test_module_without_features_is_refused_before_the_first_round():
    words = r"MOON compares features: define federated_features\(self, batch\) on Bare, which returns .* \[B, d"
    with pytest.raises(ValueError, match=words):
        fit_method(MOON(), module=fresh(Bare))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda batch: batch[0][:, :, None], r"features \[B, d\], or .*, found torch.float32 \[\d+, 12, 1\]"),
        (lambda batch: batch[1], r"features \[B, d\], or .*, found torch.int64 \[\d+\]"),
        (lambda batch: None, r"features \[B, d\], or .*, found NoneType"),
        (lambda batch: (batch[0], batch[0][:, 0]), r"class indices \[\d+\] beside the features, found torch.float32"),
        (lambda batch: (batch[0], batch[1][:-1]), r"class indices \[\d+\] beside the features"),
    ],
)
@pytest.mark.fit
def test_features_of_the_wrong_kind_are_named(answer, words):
    module = fresh(Wrong)
    module.answer = answer
    with pytest.raises(fl.ClientError, match=rf"Wrong.federated_features must return {words}"):
        fit_method(MOON(), module=module, clients_per_round=6)


class OnePass(Classifier):
    """Computes its loss from the features that it gives away."""

    passes = 0

    def federated_features(self, batch):
        OnePass.passes += self.training
        return super().federated_features(batch)

    def training_step(self, batch, batch_idx):
        features, y = self.federated_features(batch)
        return F.cross_entropy(self.net[-1](features), y)


@pytest.mark.fit
def test_a_training_step_that_uses_its_features_saves_the_second_pass():
    OnePass.passes = 0
    module, _ = fit_method(MOON(5.0), module=fresh(OnePass, norm=True, momentum=0.5))
    torch.testing.assert_close(weights(module), trained(MOON(5.0)), rtol=0, atol=1e-6)
    assert "federated_features" not in vars(module)
    assert OnePass.passes == module.trainer.strategy.last_round.local_steps


def test_refused_where_nothing_is_trained_locally():
    with pytest.raises(ValueError, match="FedMDFG takes full gradients"):
        fl.FederatedStrategy(FedMDFG(), client=MOON())


@pytest.mark.filterwarnings("ignore:round .* had no usable report")
@pytest.mark.fit
def test_a_client_that_fails_leaves_the_module_as_it_was():
    module = fresh(FailsInRoundOne)
    strategy = fl.FederatedStrategy(MOON(), clients_per_round=2, on_client_error="drop", seed=1)
    with pytest.warns(UserWarning, match="left out of round 1"):
        quiet_trainer(strategy, 3).fit(module, federated_blobs())
    assert "federated_features" not in vars(module)
    assert weights(module).isfinite().all()


@pytest.mark.fit
def test_memory_plan_counts_models_and_statistics(caplog):
    with caplog.at_level("INFO"):
        fit_method(MOON(max_models=3), rounds=1)
    plan = next(record.message for record in caplog.records if "Memory beside the module" in record.message)
    module = fresh(Classifier, norm=True)
    size = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    assert f"ModelContrast.models {(3 + 4) * size:,} B" in plan  # those of the round beside those that are remembered
