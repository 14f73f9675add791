# SPDX-License-Identifier: Apache-2.0
"""The server's half of a round: its optimizer, full-gradient rows, losses on request, the memory plan."""

import functools
import logging
import math
import re

import pytest
import torch
from support import CLASSES, Blobs, Classifier, Manual, Tally, blobs, federated_blobs, fit, fresh, train, weights
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy
from watching import Recorder

import fl_lightning as fl
from fl_lightning.algorithms import (
    AFL,
    SCAFFOLD,
    ClientReport,
    ClientRule,
    FedAvg,
    FedFa,
    FedHEAL,
    FedLF,
    FedMDFG,
    FedProx,
    Needs,
)
from fl_lightning.clients.bound_parameters import BoundParameters
from fl_lightning.clients.buffers import BufferBank, BufferReport
from fl_lightning.clients.update_rows import UpdateRows, Upload
from fl_lightning.fit.uploads import stacked, usable


def flat(module):
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


# ---- the server optimizer


def test_the_step_is_the_server_optimizers_gradient_and_its_state_lives_on():
    make = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, weight_decay=0.1)
    rule = Recorder()
    module = train(rounds=4, algorithm=rule, server_optimizer=make).module
    theta = flat(fresh()).double()
    velocity = torch.zeros_like(theta)
    for step in rule.steps:
        velocity = 0.9 * velocity + step + 0.1 * theta
        theta = theta - 0.7 * velocity
    assert torch.allclose(flat(module).double(), theta, atol=1e-6, rtol=1e-5)
    assert all(p.grad is None for p in module.parameters())


# ---- rows and losses


def client_data(data, client):
    return next(iter(data.train_dataloader().batches(client, seed=None, batch_size=10_000)))[0]


class Spare(Classifier):
    """Has parameters that it does not use."""

    def __init__(self, **options):
        super().__init__(**options)
        self.spare = nn.Parameter(torch.ones(5))


class DropsLast(Blobs):
    def train_dataloader(self):
        return DataLoader(blobs(100), batch_size=8, shuffle=True, drop_last=True)


def dropping_last():
    return fl.FederatedDataModule(DropsLast(), [list(range(29)), list(range(29, 100))])


EVERY = {"clients_per_round": 1.0}


@pytest.mark.parametrize(
    ("kind", "options", "make"),
    [
        (Classifier, {"log": True, "momentum": 0.9}, federated_blobs),
        (Spare, {}, federated_blobs),
        (Classifier, {}, dropping_last),  # training drops some samples
    ],
)
def test_full_gradient_rows_are_learning_rate_times_gradient_of_all_samples(kind, options, make):
    rule, reference, data = Recorder(full_gradients=True), fresh(kind, lr=0.3, **options), make()
    done = train(fresh(kind, lr=0.3, **options), 2, algorithm=rule, data=data, **EVERY)
    for cohort, rows, params in zip(rule.cohorts, rule.rows, rule.params, strict=True):
        nn.utils.vector_to_parameters(params, reference.parameters())
        for client, row in zip(cohort.client_ids, rows, strict=True):
            x, y = client_data(data, client)
            loss = nn.functional.cross_entropy(reference(x), y)
            gradients = torch.autograd.grad(loss, list(reference.parameters()), materialize_grads=True)
            expected = torch.cat([gradient.reshape(-1) for gradient in gradients])
            assert torch.allclose(row, 0.3 * expected, atol=1e-7, rtol=1e-5)
    assert rule.rows[0].norm() > 0.01
    assert done.strategy.last_round.local_steps == 2 * data.num_clients, "one step per client and round"


def test_rows_of_local_training_are_before_minus_after():
    rule = Recorder()
    module = train(rounds=1, algorithm=rule, clients_per_round=1).module
    assert torch.allclose(rule.rows[0][0], flat(fresh()) - flat(module), atol=1e-7)
    (cohort,) = rule.cohorts
    assert (cohort.client_lr, cohort.num_clients) == (pytest.approx(0.1), 6)
    assert cohort.losses is cohort.losses_at is None


