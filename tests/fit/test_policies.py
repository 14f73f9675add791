# SPDX-License-Identifier: Apache-2.0
"""Clients that fail, or do not come: a clear error, or left out without a trace."""

import itertools
import math

import pytest
import torch
from cases import in_turn
from resuming import differences
from support import Classifier, blobs, fit, fresh, on_path, train, weights
from torch import nn
from watching import remembered

import fl_lightning as fl
from fl_lightning.data import AvailabilitySampler, CohortSampler, Selection

pytestmark = [
    pytest.mark.filterwarnings("ignore:client .* is left out of round"),
    pytest.mark.filterwarnings("ignore:round .* had no usable report"),
]

BAD = 2


class Fixed(CohortSampler):
    """Draws the listed clients in every round."""

    def __init__(self, *clients, gone=()):
        self.clients, self.gone = clients, gone

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return Selection(self.clients, self.gone)


class Troubled(Classifier):
    """Goes wrong in the batch with the marked sample, in one of several ways."""

    trouble = None

    def training_step(self, batch, batch_idx):
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


def module_of(trouble, base=Troubled, **options):
    module = fresh(base, **options)
    module.trouble = trouble
    return module


def chosen(*clients, **options):
    """Options of a fit in which these clients train, of whom one may meet its trouble."""
    return {"sampler": Fixed(*clients), "clients_per_round": 4, "data": marked(), **options}


TROUBLES = {
    "raises": r"ZeroDivisionError: no luck",
    "NaN loss": r"its update is not finite",
    "loss alone": r"its training loss is inf",
    "update": r"its update is not finite",
    "loss at theta": r"its loss at the global model is nan",
}
PATHS = [*((trouble, True) for trouble in TROUBLES), ("raises", False)]


@pytest.mark.parametrize(("trouble", "lean"), PATHS)
def test_raise_names_client_and_round_and_keeps_the_global_model(trouble, lean):
    method = fl.algorithms.FedLF if trouble == "loss at theta" else fl.algorithms.FedAvg
    alone = r"\(no client has succeeded, so look at the mod" if method is fl.algorithms.FedAvg else ""
    for clients, remedy in (((0, BAD, 4), r"\(on_client_error='drop' leaves such clients out\)"), ((BAD,), alone)):
        module = module_of(trouble)
        with pytest.raises(fl.ClientError, match=rf"^client 2 in round 0: {TROUBLES[trouble]}.*{remedy}") as error:
            train(module, 1, algorithm=method(), **chosen(*clients), **on_path(lean))
        assert torch.equal(weights(module), weights(fresh(Troubled)))
        assert module.trainer.strategy.last_round is None
    assert isinstance(error.value.__cause__, ZeroDivisionError) == (trouble == "raises")


