# SPDX-License-Identifier: Apache-2.0
"""A traced loss that runs in memory that stays: the bits of autograd, step after step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from planned_fits import OLD
from torch import nn
from torch.func import functional_call

from fl_lightning.training.planned.program import Register, program_of
from fl_lightning.training.planned.run import function_of
from fl_lightning.training.planned.trace import CannotPlanError, trace


class Tied(nn.Module):
    """An output layer that shares the weights of the input layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, x):
        return self.embedding(x).mean(1) @ self.embedding.weight.T


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.heads, self.out = (
            nn.LayerNorm(8),
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 5),
        )

    def forward(self, x):
        x = self.norm(x)
        return self.out(x + self.heads(x, x, x, need_weights=False)[0]).mean(1)


class Symmetric(nn.Module):
    """Reads a result and a view of it in one call, and never again."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 4), nn.Linear(4, 5)

    def forward(self, x):
        x = self.inner(x)
        return self.out(x + x.T)


class Shared(nn.Module):
    """Parameters whose gradients PyTorch computes as one tensor and views of it, and as tensors of ones."""

    def __init__(self):
        super().__init__()
        self.out, self.shift, self.one = nn.Linear(6, 5), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(1))
        self.first, self.second = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(2, 3))
        self.both, self.number = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        left, right = self.both.split(5)
        self.term = self.number + self.one.sum()
        return self.out(x * (self.first + self.second.view(6)).cos()) + self.shift + left * right.sin()


class Constant(nn.Module):
    """One parameter whose gradient is 1, whatever the batch."""

    def __init__(self):
        super().__init__()
        self.out, self.term = nn.Linear(6, 5), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.out(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRU(4, 7, batch_first=True), nn.Linear(7, 5)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


def _features(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


CASES = {
    "linear": (lambda: nn.Linear(6, 5), _features(4, 6)),
    "without bias": (lambda: nn.Linear(6, 5, bias=False), _features(4, 6)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 5)), _features(4, 6)
    ),
    "in place": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(inplace=True), nn.Linear(9, 5)), _features(4, 6)),
    "other activations": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5), nn.SiLU()),
        _features(4, 6),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 5)), _features(4, 6)),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 5)), _features(4, 6)
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.AvgPool2d(2),
            nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 5),
        ),
        _features(4, 2, 12, 12),
    ),
    "attention": (Attention, _features(4, 3, 8)),
    "symmetric": (Symmetric, _features(4, 6)),
    "shared": (Shared, _features(4, 6)),
    "constant": (Constant, _features(4, 6)),
    "recurrent": (Recurrent, _features(4, 3, 4)),
    "tied": (Tied, torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(1))),
}  # fmt: skip


class Loss(nn.Module):
    """Cross entropy, and what a network adds to it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        loss = F.cross_entropy(self.net(x), y)
        return loss + self.net.term if hasattr(self.net, "term") else loss


def prepared(case):
    """Two copies of a network with a loss, and a program for one of them."""
    build, x = CASES[case]
    torch.manual_seed(0)
    ours = build()
    torch.manual_seed(0)
    theirs = build()
    y = torch.randint(0, 5, (4,), generator=torch.Generator().manual_seed(2))
    parameters = dict(ours.named_parameters())
    buffers = dict(ours.named_buffers())
    names = [*parameters, *buffers]

    def function(*inputs):
        named = dict(zip(names, inputs, strict=False))
        return [functional_call(Loss(ours), {f"net.{name}": named[name] for name in named}, (inputs[-2], inputs[-1]))]

    batch = [x.clone(), y.clone()]
    inputs = [*parameters.values(), *buffers.values(), *batch]
    return ours, theirs, batch, trace(function, inputs), inputs


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


# GELU's variant with out= rounds otherwise there: fits compare the first step, and stay without a plan.
UNLIKE_OLD = {"other activations", "batch norm", "convolutions"}


unlike_old = pytest.mark.skip(reason="this PyTorch has no plan with the same bits for it")