def by_hand(module, data, client):
    x, y = client_data(data, client)
    with torch.no_grad():
        return nn.functional.cross_entropy(module.eval()(x).double(), y).item()


@pytest.mark.parametrize(
    ("options", "make"),
    [({"dropout": 0.5, "log": True}, federated_blobs), ({"norm": True}, federated_blobs), ({}, dropping_last)],
)
def test_losses_are_those_of_the_global_model_in_eval_mode_on_all_samples(options, make):
    rule, data = Recorder(losses=True), make()
    module = train(fresh(**options), 1, algorithm=rule, data=data, **EVERY).module
    expected = [by_hand(fresh(**options), data, client) for client in range(data.num_clients)]
    assert rule.cohorts[0].losses.tolist() == pytest.approx(expected, abs=1e-6)
    assert rule.cohorts[0].losses.dtype == torch.float64
    assert module.training


class Logging(Classifier):
    """Logs a number and a metric object; the losses at given parameters must not be seen in them."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.calls = Tally()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.calls += 1
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss})
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


def test_losses_leave_logs_metrics_and_random_numbers_alone():
    results = []
    for rule in (Recorder(), Recorder(losses=True), Recorder(losses=True, requery=True)):
        module, _, trainer = train(fresh(Logging), 2, algorithm=rule)
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.split("/")[0] != "fed"}
        results.append((weights(module), metrics, module.calls.count))
    (expected, logged, fewest), *others = results
    assert all(torch.equal(found, expected) and metrics == logged for found, metrics, _ in others)
    assert all(calls > fewest for *_, calls in others)
    assert {"loss_step", "loss_epoch", "twice", "accuracy"} <= logged.keys()


class Requery(FedAvg):
    """Asks the clients again, at parameters of its own."""

    needs = Needs(losses=True, requery=True)

    def __init__(self, fail=False):
        super().__init__()
        self.fail, self.answers = fail, []

    def aggregate(self, cohort):
        step = super().aggregate(cohort)
        before = cohort.params.clone()
        again = cohort.losses_at(cohort.params)
        strided = cohort.losses_at(torch.stack([cohort.params.double() - step, before], 1)[:, 0])
        at_zero = cohort.losses_at(torch.zeros_like(cohort.params))
        self.answers.append((cohort.losses.clone(), again, at_zero, strided))
        assert torch.equal(cohort.params, before)
        return step


def test_requery_answers_at_any_parameters_and_restores_the_binding():
    rule, reference, data = Requery(), fresh(norm=True), federated_blobs()
    module, _, asking = fit(fresh(norm=True), 2, algorithm=rule, data=data, **EVERY)
    losses, again, at_zero, strided = rule.answers[0]
    assert torch.equal(losses, again)
    assert again.dtype == torch.float64
    assert at_zero.tolist() == pytest.approx([math.log(CLASSES)] * 6, abs=1e-6)
    plain, _, trainer = fit(fresh(norm=True), 2, **EVERY)
    assert torch.equal(weights(module), weights(plain))
    for name in ("val_loss", "val_acc"):
        assert asking.callback_metrics[name] == trainer.callback_metrics[name], "validation sees the new global model"
    after = train(fresh(norm=True), 1, buffers="global", **EVERY).module
    nn.utils.vector_to_parameters(flat(after), reference.parameters())  # the round's buffers were the initial ones
    assert strided.tolist() == pytest.approx([by_hand(reference, data, c) for c in range(6)], abs=1e-5)


def test_an_error_while_asking_again_leaves_the_global_weights():
    class Fragile(Classifier):
        def training_step(self, batch, batch_idx):
            if not self.training and not self.net[0].weight.any():
                raise RuntimeError("cannot evaluate zero")
            return super().training_step(batch, batch_idx)

    module = fresh(Fragile)
    with pytest.raises(RuntimeError, match="cannot evaluate zero"):
        train(module, 1, algorithm=Requery())
    assert torch.equal(weights(module), weights(fresh()))
    assert module.training


class ManualWithLoss(Manual):
    def __init__(self):
        super().__init__()
        self.asked = Tally()

    def federated_loss(self, batch, batch_idx):
        assert not torch.is_grad_enabled()
        self.asked += 1
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("algorithm", [FedLF, lambda: FedMDFG(gradient_source="update")])
def test_manual_optimization_with_a_federated_loss(algorithm):
    manual, automatic = (train(fresh(kind), 2, algorithm=algorithm()).module for kind in (ManualWithLoss, Classifier))
    assert manual.asked.count >= 6
    assert torch.allclose(weights(manual), weights(automatic), atol=1e-6)


# ---- reports


def upload(index, client_id, size=1, **more):
    fields = {"train_loss": None, "loss": None, "report": ClientReport(), "buffers": BufferReport(size, {})}
    return Upload(index, client_id, size, **{**fields, **more})


def received(values):
    """The rows of a round in which every client's update has arrived."""
    module = nn.Linear(values.shape[1], 1, bias=False, dtype=values.dtype)
    memory = iter([values])
    rows = UpdateRows(
        BoundParameters(module, "module"), len(values), lambda *of: next(memory, torch.empty_like(values))
    )
    for index in range(len(values)):
        rows.received(index)
    return rows


