# SPDX-License-Identifier: Apache-2.0
"""Every check finds what it is for, and says what to write instead."""

import importlib
import random
import re
import sys
from pathlib import Path

import pytest
import torch

import fl_lightning as fl
from fl_lightning.algorithms import ClientReport, ClientRule, Needs, ServerRule, StepReport, per_client, server_state


class Mean(ServerRule):
    """A good rule."""

    reads = "sums"

    def aggregate(self, cohort):
        weights = self.weights(cohort)
        self.report = StepReport(weights=weights)
        return fl.algorithms.weighted_mean(cohort, weights)

    def weights(self, cohort):
        return plain(cohort)


def plain(cohort):
    return torch.full((len(cohort),), 1 / len(cohort), dtype=torch.float64)


def after(change):
    """The mean, after a change to what a rule must leave alone."""
    return lambda rule, cohort: (change(rule, cohort), Mean.aggregate(rule, cohort))[1]


def viewing(rule, cohort):
    step = Mean.aggregate(rule, cohort) + sum(rule.last.get(k, 0.0) for k in cohort.client_ids)
    for k, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
        rule.last[k] = row
    return step


def remembering(rule, cohort):
    for k, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
        rule.last[k] = row.clone()


def counting(rule, cohort):
    rule.rounds += 1


def growing(rule, cohort):
    counting(rule, cohort)
    return rule.rounds * Mean.aggregate(rule, cohort)


def tilted(self, tilt=0.5):
    self._tilt = tilt


def begun(self):
    self.rounds = 0


FIRST = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("check", "words", "members"),
    [
        ("step", "must return a step like params, [92] of torch.float32, found [91] of torch.float32",
         {"aggregate": lambda rule, cohort: Mean.aggregate(rule, cohort)[:-1]}),
        ("step", "changes the rows, params, losses or sizes of its cohort: copy",
         {"aggregate": after(lambda rule, cohort: cohort.updates.rows.mul_(2))}),
        ("step", "changes the rows, params, losses or sizes of its cohort: copy",
         {"aggregate": after(lambda rule, cohort: cohort.known_losses.mul_(2))}),
        ("step", "draws from a generator that others share, or seeds it",
         {"aggregate": after(lambda rule, cohort: torch.manual_seed(cohort.round))}),
        ("step", "gives other steps once earlier rows are overwritten: keep copies, row.clone()",
         {"aggregate": viewing, "last": per_client(torch.Tensor)}),
        ("step", "must say reads = one of sums, gram, rows, found 'sum'", {"reads": "sum"}),
        ("order", "gives another step when the clients come in another order", {"weights": lambda rule, cohort: FIRST}),
        ("scaling", "does not scale", {"aggregate": lambda rule, c: Mean.aggregate(rule, c).clamp(-1e-3, 1e-3)}),
        ("zero rows", "changes its state in a round of zero rows",
         {"aggregate": after(counting), "rounds": server_state(0)}),
        ("not finite", "must raise a ValueError that names client 22, whose row holds nan",
         {"aggregate": lambda rule, cohort: cohort.updates.rows.nan_to_num(0, 0, 0).mean(0), "reads": "rows"}),
        ("needs", "asks for losses and does not say so in needs",
         {"weights": lambda rule, cohort: cohort.known_losses / cohort.known_losses.sum()}),
        ("needs", "must raise a ValueError that names losses where it is missing", {"needs": Needs(losses=True)}),
        ("report", "must report a weight per client",
         {"aggregate": lambda rule, cohort: cohort.updates.combine(plain(cohort))}),
        ("reads", "says reads = 'sums' and takes the rows (mean): say more",
         {"aggregate": lambda rule, cohort: cohort.updates.rows.mean(0)}),
        ("reads", "reads sums alone: say reads = 'sums'", {"reads": "gram"}),
        ("arguments", "must keep ['tilt'] in attributes of the same names", {"__init__": tilted}),
        ("checkpoint", "goes on from a checkpoint with other steps",
         {"__init__": begun, "aggregate": growing}),
        ("second fit", "remembers an earlier fit",
         {"__init__": begun, "aggregate": growing}),
        ("memory", "and plans for 0: say more in memory()",
         {"aggregate": after(remembering), "last": per_client(torch.Tensor), "memory": lambda rule, *about: {}}),
    ],
)  # fmt: skip
def test_a_bad_rule_is_found(check, words, members):
    rule = type("Bad", (Mean,), {"reads": "sums", **members})
    others = [name for name in fl.testing.SERVER_RULE_CHECKS if name != check]
    with pytest.raises(AssertionError) as found:
        fl.testing.check_server_rule(rule, skip=others)
    assert words in str(found.value)
    assert "Bad" in str(found.value)


