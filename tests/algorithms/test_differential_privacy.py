# SPDX-License-Identifier: Apache-2.0
"""Differential privacy of clients: clipping, noise, what is refused, and what is spent."""

import math
import secrets
import sys
from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from support import Classifier, federated_blobs, fresh, training_only
from torch import nn
from watching import Recorder

import fl_lightning as fl
from fl_lightning.algorithms import DifferentialPrivacy, FedAvg
from fl_lightning.core.updates import Columns

accounted = pytest.mark.skipif(find_spec("dp_accounting") is None, reason="dp-accounting is not installed")


class Uncounted(DifferentialPrivacy):
    """Without the accountant, for tests of everything else."""

    def refusal(self, server):
        return None

    def epsilon(self, rounds, num_clients=None, cohort_size=None):
        return 0.0


@pytest.fixture
def no_accountant(monkeypatch):
    monkeypatch.setattr("fl_lightning.fit.options.accounting", lambda: None)


def first_rows(rule):
    watching = Recorder("uniform")
    strategy = fl.FederatedStrategy(watching, client=rule, seed=2)
    training_only(strategy, 1).fit(fresh(Classifier), federated_blobs())
    return watching.rows[0]


@pytest.mark.fit
@pytest.mark.usefixtures("no_accountant")
def test_updates_are_cut_and_short_ones_keep_their_bits():
    plain = first_rows(None)
    norms = plain.double().norm(dim=1)
    clip = float(norms.median())
    for before, after, norm in zip(plain, first_rows(Uncounted(clip, 1e-12, seed=0)), norms, strict=True):
        if norm < clip * (1 - 1e-4):
            assert torch.equal(before, after)
        else:
            assert float(after.double().norm()) <= clip  # never longer, whatever rounding does
            torch.testing.assert_close(after, before * clip / norm, rtol=1e-3, atol=1e-6)
    local = first_rows(Uncounted(10 * float(norms.max()), 1e-9, "local", seed=0))
    torch.testing.assert_close(local, plain, rtol=1e-3, atol=1e-6)


@pytest.mark.fit
@pytest.mark.usefixtures("no_accountant")
def test_local_noise_has_the_promised_size_and_repeats_with_its_seed():
    quiet = first_rows(Uncounted(0.01, 1e-12, "local", seed=0))
    loud, again, secret = (first_rows(Uncounted(0.01, 3.0, "local", seed=seed)) for seed in (0, 0, None))
    noise = loud - quiet
    assert float(noise.std()) == pytest.approx(0.03, rel=0.1)
    assert abs(float(noise.mean())) < 0.004
    assert torch.linalg.matrix_rank(noise) == len(noise)  # each client's is its own
    assert torch.equal(loud, again)
    assert not torch.equal(secret, loud)


@pytest.mark.parametrize("m", [1, 8])
def test_central_noise_has_the_promised_size(m):
    cohort = make_cohort(random_rows(m, 0, n=60_000), layout=fl.ParamLayout.from_sizes((60_000,)))
    step = torch.zeros(60_000, dtype=torch.float64)
    rule = DifferentialPrivacy(0.5, 4.0, seed=1)
    noise = rule.adjust_step(cohort, step)
    assert float(noise.std()) == pytest.approx(4.0 * 0.5 / m, rel=0.02)
    assert torch.equal(rule.adjust_step(cohort, step), noise)
    secret = DifferentialPrivacy(0.5, 4.0)
    assert not torch.equal(secret.adjust_step(cohort, step), secret.adjust_step(cohort, step))
    later = make_cohort(random_rows(m, 0, n=60_000), when=1, layout=fl.ParamLayout.from_sizes((60_000,)))
    assert not torch.equal(rule.adjust_step(later, step), noise)


@pytest.mark.parametrize("where", ["central", "local"])
def test_every_number_of_secret_noise_has_random_bits_of_its_own(where, monkeypatch):
    """A generator's seed can be found by trying: torch's has 32 bits, and who finds it can take the noise away."""
    asked = []

    def bytes_of_the_system(count):
        asked.append(count)
        return bytes(count - 8) + b"\xff" * 8

    like, rule = torch.zeros(5, dtype=torch.float64), DifferentialPrivacy(0.5, 4.0, where)
    monkeypatch.setattr("secrets.token_bytes", bytes_of_the_system)
    noise = rule._noise(5, 0.5, like)
    assert asked == [40]
    torch.testing.assert_close(
        noise, 4.0 * 0.5 * torch.tensor([-1, -1, -1, -1, 1]).double() * 8.2095, rtol=1e-3, atol=0
    )
    monkeypatch.undo()
    loud = rule._noise(100_000, 0.5, like) / 2
    assert float(loud.mean()) == pytest.approx(0, abs=0.02)
    for quantile in (0.001, 0.1, 0.4, 0.9, 0.999):
        reached = float((loud < torch.special.ndtri(torch.tensor(quantile))).double().mean())
        assert reached == pytest.approx(quantile, abs=5 * math.sqrt(quantile * (1 - quantile) / 100_000))
    assert len(rule._noise(0, 0.5, like)) == 0


