# SPDX-License-Identifier: Apache-2.0
"""What a fit under budgets says of the disparities themselves, and scores that are no logits."""

import logging
from functools import partial

import lightning as L
import pytest
import torch
from support import fresh, weights
from test_fcfl_fit import Loans, data, fit_loans, table

from fl_lightning.algorithms import FCFL, FairReg
from fl_lightning.core.errors import ClientError

pytestmark = pytest.mark.fit

BUDGETS = (0.0, 0.02, 0.4)


class Probable(Loans):
    """Returns probabilities, in a way of its own."""

    to_probability = staticmethod(torch.sigmoid)

    def federated_groups(self, batch):
        scores, labels, groups = super().federated_groups(batch)
        return self.to_probability(scores), labels, groups


class Softmaxed(Probable):
    @staticmethod
    def to_probability(z):
        return torch.stack([torch.zeros_like(z), z], 1).softmax(1)[:, 1].clamp(1e-6, 1 - 1e-6)


class ByHand(Probable):
    """Nothing that the last operation says of its result."""

    @staticmethod
    def to_probability(z):
        return 1 / (1 + torch.exp(-z))


@pytest.mark.parametrize("policy", ["raise", "drop"])
@pytest.mark.parametrize("rule", [lambda: FCFL(0.05), FairReg], ids=["FCFL", "FairReg"])
@pytest.mark.parametrize("kind", [Probable, Softmaxed])
def test_probabilities_are_refused_and_dropping_clients_is_no_advice(kind, rule, policy):
    module = fresh(kind)
    with pytest.raises(
        ClientError, match=r"client 0 in round 0: .*\(logits\), found what a (sigmoid|softmax) re"
    ) as told:
        fit_loans(rule(), module=module, on_client_error=policy)
    assert "it is the module's fault" in str(told.value)
    assert "on_client_error" not in str(told.value)
    assert torch.equal(weights(module), weights(fresh(kind)))


def test_labels_that_are_no_labels_of_the_first_client_may_be_everybodys():
    class Third(Loans):
        def federated_groups(self, batch):
            scores, labels, groups = super().federated_groups(batch)
            return scores, labels + 1, groups

    with pytest.raises(
        ClientError, match=r"labels of .*must be 0 or 1.*no client has succeeded, so look at the module"
    ):
        fit_loans(FCFL(0.05), module=fresh(Third))


def test_scores_that_are_never_negative_are_noticed_in_the_end():
    with pytest.warns(UserWarning, match="never returned a negative score, so class 1 was predicted for every sample"):
        fit_loans(FCFL(0.05), module=fresh(ByHand))


class ThreeGroups(Loans):
    def federated_groups(self, batch):
        scores, labels, groups = super().federated_groups(batch)
        return scores, labels, three(batch[0], groups)


def three(x, groups):
    return groups + (x[:, 1] > 0)


def disparities(module, notion="dp"):
    """Surrogate and true disparity of every client."""
    x, y, a, parts = table()
    a = three(x, a) if isinstance(module, ThreeGroups) else a
    found = []
    for part in parts:
        z, groups = module.net(x[part]).squeeze(1).detach().double(), a[part]
        counted = torch.ones_like(groups) if notion == "dp" else y[part]
        rates = [
            [u[(groups == g) & (counted == 1)].mean() for g in a.unique()]
            for u in (torch.sigmoid(10 * z), (z > 0).double())
        ]
        found.append([float(max(each) - min(each)) for each in rates])
    return found


@pytest.mark.parametrize(("notion", "rounds", "kind"), [("dp", 3, Loans), ("eo", 2, Loans), ("dp", 3, ThreeGroups)])
def test_a_fit_ends_with_a_line_about_its_budgets(caplog, notion, rounds, kind):
    budgeted = partial(FCFL, BUDGETS, notion, num_groups=2 + (kind is ThreeGroups))
    before = fit_loans(budgeted(), rounds - 1, fresh(kind)).module
    caplog.clear()
    expected = disparities(before, notion)
    with (
        caplog.at_level(logging.INFO, "lightning.pytorch"),
        pytest.warns(UserWarning, match="FCFL ended above its budg"),
    ):
        trainer = fit_loans(budgeted(), rounds, fresh(kind)).trainer
    (line,) = [record.message for record in caplog.records if "true disparity" in record.message]
    assert f"FCFL: budget, surrogate and true disparity ({notion}) on the training data" in line
    for client, (surrogate, true) in enumerate(expected):
        assert f"client {client}: {BUDGETS[client]:g}, {surrogate:.4f}, {true:.4f}" in line
    excess = max(true - budget for (_, true), budget in zip(expected, BUDGETS, strict=True))
    assert float(trainer.callback_metrics["fed/true_excess"]) == pytest.approx(excess, abs=1e-6)


def test_no_warning_where_budgets_are_kept_and_no_line_without_budgets(caplog, recwarn):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        fit_loans(FCFL(1.0), 2)
        assert sum("true disparity" in record.message for record in caplog.records) == 1
        fit_loans(FCFL(None), 2)
    assert sum("true disparity" in record.message for record in caplog.records) == 1
    assert not [warning for warning in recwarn if "above its budget" in str(warning.message)]


class SaveAfter(L.Callback):
    def __init__(self, path, rounds):
        self.path, self.rounds = path, rounds

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.rounds - 1:
            trainer.save_checkpoint(self.path)


def test_the_line_of_a_resumed_fit_has_the_clients_of_before(tmp_path, caplog):
    """One client per round: most of those in the line took part before the fit was interrupted."""
    options = {"data": data(), "clients_per_round": 1, "on_client_error": "raise"}
    lines = []
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        for more in ({"callbacks": [SaveAfter(tmp_path / "r.ckpt", 5)]}, {"ckpt_path": tmp_path / "r.ckpt"}):
            caplog.clear()
            fit_loans(FCFL(1.0), 6, **options, **more)
            lines += [record.message for record in caplog.records if "true disparity" in record.message]
    assert lines[0] == lines[1]
    assert lines[0].count("client ") >= 2