def test_a_good_rule_passes_and_unknown_checks_are_named():
    fl.testing.check_server_rule(Mean)
    with pytest.raises(ValueError, match=r"skip must name checks of step, order, .*, found speed"):
        fl.testing.check_server_rule(Mean, skip=["speed"])


class Pull(ClientRule):
    """Draws a client towards where it ended last."""

    last = per_client(torch.Tensor, sent="owner")

    def correct_gradients(self, work):
        known = self.last.get(work.client_id)
        if known is not None:
            for parameter, view in zip(work.parameters, work.layout.views(known), strict=True):
                parameter.grad += 0.1 * (parameter.detach() - view)

    def end_client(self, work):
        flat = torch.cat([parameter.detach().flatten() for parameter in work.parameters])
        return ClientReport(extras={"ended": flat})

    def commit(self, cohort):
        for k, row in zip(cohort.client_ids, cohort.extras["ended"], strict=True):
            self.last[k] = row.to(cohort.params.dtype)


class Hidden(ClientRule):
    """Counts visits in an attribute that nobody hears of."""

    def __init__(self):
        self.visits = 0

    def correct_gradients(self, work):
        for parameter in work.parameters:
            parameter.grad *= 1 + 0.1 * self.visits

    def end_client(self, work):
        self.visits += 1
        return ClientReport()


class Dicing(ClientRule):
    def shape_loss(self, work, loss):
        return loss * random.SystemRandom().random()


def test_a_good_client_rule_passes():
    fl.testing.check_client_rule(Pull)
    fl.testing.check_client_rule(fl.algorithms.SCAFFOLD)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Dicing, "Dicing gives other weights repeated, by up to"),
        (Hidden, "Hidden gives other weights with the same object in a second fit"),
    ],
)
def test_a_bad_client_rule_is_found(rule, words):
    with pytest.raises(AssertionError, match=words):
        fl.testing.check_client_rule(rule)


def test_executors_of_the_library_pass():
    fl.testing.check_executor(fl.executors.Sequential)
    fl.testing.check_executor(lambda: fl.executors.Parallel(2))


class Halves(fl.data.Partition):
    """Two clients; each fault is planted by its name."""

    def __init__(self, fault=None):
        self.fault, self.calls = fault, 0

    def __repr__(self):
        return object.__repr__(self) if self.fault == "nameless" else f"Halves({self.fault!r})"

    def split(self, labels, seed):
        self.calls += 1
        n = len(labels)
        generator = None if self.fault == "global" else torch.Generator().manual_seed(seed)
        order = torch.randperm(n, generator=generator)
        order = order.roll(self.calls) if self.fault == "moving" else order
        if self.fault == "writing":
            labels.zero_()
        if self.fault == "seeding":
            random.seed(seed)
        if self.fault == "lossy":
            order = order[1:]
        if self.fault == "beyond":
            order = order + 1
        if self.fault == "below":
            order = order - 1
        count = 2 + (seed == 2 and self.fault == "growing")
        parts = list(order.chunk(count))
        if self.fault == "nobody":
            return []
        return [part.tolist() for part in parts] if self.fault == "lists" else parts


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("writing", "changes the labels"), ("global", "draws from a generator that others share"),
        ("seeding", "or seeds it"), ("below", "deals sample -1 of 600"), ("nobody", "must return a list with a vector"),
        ("lists", "must return an int64 vector per client, found list for client 0"),
        ("lossy", r"must deal every sample to one client, found sample \d+ with 0"),
        ("beyond", "deals sample 600 of 600"), ("moving", "divides otherwise the second time"),
        ("growing", "as many clients with every seed, found 2 and 3"), ("nameless", "needs a __repr__"),
    ],
)  # fmt: skip
def test_a_bad_partition_is_found(fault, words):
    with pytest.raises(AssertionError, match=words):
        fl.testing.check_partition(Halves(fault))


@pytest.mark.parametrize("partition", [Halves(), fl.data.IID(5), fl.data.Dirichlet(6, 0.5), fl.data.Shards(10, 2)])
def test_good_partitions_pass(partition):
    fl.testing.check_partition(partition)


def test_the_methods_of_the_page_pass(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "your_own_method.md").read_text(encoding="utf-8")
    *methods, tests = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_project.py").write_text("\n".join(methods), encoding="utf-8")
    (tmp_path / "its_tests.py").write_text(tests, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("its_tests").test_my_methods()
    for name in ("my_project", "its_tests"):
        sys.modules.pop(name)
