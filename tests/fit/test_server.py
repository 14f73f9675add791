# SPDX-License-Identifier: Apache-2.0
"""The server's half of a round: its optimizer, full-gradient rows, losses on request, the memory plan."""

import copy
import functools
import logging
import math
import re

import pytest
import torch
from support import (
    CLASSES,
    Blobs,
    Classifier,
    Tally,
    blobs,
    federated_blobs,
    fresh,
    quiet_trainer,
    training_only,
    weights,
)
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


def momentum_by_hand(theta, steps):
    velocity = torch.zeros_like(theta)
    for step in steps:
        velocity = 0.9 * velocity + step
        theta = theta - 0.7 * velocity
    return theta


def decay_by_hand(theta, steps):
    for step in steps:
        theta = theta - 1.0 * (step + 0.1 * theta)
    return theta


SERVERS = {
    "FedAvgM": (functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9), momentum_by_hand),
    "weight decay": (functools.partial(torch.optim.SGD, lr=1.0, weight_decay=0.1), decay_by_hand),
}


@pytest.mark.parametrize("name", SERVERS)
def test_the_step_is_the_server_optimizers_gradient_and_its_state_lives_on(name):
    make, by_hand = SERVERS[name]
    module, rule = fresh(), Recorder()
    start = flat(module)
    strategy = fl.FederatedStrategy(rule, clients_per_round=3, server_optimizer=make)
    training_only(strategy, 4).fit(module, federated_blobs())
    expected = by_hand(start.double(), [step.double() for step in rule.steps])
    assert torch.allclose(flat(module).double(), expected, atol=1e-6, rtol=1e-5)
    forgetful = start.double()
    for step in rule.steps:
        forgetful = by_hand(forgetful, [step.double()])
    if name != "weight decay":
        assert not torch.allclose(expected, forgetful, atol=1e-4), "one step at a time would be something else"
    assert all(p.grad is None for p in module.parameters())


# ---- rows


def client_data(data, client):
    batches = [batch for batch, _ in data.train_dataloader().batches(client, seed=None, batch_size=10_000)]
    return batches[0]


@pytest.mark.parametrize("options", [{}, {"log": True}, {"momentum": 0.9}])
def test_full_gradient_rows_are_learning_rate_times_gradient(options):
    module, rule = fresh(lr=0.3, **options), Recorder(full_gradients=True)
    reference = copy.deepcopy(module)
    data = federated_blobs()
    trainer = training_only(fl.FederatedStrategy(rule, clients_per_round=4), 2)
    trainer.fit(module, data)
    for cohort, rows, params in zip(rule.cohorts, rule.rows, rule.params, strict=True):
        nn.utils.vector_to_parameters(params, reference.parameters())
        for client, row in zip(cohort.client_ids, rows, strict=True):
            x, y = client_data(data, client)
            loss = nn.functional.cross_entropy(reference(x), y)
            gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, reference.parameters())])
            assert torch.allclose(row, 0.3 * gradient, atol=1e-7, rtol=1e-5)
    assert rule.rows[0].norm() > 0.01
    assert trainer.strategy.last_round.local_steps == 2 * 4, "one step per client and round"


def dropping_last(batch_size=8):
    class DropLast(Blobs):
        def train_dataloader(self):
            return DataLoader(blobs(100), batch_size=batch_size, shuffle=True, drop_last=True)

    return fl.FederatedDataModule(DropLast(), [list(range(29)), list(range(29, 100))])


def test_full_gradients_see_all_samples_also_where_training_drops_some():
    module, rule = fresh(), Recorder(full_gradients=True)
    reference, data = copy.deepcopy(module), dropping_last()
    training_only(fl.FederatedStrategy(rule), 1).fit(module, data)
    for client in range(2):
        x, y = client_data(data, client)
        loss = nn.functional.cross_entropy(reference(x), y)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, reference.parameters())])
        assert torch.allclose(rule.rows[0][client], 0.1 * gradient, atol=1e-7, rtol=1e-5)


def test_full_gradients_of_parameters_out_of_use_are_zero():
    class Spare(Classifier):
        def __init__(self):
            super().__init__()
            self.spare = nn.Parameter(torch.ones(5))

    module, rule = fresh(Spare), Recorder(full_gradients=True)
    training_only(fl.FederatedStrategy(rule), 1).fit(module, federated_blobs())
    start = rule.cohorts[0].updates.layout.layer_starts[:2]
    assert not rule.rows[0][:, start[0] : start[1]].any()
    assert module.spare.tolist() == [1.0] * 5


