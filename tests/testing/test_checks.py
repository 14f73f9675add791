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
        return torch.full((len(cohort),), 1 / len(cohort), dtype=torch.float64)


class Half(Mean):
    def aggregate(self, cohort):
        return super().aggregate(cohort)[:-1]

    reads = "sums"


class Writing(Mean):
    def aggregate(self, cohort):
        cohort.updates.rows.mul_(2)
        return super().aggregate(cohort)


class Scaling(Mean):
    def aggregate(self, cohort):
        cohort.known_losses.mul_(2)
        return super().aggregate(cohort)


class Seeding(Mean):
    def weights(self, cohort):
        torch.manual_seed(cohort.round)
        return super().weights(cohort)


class Viewing(Mean):
    last = per_client(torch.Tensor)

    def aggregate(self, cohort):
        step = super().aggregate(cohort) + sum(self.last.get(k, 0.0) for k in cohort.client_ids)
        for k, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
            self.last[k] = row
        return step


class Misspelt(Mean):
    reads = "sum"


class FirstMost(Mean):
    def weights(self, cohort):
        return torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)


class Clipped(Mean):
    reads = "sums"

    def aggregate(self, cohort):
        return super().aggregate(cohort).clamp(-1e-3, 1e-3)


class Counting(Mean):
    seen = server_state(0)

    def weights(self, cohort):
        self.seen += 1
        return super().weights(cohort)


class Deaf(Mean):
    def aggregate(self, cohort):
        return cohort.updates.rows.nan_to_num(0, 0, 0).mean(0)


class Asking(Mean):
    def weights(self, cohort):
        return cohort.known_losses / cohort.known_losses.sum()


class Modest(Mean):
    needs = Needs(losses=True)


class Silent(Mean):
    reads = "sums"

    def aggregate(self, cohort):
        return cohort.updates.combine(self.weights(cohort))


class Greedy(Mean):
    reads = "sums"

    def aggregate(self, cohort):
        super().aggregate(cohort)
        return cohort.updates.rows.mean(0)


class Shy(Mean):
    reads = "gram"


class Forgetting(Mean):
    def __init__(self, tilt=0.5):
        self._tilt = tilt


class Remembering(Mean):
    def __init__(self):
        self.rounds = 0

    def weights(self, cohort):
        self.rounds += 1
        return super().weights(cohort) * self.rounds


class Large(Mean):
    history = per_client(torch.Tensor)

    def weights(self, cohort):
        for k, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
            self.history[k] = row.clone()
        return super().weights(cohort)

    def memory(self, federation, cohort_size):
        return {}


@pytest.mark.parametrize(
    ("rule", "check", "words"),
    [
        (Half, "step", "must return a step like params, [92] of torch.float32, found [91] of torch.float32"),
        (Writing, "step", "changes the rows, params, losses or sizes of its cohort: copy"),
        (Scaling, "step", "changes the rows, params, losses or sizes of its cohort: copy"),
        (Seeding, "step", "draws from a generator that others share, or seeds it"),
        (Viewing, "step", "gives other steps once earlier rows are overwritten: keep copies, row.clone()"),
        (Misspelt, "step", "must say reads = one of sums, gram, rows, found 'sum'"),
        (FirstMost, "order", "gives another step when the clients come in another order"),
        (Clipped, "scaling", "does not scale"),
        (Counting, "zero rows", "changes its state in a round of zero rows"),
        (Deaf, "not finite", "must raise a ValueError that names client 22, whose row holds nan"),
        (Asking, "needs", "asks for losses and does not say so in needs"),
        (Modest, "needs", "must raise a ValueError that names losses where it is missing"),
        (Silent, "report", "must report a weight per client"),
        (Greedy, "reads", "says reads = 'sums' and takes the rows (mean): say more"),
        (Shy, "reads", "reads sums alone: say reads = 'sums'"),
        (Forgetting, "arguments", "must keep ['tilt'] in attributes of the same names"),
        (Remembering, "checkpoint", "goes on from a checkpoint with other steps"),
        (Remembering, "second fit", "remembers an earlier fit"),
        (Large, "memory", "and plans for 0: say more in memory()"),
    ],
)
def test_a_bad_rule_is_found(rule, check, words):
    others = [name for name in fl.testing.SERVER_RULE_CHECKS if name != check]
    with pytest.raises(AssertionError) as found:
        fl.testing.check_server_rule(rule, skip=others)
    assert words in str(found.value)
    assert rule.__name__ in str(found.value)


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