def test_shares_of_the_columns_get_the_same_noise():
    layout, rows = fl.ParamLayout.from_sizes((40_000,)), random_rows(3, 0, n=40_000)
    rule, parts = DifferentialPrivacy(1.0, 1.0, seed=1), []
    whole = rule.adjust_step(make_cohort(rows, layout=layout), torch.zeros(40_000, dtype=torch.float64))
    for share in range(3):
        columns = Columns(Columns.cut(40_000, 3), share, lambda mine, sizes: [])
        begin, end = columns.span
        updates = fl.UpdateMatrix(rows[:, begin:end].clone(), layout, columns)
        zeros = torch.zeros(end - begin, dtype=torch.float64)
        cohort = fl.Cohort(zeros, updates, None, torch.ones(3), (0, 1, 2), 0)
        parts.append(rule.adjust_step(cohort, zeros))
    assert torch.equal(torch.cat(parts), whole)


UNIFORM = {"algorithm": FedAvg("uniform")}


@accounted
@pytest.mark.parametrize(
    ("private", "options", "words"),
    [
        ({}, {}, r"use FedAvg\('uniform'\) in place of FedAvg\('samples'\), or where='local'"),
        ({}, {"algorithm": fl.algorithms.FedMGDAPlus()}, "in place of FedMGDAPlus"),
        ({}, {"algorithm": fl.algorithms.FedLF()}, "in place of FedLF"),
        ({"where": "local"}, {"algorithm": fl.algorithms.FedLF()}, "does not cover the losses that FedLF reads"),
        ({"where": "local"}, {"algorithm": fl.algorithms.FedFa()}, "does not cover the accuracies that FedFa reads"),
        ({"where": "local"}, {"algorithm": fl.algorithms.SCAFFOLD()}, "cannot replace the client half of SCAFFOLD"),
        ({}, UNIFORM | {"guard": fl.guards.Krum(1)}, "guard must be left out with DifferentialPrivacy"),
        ({"amplified": True}, UNIFORM | {"sampler": fl.data.AllClients()}, r"sampler must be UniformSampler\(\)"),
        ({}, UNIFORM | {"full_gradients": True}, "full_gradients=True trains nothing locally"),
        ({"where": "local", "amplified": True}, {}, "amplified=True needs where='central', found 'local'"),
    ],
)
def test_what_the_promise_does_not_cover_is_refused(private, options, words):
    with pytest.raises(ValueError, match=words):
        fl.FederatedStrategy(client=DifferentialPrivacy(1.0, 1.0, **private), **options)


def test_buffers_that_clients_report_are_refused():
    normed = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layout = fl.ParamLayout.from_module(normed)
    with pytest.raises(ValueError, match=r"not cover the buffers of Sequential, found '1\.running_mean'"):
        DifferentialPrivacy(1.0, 1.0, "local").check_module(normed, layout)
    DifferentialPrivacy(1.0, 1.0, uncovered="allow").check_module(normed, layout)


class Teaching(Classifier):
    """Its frozen teacher and its count of labels change in training."""

    def __init__(self, teaches, counts):
        super().__init__()
        self.teaches, self.counts = teaches, counts
        self.teacher = deepcopy(self.net[-1]).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        if self.counts:
            self.seen += torch.bincount(batch[1], minlength=4)
        return super().training_step(batch, batch_idx)

    @torch.no_grad()
    def on_train_batch_end(self, *outputs):
        if self.teaches:
            self.teacher.weight.lerp_(self.net[-1].weight, 0.5)


@pytest.mark.fit
@pytest.mark.usefixtures("no_accountant")
@pytest.mark.parametrize("where", ["central", "local"])
@pytest.mark.parametrize(
    ("changes", "found"), [((True, False), "'teacher.weight'"), ((False, True), "'seen'"), ((False, False), None)]
)
def test_what_training_changes_beside_parameters_is_refused(where, changes, found):
    def fit(uncovered, **options):
        strategy = fl.FederatedStrategy(
            FedAvg("uniform"), client=Uncounted(0.01, 1.0, where, uncovered=uncovered, seed=0), **options
        )
        module = fresh(Teaching, teaches=changes[0], counts=changes[1])
        before = module.teacher.weight.clone(), module.seen.clone()
        training_only(strategy, 1).fit(module, federated_blobs())
        assert all(map(torch.equal, before, (module.teacher.weight, module.seen)))

    if found is None:
        fit("refuse")
    else:
        with pytest.raises(fl.ClientError, match=f"beside trained parameters, found changes in {found}"):
            fit("refuse", on_client_error="drop")
    fit("allow", buffers="global")