def test_rows_of_local_training_are_before_minus_after():
    module, rule = fresh(), Recorder()
    strategy = fl.FederatedStrategy(rule, clients_per_round=1)
    start = flat(module)
    training_only(strategy, 1).fit(module, federated_blobs())
    assert torch.allclose(rule.rows[0][0], start - flat(module), atol=1e-7)
    cohort = rule.cohorts[0]
    assert cohort.client_lr == pytest.approx(0.1)
    assert cohort.num_clients == 6
    assert cohort.losses is None
    assert cohort.losses_at is None


# ---- losses


def by_hand(module, data, client):
    module.eval()
    x, y = client_data(data, client)
    with torch.no_grad():
        return nn.functional.cross_entropy(module(x).double(), y).item()


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"norm": True}, {"log": True}])
def test_losses_are_those_of_the_global_model_in_eval_mode(options):
    module, rule = fresh(**options), Recorder(losses=True)
    reference, data = copy.deepcopy(module), federated_blobs()
    training_only(fl.FederatedStrategy(rule), 1).fit(module, data)
    expected = [by_hand(reference, data, client) for client in range(6)]
    assert rule.cohorts[0].losses.tolist() == pytest.approx(expected, abs=1e-6)
    assert rule.cohorts[0].losses.dtype == torch.float64
    assert module.training


def test_losses_see_all_samples_also_where_training_drops_some():
    module, rule = fresh(), Recorder(losses=True)
    reference, data = copy.deepcopy(module), dropping_last()
    training_only(fl.FederatedStrategy(rule), 1).fit(module, data)
    assert rule.cohorts[0].losses.tolist() == pytest.approx([by_hand(reference, data, c) for c in range(2)], abs=1e-6)


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
        module = fresh(Logging)
        trainer = training_only(fl.FederatedStrategy(rule), 2)
        trainer.fit(module, federated_blobs())
        metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.split("/")[0] != "fed"}
        results.append((weights(module), metrics, module.calls.count))
    for got, metrics, calls in results[1:]:
        assert torch.equal(got, results[0][0])
        assert metrics == results[0][1]
        assert calls > results[0][2]
    assert {"loss_step", "loss_epoch", "twice", "accuracy"} <= results[0][1].keys()


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
    module, rule = fresh(norm=True), Requery()
    reference, data = copy.deepcopy(module), federated_blobs()
    asking = quiet_trainer(fl.FederatedStrategy(rule), 2)
    asking.fit(module, data)
    losses, again, at_zero, strided = rule.answers[0]
    assert torch.equal(losses, again)
    assert again.dtype == torch.float64
    assert at_zero.tolist() == pytest.approx([math.log(CLASSES)] * 6, abs=1e-6)
    plain = fresh(norm=True)
    trainer = quiet_trainer(fl.FederatedStrategy(), 2)
    trainer.fit(plain, federated_blobs())
    assert torch.equal(weights(module), weights(plain))
    for name in ("val_loss", "val_acc"):
        assert asking.callback_metrics[name] == trainer.callback_metrics[name], "validation sees the new global model"
    after = fresh(norm=True)
    quiet_trainer(fl.FederatedStrategy(buffers="global"), 1).fit(after, federated_blobs())
    nn.utils.vector_to_parameters(flat(after), reference.parameters())  # the round's buffers were the initial ones
    assert strided.tolist() == pytest.approx([by_hand(reference, data, c) for c in range(6)], abs=1e-5)


def test_an_error_while_asking_again_leaves_the_global_weights():
    class Fragile(Classifier):
        def training_step(self, batch, batch_idx):
            if not self.training and not self.net[0].weight.any():
                raise RuntimeError("cannot evaluate zero")
            return super().training_step(batch, batch_idx)

    module = fresh(Fragile)
    start = weights(module)
    with pytest.raises(RuntimeError, match="cannot evaluate zero"):
        training_only(fl.FederatedStrategy(Requery()), 1).fit(module, federated_blobs())
    assert torch.equal(weights(module), start)
    assert module.training