RULES = {
    "FedAvg": fl.algorithms.FedAvg,
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
DROPPED = [("FedAvg", trouble, lean) for trouble, lean in PATHS if trouble != "loss at theta"]
DROPPED += in_turn(list(RULES)[1:], ("raises", "loss alone"), [True])
DROPPED += in_turn(ASKING, ["loss at theta"], [True])


@pytest.mark.parametrize(("name", "trouble", "lean"), DROPPED)
def test_drop_leaves_no_trace_counts_logs_and_warns(name, trouble, lean):
    options = {"on_client_error": "drop", "client_optimizer_state": "keep"}
    if RULES[name]().needs.full_gradients:
        del options["client_optimizer_state"]
    with pytest.warns(UserWarning, match=rf"client 2 is left out of round 1: {TROUBLES[trouble]}"):
        module, strategy, trainer = train(
            module_of(trouble, momentum=0.9, norm=True), algorithm=RULES[name](), **chosen(0, BAD, 3, 4, **options),
            **on_path(lean),
        )  # fmt: skip
    record = strategy.last_round
    assert (record.client_ids, list(record.dropped)) == ((0, 3, 4), [BAD])
    assert (trainer.callback_metrics["fed/dropped"], trainer.callback_metrics["fed/clients"]) == (1, 3)
    other, without, _ = train(
        module_of(None, momentum=0.9, norm=True), algorithm=RULES[name](), **chosen(0, 3, 4, **options)
    )
    assert torch.equal(weights(module), weights(other))
    assert not differences(remembered(strategy), remembered(without))
    for entry in ("train_loss", "layer_conflicts", "update_norms", "weights"):
        assert not differences(getattr(record, entry), getattr(without.last_round, entry))


def test_a_client_without_data():
    data = fl.FederatedDataModule(blobs(60), [list(range(30)), [], list(range(30, 60))], batch_size=10)
    with pytest.raises(fl.ClientError, match="client 1 in round 0: it has no training data"):
        train(rounds=1, data=data)
    for algorithm in (fl.algorithms.FedAvg(), fl.algorithms.FedLF(), fl.algorithms.SCAFFOLD()):
        with pytest.warns(UserWarning, match="client 1 is left out of round 0: it has no training data"):
            record = train(rounds=1, data=data, algorithm=algorithm, on_client_error="drop").strategy.last_round
        assert (record.client_ids, record.dropped) == ((0, 2), {1: "it has no training data"})


# ---- availability and drop-out

AVAILABLE = AvailabilitySampler(availability=[1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
GONE = {
    "drop-outs": (Fixed(0, 1, 3, 5, gone=(1, 5)), (0, 3), (1, 5)),  # who vanishes is not an error
    "fewer than places": (AVAILABLE, (0, 2, 5), ()),
    "nobody": (AvailabilitySampler(1e-9), (), ()),
}


@pytest.mark.parametrize("policy", ["raise", "drop"])
@pytest.mark.parametrize("name", GONE)
def test_who_does_not_come_is_recorded_and_leaves_no_trace(name, policy):
    sampler, came, gone = GONE[name]
    module, strategy, trainer = train(rounds=2, sampler=sampler, clients_per_round=5, on_client_error=policy)
    assert (strategy.last_round.client_ids, strategy.last_round.flagged) == (came, not came)
    assert strategy.last_round.dropped == dict.fromkeys(gone, "dropped out")
    assert (trainer.current_epoch, trainer.callback_metrics["fed/dropped"]) == (2, len(gone))
    expected = train(rounds=2, sampler=Fixed(*came)).module if came else fresh()
    assert torch.equal(weights(module), weights(expected))


@pytest.mark.parametrize(
    ("clients", "rule"),
    [
        ((0, 6), r"Fixed\.select must give at most 2 ids from 0 to 5, found \(0, 6\)"),
        ((0, 1, 2), r"Fixed\.select must give at most 2 ids from 0 to 5, found \(0, 1, 2\)"),
        ((-1, 2), r"client_ids\[0\] of Selection must be an integer from 0 on, found -1"),
    ],
)
def test_samplers_that_choose_nonsense_are_refused(clients, rule):
    with pytest.raises(ValueError, match=rule):
        train(rounds=1, sampler=Fixed(*clients), clients_per_round=2)


# ---- other exceptions


def test_an_exception_between_toggle_and_untoggle_freezes_nobody():
    steps = itertools.count(1)  # of all clients: an attribute would start anew in every visit

    class Adversarial(Classifier):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net[place].parameters(), lr=0.1) for place in (0, 2)]

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

    module, strategy, _ = train(fresh(Adversarial), 2, on_client_error="drop", clients_per_round=1.0)
    assert len(strategy.last_round.client_ids) == 6
    assert all(p.requires_grad for p in module.parameters())


def test_logging_and_validation_go_on_after_a_client_failed_on_the_full_path():
    class Logging(Troubled):
        def on_train_batch_end(self, outputs, batch, batch_idx):  # forces the full path
            self.log("seen", float(batch_idx))

    done = fit(module_of("raises", Logging, log=True), 2, **chosen(0, BAD, on_client_error="drop"))
    assert done.trainer.callback_metrics["train_loss"].isfinite()
    assert done.module._current_fx_name is None


@pytest.mark.parametrize("change", [lambda step: step * math.nan, lambda step: step[1:], lambda step: step[None]])
def test_a_server_rule_that_returns_nonsense_is_refused(change):
    class Wrong(fl.algorithms.FedAvg):
        def aggregate(self, cohort):
            return change(super().aggregate(cohort))

    module = fresh()
    with pytest.raises(RuntimeError, match=r"Wrong\.aggregate must return a finite step of shape \(140,\)"):
        train(module, 1, algorithm=Wrong())
    assert torch.equal(weights(module), weights(fresh()))
