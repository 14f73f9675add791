# SPDX-License-Identifier: Apache-2.0
"""Clients that fail: a clear error, or left out without a trace."""

import itertools
import math
import signal

import pytest
import torch
from cases import in_turn
from resuming import differences
from support import Classifier, blobs, federated_blobs, fresh, on_path, quiet_trainer, training_only, weights
from torch import nn

import fl_lightning as fl
from fl_lightning.data import AvailabilitySampler, CohortSampler, Selection

pytestmark = [
    pytest.mark.filterwarnings("ignore:client .* is left out of round"),
    pytest.mark.filterwarnings("ignore:round .* had no usable report"),
]

BAD = 2


class Fixed(CohortSampler):
    """Draws the listed clients in every round."""

    def __init__(self, *clients):
        self.clients = clients

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return Selection(self.clients)


class Troubled(Classifier):
    """Goes wrong in the batch with the marked sample, in one of several ways."""

    def __init__(self, trouble=None, **options):
        super().__init__(**options)
        self.trouble = trouble
        self.register_buffer("passed", torch.tensor(0.0))

    def training_step(self, batch, batch_idx):
        if self.training:
            self.passed += 1
        loss = super().training_step(batch, batch_idx)
        if (batch[0][:, 0] == 99.0).any():
            if self.trouble == "raises":
                raise ZeroDivisionError("no luck")
            if self.trouble == "NaN loss":
                return loss * math.nan
            if self.trouble == "loss alone":  # the gradient stays finite
                return loss + torch.tensor(math.inf)
            if self.trouble == "update":
                with torch.no_grad():
                    self.net[0].weight[0, 0] = math.inf
                return (loss * 0).nan_to_num(0.0)
            if self.trouble == "loss at theta" and not self.training:
                return loss * math.nan
        return loss


def marked():
    """Blobs of six clients; client 2 has one marked sample."""
    dataset = blobs(120)
    dataset.tensors[0][45, 0] = 99.0
    parts = [list(range(20 * k, 20 * k + 20)) for k in range(6)]
    return fl.FederatedDataModule(dataset, parts, batch_size=10)


def module_of(trouble, **options):
    module = fresh(Troubled, **options)
    module.trouble = trouble
    return module


TROUBLES = {
    "raises": r"ZeroDivisionError: no luck",
    "NaN loss": r"its update is not finite",
    "loss alone": r"its training loss is inf",
    "update": r"its update is not finite",
}
PATHS = [*((trouble, True) for trouble in TROUBLES), ("raises", False)]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_leaving_clients_out_is_offered_only_where_others_have_succeeded(trouble):
    strategy = fl.FederatedStrategy(sampler=Fixed(BAD), clients_per_round=1)
    with pytest.raises(fl.ClientError, match=r"^client 2 in round 0: .*\(no client has succeeded, so look at the mod"):
        training_only(strategy, 1).fit(module_of(trouble), marked())


@pytest.mark.parametrize(("trouble", "lean"), PATHS)
def test_raise_names_client_and_round_and_keeps_the_global_model(trouble, lean):
    module = module_of(trouble)
    strategy = fl.FederatedStrategy(sampler=Fixed(0, BAD, 4), clients_per_round=3)
    start = weights(module)
    with pytest.raises(fl.ClientError, match=rf"^client 2 in round 0: {TROUBLES[trouble]}") as error:
        training_only(strategy, 1, **on_path(lean)).fit(module, marked())
    assert torch.equal(weights(module), start)
    assert strategy.last_round is None
    if trouble == "raises":
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert "(on_client_error='drop' leaves such clients out)" in str(error.value)


def kept(strategy):
    """What methods, clients and optimizers remember."""
    return {name: state for name, state in strategy._fits.states().items() if name != "fit"}


@pytest.mark.parametrize(("trouble", "lean"), PATHS)
def test_drop_leaves_no_trace_counts_logs_and_warns(trouble, lean):
    options = {"clients_per_round": 4, "client_optimizer_state": "keep", "seed": 3}
    module = module_of(trouble, momentum=0.9, norm=True)
    strategy = fl.FederatedStrategy(sampler=Fixed(0, BAD, 3, 4), on_client_error="drop", **options)
    trainer = training_only(strategy, 2, **on_path(lean))
    with pytest.warns(UserWarning, match=rf"client 2 is left out of round 1: {TROUBLES[trouble]}"):
        trainer.fit(module, marked())
    record = strategy.last_round
    assert record.client_ids == (0, 3, 4)
    assert list(record.dropped) == [BAD]
    assert trainer.callback_metrics["fed/dropped"] == 1
    assert trainer.callback_metrics["fed/clients"] == 3
    assert len(record.update_norms) == len(record.weights) == 3

    other = module_of(None, momentum=0.9, norm=True)
    without = fl.FederatedStrategy(sampler=Fixed(0, 3, 4), **options)
    training_only(without, 2).fit(other, marked())
    assert torch.equal(weights(module), weights(other))
    assert not differences(kept(strategy), kept(without))
    expected = without.last_round
    assert record.train_loss == expected.train_loss
    assert record.layer_conflicts == expected.layer_conflicts
    assert torch.equal(record.update_norms, expected.update_norms)