@accounted
def test_pairs_that_keep_the_promise():
    local = DifferentialPrivacy(1.0, 1.0, "local")
    for server in (FedAvg(), fl.algorithms.FedMGDAPlus(server_lr=1.0), fl.algorithms.FedHEAL()):
        fl.FederatedStrategy(server, client=local, guard=fl.guards.MultiKrum(1))
    allowed = DifferentialPrivacy(1.0, 1.0, "local", uncovered="allow")
    fl.FederatedStrategy(fl.algorithms.FedLF(), client=allowed)
    fl.FederatedStrategy(FedAvg("uniform"), client=DifferentialPrivacy(1.0, 1.0, amplified=True), seed=2**62)


@accounted
@pytest.mark.fit
def test_cohorts_that_can_be_guessed_are_warned_of():
    rule, clients = DifferentialPrivacy(1.0, 1.0, amplified=True), {"clients_per_round": 3}
    with pytest.warns(UserWarning, match="but seed=0 of FederatedStrategy can be guessed"):
        fl.FederatedStrategy(FedAvg("uniform"), client=rule)
    strategy = fl.FederatedStrategy(FedAvg("uniform"), client=rule, seed=secrets.randbits(62) + 2**62, **clients)
    training_only(strategy, 1).fit(fresh(Classifier), federated_blobs())
    assert len(strategy.last_round.client_ids) == 3


def renyi(multiplier, rounds, delta):
    """Epsilon of so many Gaussian mechanisms, converted as in Canonne, Kamath, Steinke 2020, proposition 12."""
    orders = [1 + x / 100 for x in range(1, 20_000)]
    return min(
        rounds * a / (2 * multiplier**2) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )


@accounted
@pytest.mark.parametrize("where", ["central", "local"])
@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (8.0, 100), (40.0, 1000)])
def test_spending_agrees_with_the_formula(where, noise, rounds):
    rule = DifferentialPrivacy(1.0, noise, where, delta=1e-5)
    assert rule.epsilon(rounds) == pytest.approx(renyi(noise / 2, rounds, 1e-5), rel=0.02)


@accounted
def test_amplification_and_delta():
    plain = DifferentialPrivacy(1.0, 8.0)
    amplified = DifferentialPrivacy(1.0, 8.0, amplified=True)
    whole = plain.epsilon(50, num_clients=1000)
    assert amplified.epsilon(50, 1000, 20) < 0.5 * whole
    assert amplified.epsilon(50, 1000, 1000) == whole
    assert whole == DifferentialPrivacy(1.0, 8.0, delta=1000**-1.1).epsilon(50)
    with pytest.raises(ValueError, match="num_clients, and cohort_size with amplified=True, must be given"):
        plain.epsilon(50)


@accounted
def test_amplification_never_costs_and_no_rounds_spend_nothing():
    plain, amplified = (DifferentialPrivacy(1.0, 0.5, amplified=secret) for secret in (False, True))
    assert amplified.epsilon(10, 100, 10) == plain.epsilon(10, 100)  # the bound with secrecy is larger
    assert plain.epsilon(0, 100) == amplified.epsilon(0, 100, 10) == 0
    for name, numbers in (("rounds", (-1, 9, 3)), ("num_clients", (1, 0, 3)), ("cohort_size", (1, 9, 0))):
        with pytest.raises(ValueError, match=f"{name} of DifferentialPrivacy.epsilon must be"):
            amplified.epsilon(*numbers)


@accounted
def test_a_single_client_needs_a_delta():
    alone = fl.algorithms.Federation(1, fl.ParamLayout.from_sizes((3,)), torch.device("cpu"), torch.float32)
    for refused in (lambda rule: rule.epsilon(1, 1), lambda rule: rule.begin_fit(alone)):
        with pytest.raises(ValueError, match="delta of DifferentialPrivacy must be given for a single client"):
            refused(DifferentialPrivacy(1.0, 2.0))
    assert DifferentialPrivacy(1.0, 2.0, delta=1e-5).epsilon(1, 1) > 1


@accounted
@pytest.mark.fit
def test_epsilon_is_logged_every_round_and_goes_on_after_a_checkpoint(tmp_path):
    def fit(rounds, ckpt=None):
        rule = DifferentialPrivacy(0.1, 8.0, amplified=True, seed=4)
        strategy = fl.FederatedStrategy(FedAvg("uniform"), client=rule, clients_per_round=3, seed=2)
        trainer = training_only(strategy, rounds)
        trainer.fit(fresh(Classifier), federated_blobs(), ckpt_path=ckpt)
        return float(trainer.callback_metrics["fed/epsilon"]), trainer, rule

    two, trainer, rule = fit(2)
    assert two == pytest.approx(rule.epsilon(2, 6, 3), rel=1e-6)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, *_ = fit(3, tmp_path / "two.ckpt")
    assert two < resumed == pytest.approx(rule.epsilon(3, 6, 3), rel=1e-6)


def test_without_the_accountant(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"needs dp-accounting: pip install '\.\[privacy\]' in a checkout"):
        fl.FederatedStrategy(FedAvg("uniform"), client=DifferentialPrivacy(1.0, 1.0))
