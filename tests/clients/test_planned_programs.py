# SPDX-License-Identifier: Apache-2.0
"""A recorded loss that runs in memory that stays: the bits of autograd, step after step."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.clients.planned.plan import CannotPlanError, program_of


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
    """Beside them, a parameter whose gradient comes from a view of the same result, and one that adds nothing new.

    Gradients are changed in place, as client rules and clipping do.
    """
    generator = torch.Generator().manual_seed(3)
    w, x = nn.Parameter(torch.randn(6, 4, generator=generator)), torch.randn(6, 4, generator=generator)
    parameters = [w, nn.Parameter(torch.ones(24)), nn.Parameter(torch.zeros(6, 4))]

    def function(w, other, alike, x):
        return [EXPRESSIONS[name](w + alike + other.view(6, 4), x).sum() + alike.sum()]

    run = program_of(function, [*parameters, x], range(3))
    losses = []
    for step in range(3):
        x, state = x.roll(1, 0), torch.get_rng_state()
        with torch.no_grad():
            (loss,), gradients = run(*parameters, x)
        losses.append(loss)
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
    assert len({loss.data_ptr() for loss in losses}) == len(losses)  # nobody else's memory


def shared(*inputs):
    """A loss whose gradients PyTorch computes as one tensor and views of it, as ones, and as a transpose."""
    first, second, both, one, turned, x = inputs
    left, right = both.split(6)
    return [(x * (first + second.view(6)).cos() + left * right.sin()).sum() + one + (turned.t() * x.view(3, 2)).sum()]


def of_shared():
    sizes = ((6,), (2, 3), (12,), (), (2, 3))
    inputs = [*(nn.Parameter(torch.ones(size)) for size in sizes), torch.arange(6.0)]
    return program_of(shared, inputs, range(5)), inputs


def places(tensors):
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def test_whoever_changes_a_gradient_changes_no_other():
    run, inputs = of_shared()
    with torch.no_grad():
        right = [gradient.clone() for gradient in run(*inputs)[1]]
        gradients = run(*inputs)[1]
        for gradient in gradients:
            gradient.fill_(7.0)
        assert all(map(torch.equal, run(*inputs)[1], right))
    assert len(set(places(gradients))) == len(gradients) == 5
    assert all(gradient.is_contiguous() for gradient in gradients)


def test_a_gradient_that_no_run_computes_is_a_copy():
    fixed = torch.arange(3.0)

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(context, w):
            return w.sum()

        @staticmethod
        def backward(context, gradient):
            return fixed

    w = nn.Parameter(torch.ones(3))
    run = program_of(lambda w: [Given.apply(w)], [w], [0])
    with torch.no_grad():
        run(w)[1][0].fill_(7.0)
        assert run(w)[1][0].tolist() == fixed.tolist() == [0.0, 1.0, 2.0]


def test_gradients_stay_in_their_memory():
    w, x = nn.Parameter(torch.randn(3, 3)), torch.randn(5, 3)
    run, calls = program_of(lambda w, x: [torch.relu(x @ w).square().sum()], [w, x], [0]), []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        first = run(w, x)[1]
        with Counts():
            second = run(w, x)[1]
    assert places(first) == places(second)
    assert torch.equal(first[0], second[0])
    assert len(calls) <= 12  # views are made once, and are no calls


def test_a_recording_changes_nothing():
    w, counter, state = nn.Parameter(torch.ones(3)), torch.zeros(1), torch.get_rng_state()
    program_of(lambda w, counter: [(w * counter.add_(1) * torch.rand(3)).sum()], [w, counter], [0])
    assert counter.item() == 0
    assert torch.equal(torch.get_rng_state(), state)


REFUSED = {
    "depends on the values of tensors": lambda w: [w[w > 0].sum()],
    "its loss has no gradients": lambda w: [w.detach().sum()],
    "it keeps tensors with their graphs": lambda w: [w.sum(), w * 2],
    "moves a tensor in memory": lambda w: [(w * 2).unsqueeze_(0).sum()],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_repeated(reason):
    with pytest.raises(CannotPlanError, match=reason):
        program_of(REFUSED[reason], [nn.Parameter(torch.ones(3))], [0])


def test_inputs_without_gradients_have_none():
    w, spare = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    run = program_of(lambda w, spare: [w.square().sum()], [w, spare], [1, None, 0])
    with torch.no_grad():
        first, second, third = run(w, spare)[1]
    assert first is second is None
    assert third.tolist() == [2.0, 2.0, 2.0]