RULES = {
    "FedProx": lambda: fl.algorithms.FedProx(0.1),
    "SCAFFOLD": fl.algorithms.SCAFFOLD,
    "FedMDFG": fl.algorithms.FedMDFG,
    "FedMDFG-update": lambda: fl.algorithms.FedMDFG(gradient_source="update"),
    "FedLF": fl.algorithms.FedLF,
    "FedHEAL": fl.algorithms.FedHEAL,
    "AFL": lambda: fl.algorithms.AFL(lambda_lr=0.1),
    "FedFa": fl.algorithms.FedFa,
}


ASKING = [name for name, rule in RULES.items() if rule().needs.losses]


@pytest.mark.parametrize(
    ("name", "trouble"), in_turn(RULES, ("raises", "loss alone")) + [(name, "loss at theta") for name in ASKING]
)
def test_drop_leaves_no_trace_in_any_rule(name, trouble):
    results = []
    for sampler, what in ((Fixed(0, BAD, 3, 4), trouble), (Fixed(0, 3, 4), None)):
        module = module_of(what)
        strategy = fl.FederatedStrategy(RULES[name](), sampler=sampler, clients_per_round=4, on_client_error="drop")
        training_only(strategy, 3).fit(module, marked())
        assert strategy.last_round.client_ids == (0, 3, 4)
        assert (list(strategy.last_round.dropped) == [BAD]) == (what is not None)
        results.append((weights(module), kept(strategy)))
    assert torch.equal(results[0][0], results[1][0])
    assert not differences(results[0][1], results[1][1])


def test_a_loss_at_the_global_model_that_is_not_finite():
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF())
    with pytest.raises(fl.ClientError, match="client 2 in round 0: its loss at the global model is nan"):
        training_only(strategy, 1).fit(module_of("loss at theta"), marked())


# ---- clients without data


def with_an_empty_client():
    parts = [list(range(30)), [], list(range(30, 60))]
    return fl.FederatedDataModule(blobs(60), parts, batch_size=10)


def test_a_client_without_data():
    with pytest.raises(fl.ClientError, match="client 1 in round 0: it has no training data"):
        training_only(fl.FederatedStrategy(), 1).fit(fresh(), with_an_empty_client())
    for algorithm in (fl.algorithms.FedAvg(), fl.algorithms.FedLF(), fl.algorithms.SCAFFOLD()):
        strategy = fl.FederatedStrategy(algorithm, on_client_error="drop")
        with pytest.warns(UserWarning, match="client 1 is left out of round 0: it has no training data"):
            training_only(strategy, 1).fit(fresh(), with_an_empty_client())
        assert strategy.last_round.dropped == {1: "it has no training data"}
        assert strategy.last_round.client_ids == (0, 2)