class ManualWithLoss(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.asked = Tally()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss)

    def federated_loss(self, batch, batch_idx):
        assert not torch.is_grad_enabled()
        self.asked += 1
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize("algorithm", [FedLF, lambda: FedMDFG(gradient_source="update")])
def test_manual_optimization_with_a_federated_loss(algorithm):
    manual, automatic = fresh(ManualWithLoss), fresh()
    for module in (manual, automatic):
        strategy = fl.FederatedStrategy(algorithm(), clients_per_round=3)
        training_only(strategy, 2).fit(module, federated_blobs())
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

    module, rule = fresh(), Listening()
    training_only(fl.FederatedStrategy(rule, clients_per_round=3), 1).fit(module, federated_blobs())
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


@pytest.mark.parametrize(("rule", "value"), [(Spoiled, math.nan), (Spoiled, math.inf), (Open, -math.inf)])
def test_extras_that_are_not_finite_are_refused_like_updates(rule, value):
    data = federated_blobs()
    words = rf"what {rule.__name__} sends besides its update is not finite \(extras 'share'\)"
    with pytest.raises(fl.ClientError, match=rf"client 2 in round 0: {words}"):
        training_only(fl.FederatedStrategy(client=rule(value)), 1).fit(fresh(), data)
    strategy = fl.FederatedStrategy(Recorder(), client=rule(value), on_client_error="drop")
    with pytest.warns(UserWarning, match=f"client 2 is left out of round 0: {words}"):
        training_only(strategy, 1).fit(fresh(), data)
    assert strategy.last_round.client_ids == (0, 1, 3, 4, 5)
    assert strategy.algorithm.cohorts[0].extras["share"].isfinite().all()


def test_a_rule_says_which_extras_may_be_undefined():
    strategy = fl.FederatedStrategy(Recorder(), client=Open(math.nan))
    training_only(strategy, 1).fit(fresh(), federated_blobs())
    assert strategy.algorithm.cohorts[0].extras["share"].isnan().sum() == 1


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
    caplog.clear()
    with caplog.at_level(logging.INFO):
        training_only(fl.FederatedStrategy(clients_per_round=4, **options), 1).fit(module or fresh(), federated_blobs())
    lines = [record.message for record in caplog.records if "Memory beside the module" in record.message]
    assert len(lines) == 1
    parts = re.findall(r"([A-Za-z_][^,:]*?(?:\([^)]*\))?) ([\d,]+) B", lines[0].split("module: ")[1])
    return lines[0], {name: int(size.replace(",", "")) for name, size in parts}


@pytest.fixture
def caplog_of_lightning(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    return caplog


@pytest.mark.parametrize("name", PLANS)
def test_the_memory_plan_is_printed_in_bytes(name, caplog_of_lightning):
    make, extra = PLANS[name]
    line, parts = plan(caplog_of_lightning, algorithm=make())
    n = 140
    assert line.startswith("Federated fit on cpu, lean path.")
    assert parts["global parameters"] == 4 * n
    assert parts["parameters in training (per process)"] == 4 * (96 + 16 + 32 + 16)  # whole lines of 64 bytes
    assert parts[f"update matrix (4 x {n})"] == 4 * 4 * 144
    assert list(parts)[3:] == extra
    assert all(parts[key] > 0 for key in extra)
    if name == "SCAFFOLD":
        assert (parts["ControlVariates.c"], parts["ControlVariates.c_i"]) == (n * 4, 6 * n * 4)


def test_the_memory_plan_counts_all_that_is_asked_for(caplog_of_lightning):
    _, parts = plan(
        caplog_of_lightning, fresh(norm=True, momentum=0.9), algorithm=FedLF(), client=SCAFFOLD(),
        client_optimizer_state="keep", server_optimizer=functools.partial(torch.optim.SGD, lr=1.0),
    )  # fmt: skip
    n = 156
    assert parts["ControlVariates.c_i"] == 6 * n * 4
    assert parts["FedLF.history"] > 0
    assert parts["buffers (5 copies)"] == 5 * (8 * 4 + 8 * 4 + 8)
    assert parts["server optimizer (up to)"] == 2 * n * 4
    assert parts["copies to take a step back (up to)"] == 3 * n * 4
    assert parts["client optimizers (up to, 6 clients)"] == 2 * 6 * n * 4