def test_usable_uploads_are_gathered_and_the_others_have_reasons():
    values = torch.arange(5.0)[:, None].expand(5, 3).clone()
    values[1, 2] = math.nan
    rows = received(values)
    bank = BufferBank(nn.Linear(1, 1), "mean")
    uploads = [
        upload(0, 10, train_loss=torch.tensor(1.5)),
        upload(1, 11),
        upload(2, 12, loss=math.nan, train_loss=torch.tensor([2.5], dtype=torch.float64)),
        upload(3, 13),
        upload(4, 14, loss=0.5),
    ]
    rows.take_companions(3, {"control": torch.tensor([1.0, math.inf, 0.0])})
    rows.take_companions(4, {"control": torch.ones(3)})
    reasons = {}
    got = usable(uploads, rows, bank, ClientRule(), lambda a, why, others: reasons.update({a.client_id: why}))
    assert [a.client_id for a in got.uploads] == [10, 14]
    assert rows.gathered([a.index for a in got.uploads]).rows.tolist() == [[0.0] * 3, [4.0] * 3]
    assert got.norms.tolist() == pytest.approx([0, math.sqrt(48)])
    assert got.train_losses == [1.5, None]
    assert reasons == {
        11: "its update is not finite",
        12: "its loss at the global model is nan",
        13: "what it sends besides its update is not finite (control)",
    }
    assert usable([], rows, bank, ClientRule(), lambda *_: None).uploads == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_large_numbers_do_not_overflow(dtype):
    large = torch.finfo(dtype).max / 4 if dtype is not torch.float64 else 1e150
    vector = torch.full((9,), large, dtype=dtype)
    rows = received(vector[None])
    got = usable([upload(0, 1)], rows, BufferBank(nn.Linear(1, 1), "mean"), ClientRule(), pytest.fail)
    assert got.norms.item() == pytest.approx(3 * float(vector[0]), rel=1e-3)
    vector[0] = math.inf
    assert rows.norms([0]).tolist() == [math.inf]


def test_reports_must_agree():
    assert stacked([{}, {}], (1, 2), "extras") == {}
    both = stacked([{"a": torch.ones(2)}, {"a": torch.zeros(2)}], (1, 2), "extras")
    assert both["a"].tolist() == [[1, 1], [0, 0]]
    with pytest.raises(ValueError, match=r"extras of X must have the same names .* \{1: \{'a': \(2,\)\}, 5: \{\}\}"):
        stacked([{"a": torch.ones(2)}, {}], (1, 5), "extras of X")


def test_extras_and_companions_reach_the_rule():
    class Telling(ClientRule):
        def end_client(self, work):
            return ClientReport({"id": torch.tensor([work.client_id, work.steps])}, {"row": work.row + 1})

    class Listening(Recorder):
        def client_rule(self):
            return Telling()

    rule = Listening()
    train(rounds=1, algorithm=rule)
    cohort = rule.cohorts[0]
    assert cohort.extras["id"][:, 0].tolist() == list(cohort.client_ids)
    assert (cohort.extras["id"][:, 1] > 0).all()
    assert torch.allclose(cohort.companions["row"].rows, rule.params[0] - rule.rows[0] + 1, atol=1e-6)