@pytest.mark.parametrize("case", [pytest.param(c, marks=unlike_old) if OLD and c in UNLIKE_OLD else c for c in CASES])
def test_the_bits_of_autograd_over_steps_and_batches(case):
    """Gradients are changed in place, as client rules and clipping do."""
    ours, theirs, batch, traced, inputs = prepared(case)
    last = len(inputs) - 2
    run = function_of(program_of(traced, inputs, frozenset({last, last + 1})))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    parameters = list(ours.parameters())
    state, losses = torch.get_rng_state(), []
    for step in range(6):
        batch = [batch[0].roll(1, 0), batch[1].roll(2)]
        (loss,), gradients = run(*batch)
        losses.append(loss)
        trained = [inputs[place].data for place in traced.trained]
        torch._foreach_mul_(list(gradients), 0.5)
        torch._foreach_add_(trained, list(gradients), alpha=-0.1)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        optimizer.zero_grad()
        expected = Loss(theirs)(*batch)
        expected.backward()
        torch._foreach_mul_([parameter.grad for parameter in theirs.parameters()], 0.5)
        optimizer.step()
        assert torch.equal(loss, expected), step
        assert same(ours, theirs), step
        state = torch.get_rng_state()
        assert torch.equal(state, after), step
    assert len({loss.data_ptr() for loss in losses}) == len(losses)  # nobody else's memory
    assert len(parameters) == len(traced.trained)


def _cleared(w, x):
    w = w.clone()
    w[0] = 0
    return w.mul_(2).square()