# ---- nobody is left


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        (fl.algorithms.FedAvg, lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)),
        (fl.algorithms.SCAFFOLD, None),
        (fl.algorithms.FedLF, None),
    ],
)
def test_a_round_without_reports_keeps_the_model_and_says_so(algorithm, optimizer, tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    module = module_of("raises", norm=True)
    strategy = fl.FederatedStrategy(
        algorithm(), sampler=Fixed(BAD), clients_per_round=1, on_client_error="drop", server_optimizer=optimizer
    )
    trainer = training_only(strategy, 2, logger=CSVLogger(tmp_path))
    start = weights(module)
    with pytest.warns(UserWarning, match="round 1 had no usable report: the global model is unchanged"):
        trainer.fit(module, marked())
    assert torch.equal(weights(module), start)
    record = strategy.last_round
    assert record.flagged
    assert record.client_ids == ()
    assert record.step_norm == 0
    assert list(record.dropped) == [BAD]
    assert trainer.current_epoch == 2
    lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    logged = [row for row in rows if row["fed/clients"]]
    assert [float(row["fed/clients"]) for row in logged] == [0, 0]
    assert [float(row["fed/flagged"]) for row in logged] == [1, 1]
    assert [float(row["fed/dropped"]) for row in logged] == [1, 1]


# ---- availability and drop-out


def test_drop_outs_are_recorded_and_leave_no_trace():
    class Half(CohortSampler):
        def select(self, round, cohort_size, sizes, seed):  # noqa: A002
            return Selection((0, 1, 3, 5), drop_outs=(1, 5))

    for policy in ("raise", "drop"):  # who vanishes is not an error
        module, strategy = fresh(), fl.FederatedStrategy(sampler=Half(), clients_per_round=4, on_client_error=policy)
        trainer = training_only(strategy, 2)
        trainer.fit(module, federated_blobs())
        assert strategy.last_round.dropped == {1: "dropped out", 5: "dropped out"}
        assert trainer.callback_metrics["fed/dropped"] == 2
        other = fresh()
        training_only(fl.FederatedStrategy(sampler=Fixed(0, 3), clients_per_round=2), 2).fit(other, federated_blobs())
        assert torch.equal(weights(module), weights(other))


def test_fewer_clients_than_places():
    sampler = AvailabilitySampler(availability=[1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    module, strategy = fresh(), fl.FederatedStrategy(sampler=sampler, clients_per_round=5)
    trainer = training_only(strategy, 2)
    trainer.fit(module, federated_blobs())
    assert strategy.last_round.client_ids == (0, 2, 5)
    assert not strategy.last_round.dropped
    assert trainer.current_epoch == 2
    other = fresh()
    training_only(fl.FederatedStrategy(sampler=Fixed(0, 2, 5), clients_per_round=3), 2).fit(other, federated_blobs())
    assert torch.equal(weights(module), weights(other))


def test_nobody_is_available():
    module, strategy = fresh(), fl.FederatedStrategy(sampler=AvailabilitySampler(1e-9), clients_per_round=3)
    start = weights(module)
    trainer = training_only(strategy, 2)
    with pytest.warns(UserWarning, match="round 0 had no usable report"):
        trainer.fit(module, federated_blobs())
    assert torch.equal(weights(module), start)
    assert strategy.last_round.client_ids == ()
    assert strategy.last_round.flagged
    assert trainer.callback_metrics["fed/dropped"] == 0


@pytest.mark.parametrize(
    ("clients", "rule"),
    [
        ((0, 6), r"Fixed\.select must give at most 2 ids from 0 to 5, found \(0, 6\)"),
        ((0, 1, 2), r"Fixed\.select must give at most 2 ids from 0 to 5, found \(0, 1, 2\)"),
        ((-1, 2), r"client_ids\[0\] of Selection must be an integer from 0 on, found -1"),
    ],
)
def test_samplers_that_choose_nonsense_are_refused(clients, rule):
    strategy = fl.FederatedStrategy(sampler=Fixed(*clients), clients_per_round=2)
    with pytest.raises(ValueError, match=rule):
        training_only(strategy, 1).fit(fresh(), federated_blobs())


# ---- other exceptions


@pytest.fixture
def interruptible():
    """Lightning ignores further interrupts once it has seen one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("policy", ["raise", "drop"])
@pytest.mark.usefixtures("interruptible")
def test_keyboard_interrupt_leaves_the_global_weights(policy):
    class Interrupted(Classifier):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 1 and batch_idx == 1:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    module, after_one = fresh(Interrupted), fresh()
    options = {"clients_per_round": 3, "seed": 2}
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        training_only(fl.FederatedStrategy(on_client_error=policy, **options), 3).fit(module, federated_blobs())
    training_only(fl.FederatedStrategy(**options), 1).fit(after_one, federated_blobs())
    assert torch.equal(weights(module), weights(after_one))


def test_an_exception_between_toggle_and_untoggle_freezes_nobody():
    steps = itertools.count(1)  # of all clients: an attribute would start anew in every visit

    class Adversarial(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return [
                torch.optim.SGD(self.net[0].parameters(), lr=0.1),
                torch.optim.SGD(self.net[2].parameters(), lr=0.1),
            ]

        def training_step(self, batch, batch_idx):
            step = next(steps)
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                if step == 3:
                    raise RuntimeError("in the middle")
                optimizer.zero_grad()
                self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    module = fresh(Adversarial)
    strategy = fl.FederatedStrategy(on_client_error="drop")
    training_only(strategy, 2).fit(module, federated_blobs())
    assert strategy.last_round.round == 1
    assert len(strategy.last_round.client_ids) == 6
    assert all(p.requires_grad for p in module.parameters())
    clean = fresh(Adversarial)
    training_only(fl.FederatedStrategy(), 1).fit(clean, federated_blobs())
    assert not torch.equal(weights(clean), weights(module))


def test_logging_and_validation_go_on_after_a_client_failed_on_the_full_path():
    class Logging(Troubled):
        def on_train_batch_end(self, outputs, batch, batch_idx):  # forces the full path
            self.log("seen", float(batch_idx))

    module = fresh(Logging, log=True)
    module.trouble = "raises"
    data = marked()
    strategy = fl.FederatedStrategy(sampler=Fixed(0, BAD), clients_per_round=2, on_client_error="drop")
    trainer = quiet_trainer(strategy, 2)
    trainer.fit(module, data)
    assert trainer.callback_metrics["train_loss"].isfinite()
    assert module._current_fx_name is None


def test_a_server_rule_that_returns_nonsense_is_refused():
    class Wrong(fl.algorithms.FedAvg):
        def __init__(self, what):
            super().__init__()
            self.what = what

        def aggregate(self, cohort):
            step = super().aggregate(cohort)
            return {"nan": step * math.nan, "short": step[1:], "matrix": step[None]}[self.what]

    for what in ("nan", "short", "matrix"):
        module = fresh()
        start = weights(module)
        with pytest.raises(RuntimeError, match=r"Wrong\.aggregate must return a finite step of shape \(140,\)"):
            training_only(fl.FederatedStrategy(Wrong(what)), 1).fit(module, federated_blobs())
        assert torch.equal(weights(module), start)