class Spoiled(ClientRule):
    """One client sends something that is no number."""

    def __init__(self, value):
        self.value = value

    def end_client(self, work):
        numbers = torch.ones(3)
        numbers[1] = self.value if work.client_id == 2 else 0.0
        return ClientReport({"share": numbers, "count": torch.tensor(work.steps)})


class Open(Spoiled):
    """NaN is an answer."""

    undefined_extras = ("share",)


@pytest.mark.parametrize(
    ("rule", "value"), [(Spoiled, math.nan), (Spoiled, math.inf), (Open, -math.inf), (Open, math.nan)]
)
def test_extras_that_are_not_finite_are_refused_like_updates_unless_a_rule_says_otherwise(rule, value):
    options = {"algorithm": Recorder(), "client": rule(value), "on_client_error": "drop", **EVERY}
    words = rf"what {rule.__name__} sends besides its update is not finite \(extras 'share'\)"
    if rule is Open and math.isnan(value):
        assert train(rounds=1, **options).strategy.algorithm.cohorts[0].extras["share"].isnan().sum() == 1
        return
    with pytest.raises(fl.ClientError, match=rf"client 2 in round 0: {words}"):
        train(rounds=1, client=rule(value), **EVERY)
    with pytest.warns(UserWarning, match=f"client 2 is left out of round 0: {words}"):
        strategy = train(rounds=1, **options).strategy
    assert strategy.last_round.client_ids == (0, 1, 3, 4, 5)
    assert strategy.algorithm.cohorts[0].extras["share"].isfinite().all()


# ---- the memory plan

PLANS = {
    "FedAvg": (FedAvg, []),
    "FedProx": (FedProx, []),
    "SCAFFOLD": (SCAFFOLD, ["ControlVariates.c", "ControlVariates.c_i", "control rows"]),
    "FedLF": (FedLF, ["FedLF.history"]),
    "FedMDFG": (FedMDFG, ["FedMDFG.history", "line_search"]),
    "FedHEAL": (FedHEAL, ["FedHEAL.counts"]),
    "AFL": (AFL, ["AFL.mean"]),
    "FedFa": (FedFa, ["FedFa.momentum"]),
}


def plan(caplog, module=None, **options):
    with caplog.at_level(logging.INFO):
        train(module, 1, clients_per_round=4, **options)
    (line,) = [record.message for record in caplog.records if "Memory beside the module" in record.message]
    parts = re.findall(r"([A-Za-z_][^,:]*?(?:\([^)]*\))?) ([\d,]+) B", line.split("module: ")[1])
    return line, {name: int(size.replace(",", "")) for name, size in parts}


@pytest.mark.parametrize("name", PLANS)
def test_the_memory_plan_is_printed_in_bytes(name, caplog):
    make, extra = PLANS[name]
    line, parts = plan(caplog, algorithm=make())
    assert line.startswith("Federated fit on cpu, lean path.")
    assert parts["global parameters"] == 4 * 140
    assert parts["parameters in training (per process)"] == 4 * (96 + 16 + 32 + 16)  # whole lines of 64 bytes
    assert parts["update matrix (4 x 140)"] == 4 * 4 * 144
    assert list(parts)[3:] == extra
    assert all(parts[key] > 0 for key in extra)


def test_the_memory_plan_counts_all_that_is_asked_for(caplog):
    _, parts = plan(
        caplog, fresh(norm=True, momentum=0.9), algorithm=FedLF(), client=SCAFFOLD(), client_optimizer_state="keep",
        server_optimizer=functools.partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    n = 4 * 156
    assert parts["FedLF.history"] > 0
    expected = {
        "ControlVariates.c": n, "ControlVariates.c_i": 6 * n, "buffers (5 copies)": 5 * (8 * 4 + 8 * 4 + 8),
        "server optimizer (up to)": 2 * n, "copies to take a step back (up to)": 3 * n,
        "client optimizers (up to, 6 clients)": 2 * 6 * n,
    }  # fmt: skip
    assert {name: parts[name] for name in expected} == expected