EXPRESSIONS = {
    "a part": lambda w, x: w[1:3, ::2],
    "every second": lambda w, x: w.view(-1)[::2],
    "overlapping": lambda w, x: w.as_strided((3, 2), (1, 1)),
    "rows twice": lambda w, x: torch.stack([w[0], w[1], w[0]]).square(),
    "beside its transpose": lambda w, x: torch.cat([w, w.T.reshape(w.shape)]).square(),
    "in pieces": lambda w, x: w.chunk(2)[0] * w.chunk(2)[1],
    "row by row": lambda w, x: w.unbind(0)[0] * w.unbind(0)[1],
    "repeated": lambda w, x: w.expand(3, 6, 4) + w,
    "itself twice": lambda w, x: w + w,
    "transposed": lambda w, x: w.t().contiguous().view(-1) * torch.arange(24.0),
    "written over": _cleared,
    "sorted": lambda w, x: w.sort(0).values[0],
    "the largest": lambda w, x: w.max(1).values * w.flatten().topk(2).values.sum(),
    "summed up": lambda w, x: w.cumsum(0) + w.logsumexp(1)[:, None],
    "picked": lambda w, x: torch.where(w > 0, w, -w) + w.masked_fill(w < 0, 0.0),
    "gathered": lambda w, x: w.gather(0, (x > 0).long()),
    "scattered": lambda w, x: torch.zeros(4).scatter_add(0, (x[0] > 0).long(), w[0]).square(),
    "counted": lambda w, x: w[0] * torch.zeros(4).index_add_(0, (x[0] > 0).long(), torch.ones(4)),
    "in other precision": lambda w, x: (w.bfloat16() @ x.bfloat16().T).float() + w.double().square().sum().float(),
    "frequencies": lambda w, x: torch.fft.rfft(w).real.square(),
    "complex": lambda w, x: torch.view_as_complex(w[:, :2].contiguous()).abs(),
    "products": lambda w, x: torch.einsum("ij,kj->ik", w, w).square() + torch.linalg.matrix_norm(w, 2),
    "without gradients": lambda w, x: (w @ x.T) / w.detach().norm(),
    "noise": lambda w, x: w * torch.randn_like(w) + w * torch.randperm(4),
    "a number that is made": lambda w, x: w * torch.tensor(0.0).add_(x.sum()),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_the_bits_of_autograd_for_expressions(name):
    """Beside them, a parameter whose gradient comes from a view of the same result, and one that adds nothing new."""
    generator = torch.Generator().manual_seed(3)
    w, x = nn.Parameter(torch.randn(6, 4, generator=generator)), torch.randn(6, 4, generator=generator)
    other, alike = nn.Parameter(torch.ones(24)), nn.Parameter(torch.zeros(6, 4))
    parameters = [w, other, alike]

    def function(w, other, alike, x):
        return [EXPRESSIONS[name](w + alike + other.view(6, 4), x).sum() + alike.sum()]

    found = trace(function, [*parameters, x])
    run = function_of(program_of(found, [*parameters, x], frozenset({3})))
    for step in range(3):
        x, state = x.roll(1, 0), torch.get_rng_state()
        (loss,), gradients = run(x)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        (expected,) = function(*parameters, x)
        wanted = torch.autograd.grad(expected, parameters)
        assert torch.equal(torch.get_rng_state(), after)
        assert torch.equal(loss, expected), step
        for gradient, right in zip(gradients, wanted, strict=True):
            assert torch.equal(gradient, right), step
        for gradient in gradients:
            gradient.mul_(0.5)
        with torch.no_grad():
            torch._foreach_add_(parameters, list(gradients), alpha=-0.1)


def test_gradients_stay_in_their_memory_unless_they_have_to_be_fresh():
    *_, traced, inputs = prepared("mlp")
    run = function_of(program_of(traced, inputs))
    assert [g.data_ptr() for g in run()[1]] == [g.data_ptr() for g in run()[1]]
    program = program_of(traced, inputs, fresh_gradients=True)
    assert all(isinstance(gradient, Register) for gradient in program.gradients)
    run = function_of(program)
    first, second = run()[1], run()[1]
    assert not {g.data_ptr() for g in first} & {g.data_ptr() for g in second}
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("fresh", [False, True], ids=["kept memory", "fresh"])
@pytest.mark.parametrize("case", ["shared", "constant"])
def test_whoever_changes_a_gradient_changes_no_other(case, fresh):
    *_, traced, inputs = prepared(case)
    run = function_of(program_of(traced, inputs, fresh_gradients=fresh))
    run()
    gradients = run()[1]
    for gradient in gradients:
        gradient.fill_(7.0)
    ones = [gradient for gradient in run()[1] if gradient.numel() == 1]
    assert ones
    assert all(float(gradient) == 1 for gradient in ones)
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == len(gradients)


def test_most_of_a_small_network_allocates_nothing():
    """Whatever the loss itself takes: it is given away."""
    for case, made in (("linear", 1), ("mlp", 1)):
        *_, traced, inputs = prepared(case)
        assert sum(bool(call.results) for call in program_of(traced, inputs).calls) == made


@pytest.mark.parametrize("case", ["mlp", pytest.param("convolutions", marks=unlike_old) if OLD else "convolutions"])
def test_gradients_with_memory_of_their_own_are_not_copied(case):
    *_, traced, inputs = prepared(case)
    copies = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
    assert not any(call.op in copies for call in program_of(traced, inputs).calls)


def test_a_trace_changes_neither_parameters_nor_buffers():
    ours, theirs, *_ = prepared("batch norm")
    assert same(ours, theirs)


def traced(function, *inputs):
    return trace(function, [nn.Parameter(torch.ones(3)), *inputs])


def test_what_cannot_be_traced():
    with pytest.raises(CannotPlanError, match="depends on the values of tensors"):
        traced(lambda w: [w[w > 0].sum()])
    with pytest.raises(CannotPlanError, match="its loss has no gradients"):
        traced(lambda w: [w.detach().sum()])
    with pytest.raises(CannotPlanError, match="it keeps tensors with their graphs"):
        traced(lambda w: [w.sum(), w * 2])


def test_inputs_that_are_written_and_parameters_that_are_not_used():
    spare, counter = nn.Parameter(torch.ones(2)), torch.zeros(1)

    def function(w, spare, counter):
        counter.add_(1)
        return [(w * counter).sum()]

    found = traced(function, spare, counter)
    assert (found.trained, found.untouched, found.changed_inputs) == ((0,), (1,), (2,))
    assert counter.item() == 0
