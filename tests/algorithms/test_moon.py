# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
import torch.nn.functional as F
from client_rounds import Net, Rounds, assign, buffers_of, by_rule, client_data, descend, flat, lost, mean_of, partial
from method_fits import fit_method, trained
from support import Classifier, fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms import MOON

MU, TEMPERATURE, LR = 0.7, 0.5, 0.2


def federate(data):
    """The published code's loop: deep copies of the networks, frozen ones in evaluation mode, cross entropy to 0."""
    module = Net()
    last, path = {}, []
    for t in range(6):
        models = {}
        for i in partial(t):
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
                descend(local, loss, LR)
            models[i] = local
        arrived = [i for i in partial(t) if i not in lost(t)]
        last |= {i: copy.deepcopy(models[i]).eval() for i in arrived}
        assign(module, mean_of({i: models[i] for i in arrived}, data))
        path.append(flat(module))
    return torch.stack(path)


@pytest.mark.parametrize("in_files", [False, True])
def test_equals_the_loop_with_copies(in_files, tmp_path):
    """Unequal sizes, late joiners, a drop-out, BatchNorm."""
    data = client_data(seed=5)
    data[2] = data[2][:2]
    path, run = by_rule(lambda: MOON(MU, TEMPERATURE, directory=str(tmp_path) if in_files else None), data, lr=LR)
    torch.testing.assert_close(path, federate(data), rtol=0, atol=1e-9)
    assert len(run.client.models) == 4


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


# ---- in a trainer


class Wrong(Classifier):
    def federated_features(self, batch):
        return self.answer(batch)


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
