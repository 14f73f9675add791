# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from algorithm_cohorts import make_cohort, random_rows
from client_rounds import Net, Rounds, client_data, flat, work_of
from support import Manual, fresh

from fl_lightning.algorithms import EAGLE, Ditto, FedISM
from fl_lightning.core.layout import ParamLayout

RHO, ALPHA, LR = 0.3, 0.4, 0.1


def moved(net, gradient, length):
    """A copy at a distance along a gradient."""
    other = copy.deepcopy(net)
    norm = torch.cat([g.flatten() for g in gradient]).norm()
    with torch.no_grad():
        for p, g in zip(other.parameters(), gradient, strict=True):
            p += length * g / norm
    return other


def slopes(net, loss):
    return torch.autograd.grad(loss, list(net.parameters()))


def train(module, batches, epochs, alpha):
    """GSAM by deep copies, as in the authors' optimizer."""
    net = copy.deepcopy(module).train()
    for batch in batches * epochs:
        g = slopes(net, net.loss(batch))
        other = moved(net, g, RHO)
        h = slopes(other, other.loss(batch))
        old, new = (torch.cat([part.flatten() for part in each]) for each in (g, h))
        cosine = old @ new / (old.norm() * new.norm())
        new = new - alpha * (old - cosine * old.norm() * new / new.norm())
        with torch.no_grad():
            for p, part in zip(net.parameters(), new.split([p.numel() for p in net.parameters()]), strict=True):
                p -= LR * part.view_as(p)
    return net


def sharpness(module, batches):
    net = copy.deepcopy(module).eval()
    mean = lambda model: sum(len(b[1]) * model.loss(b) for b in batches) / sum(len(b[1]) for b in batches)  # noqa: E731
    loss = mean(net)
    return float((mean(moved(net, slopes(net, loss), RHO)) - loss).detach())


@pytest.mark.parametrize("alpha", [0.0, ALPHA])
def test_local_training_and_sharpness_equal_deep_copies(alpha):
    data = client_data(seed=6)
    data[2][0] = tuple(part[:2] for part in data[2][0])  # batches of unequal size
    server = FedISM(RHO, alpha)
    run = Rounds(server, server.client_rule(), data, lr=LR, epochs=2)
    for client in (0, 2):
        row, report, _, after = run.train(client)
        net = train(Net(), data[client], 2, alpha)
        torch.testing.assert_close(row, flat(Net()) - flat(net), rtol=0, atol=1e-9)
        assert float(report.extras["sharpness"]) == pytest.approx(sharpness(Net(), data[client]), rel=1e-9)
        for name, value in net.named_buffers():
            torch.testing.assert_close(after[name], value)


def corrected(batches):
    """The gradient of one step that takes these batches."""
    net = Net(norm=False)
    pairs = [(batch, len(batch[1])) for batch in batches]
    own_loss = lambda batch, index: net.loss(batch)  # noqa: E731
    work = work_of(net, 12, own_loss=own_loss, batches=lambda: iter(pairs), window=len(batches))
    rule = FedISM(RHO, ALPHA).client_rule()
    rule.begin_client(work)
    for index, batch in enumerate(batches):
        rule.begin_batch(work, batch, index)
        (net.loss(batch) / len(batches)).backward()
    rule.correct_gradients(work)
    return work.layout.flatten([parameter.grad for parameter in work.parameters])


def test_batches_of_one_step_count_as_one_batch():
    two = client_data(seed=9)[0][:2]
    joined = tuple(torch.cat(parts) for parts in zip(*two, strict=True))
    torch.testing.assert_close(corrected(two), corrected([joined]))


@pytest.mark.parametrize(("q", "beta"), [(1.0, 0.5), (2.0, 0.3), (3.0, 1.0)])
def test_weights_equal_the_authors_code(q, beta):
    generator, rule, last = torch.Generator().manual_seed(8), FedISM(q=q, beta=beta), None
    for when in range(5):
        sharp = torch.rand(4, generator=generator).double() - 0.1
        seen = sharp.clamp(min=1e-10)
        expected = (seen / seen.sum() + 1e-10) ** q
        expected = expected / expected.sum()
        last = expected if last is None else beta * expected + (1 - beta) * last
        rows = random_rows(4, when)
        step = rule.aggregate(make_cohort(rows, when=when, extras={"sharpness": sharp}))
        torch.testing.assert_close(rule.report.weights, last)
        torch.testing.assert_close(step, last @ rows)


def test_absent_and_new_clients():
    rule = FedISM(q=1.0)
    first = {"sharpness": torch.tensor([1.0, 3.0])}
    rule.aggregate(make_cohort(random_rows(2, 1), ids=[4, 5], extras=first))
    rule.aggregate(make_cohort(random_rows(2, 2), ids=[5, 6], when=1, extras={"sharpness": torch.tensor([1.0, 1.0])}))
    before = torch.tensor([0.75, 0.5]) / 1.25
    torch.testing.assert_close(rule.report.weights, (0.5 * torch.tensor([0.5, 0.5]) + 0.5 * before).double())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="extras must hold 'sharpness'"):
        FedISM().aggregate(make_cohort(random_rows(2, 1), extras={}))
    for told in ([1.0, torch.nan], [1.0, torch.inf], [[1.0], [2.0]]):
        with pytest.raises(
            ValueError, match=r"extras\['sharpness'\] must (be finite|have shape \[m\]) for FedISM, found"
        ):
            FedISM().aggregate(make_cohort(random_rows(2, 1), extras={"sharpness": torch.tensor(told)}))


@pytest.mark.parametrize("method", [FedISM, EAGLE, Ditto])
def test_modules_that_step_by_themselves_are_refused(method):
    module = fresh(Manual)
    with pytest.raises(ValueError, match=rf"{method.__name__} t.* Manual\.training_step.*, which optimizes manually"):
        method().client_rule().check_module(module, ParamLayout.from_module(module))
