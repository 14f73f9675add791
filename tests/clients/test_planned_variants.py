# SPDX-License-Identifier: Apache-2.0
"""What people compute in ``training_step``: from plans with PyTorch's bits, or refused by name."""

import random
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning.clients.local_training import EagerGradients, FastSGD
from fl_lightning.clients.planned.planned_gradients import PlannedGradients
from fl_lightning.lightning.batches import loss_of

SIZE, CLASSES, STEPS = 6, 5, 7


def classes(y):
    return (y[:, None] == torch.arange(CLASSES)).float()


def regression(function, target=torch.tanh):
    return lambda module, x, y: function(module.net(x), target(x[:, :CLASSES]))


def one_hot(function):
    return lambda module, x, y: function(module.net(x), classes(y))


def of_classes(function):
    return lambda module, x, y: function(module.net(x), y)


def net(*layers):
    """A step of cross entropy, through layers of some kind."""

    def step(module, x, y):
        return F.cross_entropy(module.net(x), y)

    step.layers = layers
    return step


def mlp(activation, *more):
    return net(lambda: nn.Linear(SIZE, 9), activation, *more, lambda: nn.Linear(9, CLASSES))


def contrast(module, x, y):
    z = F.normalize(module.net(x + 0.1 * torch.randn_like(x)))
    other = F.normalize(module.net(x + 0.1 * torch.randn_like(x)))
    return F.cross_entropy(z @ other.T / 0.5, torch.arange(len(x)))


def penalised(module, x, y):
    return F.cross_entropy(module.net(x), y) + 1e-2 * sum(p.square().sum() for p in module.parameters())


def mixed_up(module, x, y):
    order, share = torch.randperm(len(x)), torch.rand(())
    out = module.net(share * x + (1 - share) * x[order])
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])


def distilled(module, x, y):
    with torch.no_grad():
        wanted = module.frozen(x).softmax(1)
    return F.kl_div(F.log_softmax(module.net(x), 1), wanted, reduction="batchmean")


def followed(module, x, y):
    """A copy of the weights that follows them, in buffers."""
    loss = F.cross_entropy(module.net(x), y)
    with torch.no_grad():
        module.mean.mul_(0.9).add_(module.net[0].weight.mean(), alpha=0.1)
    return loss + module.mean * module.net[0].weight.sum()


def queued(module, x, y):
    """A memory bank under a pointer, both buffers."""
    z = module.net(x)
    loss = F.cross_entropy(z @ module.bank.clone().T, y)
    module.bank.copy_(torch.cat([z.detach()[:3], module.bank[:-3]]))
    return loss


def variational(module, x, y):
    mean, log = module.net(x)[:, :2], module.net(x)[:, 2:4]
    z = mean + torch.randn_like(mean) * (0.5 * log).exp()
    told = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
    return F.mse_loss(module.decoder(z), x) + 1e-3 * told


def kept_outputs(module, x, y):
    out = module.net(x)
    module.last = out.detach()
    return {"loss": F.cross_entropy(out, y), "out": out}


def annealed(module, x, y):
    return module.temperature * F.cross_entropy(module.net(x), y)


def from_random(module, x, y):
    return random.uniform(0.5, 1.5) * F.cross_entropy(module.net(x), y)


def from_numpy(module, x, y):
    return float(np.random.uniform(0.5, 1.5)) * F.cross_entropy(module.net(x), y)


def logged(module, x, y):
    loss = F.cross_entropy(module.net(x), y)
    module.log("loss", loss)
    module.log("twice", 2 * loss, prog_bar=True)
    module.log("size", len(x))
    return loss.mul_(0.5)


def skipped(module, x, y):
    return None


def autocast(module, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(module.net(x), y)


def in_parts(module, x, y):
    """Only some parameters are used, and one twice."""
    hidden = module.net[0](x)
    return (hidden @ module.net[0].weight).square().mean()


def nothing_of_the_batch(module, x, y):
    return sum(p.square().sum() for p in module.parameters()) + module.one


def weighted(module, x, y):
    return F.cross_entropy(module.net(x), y, weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))


def item(module, x, y):
    loss = F.cross_entropy(module.net(x), y)
    return loss * (2.0 if loss.item() > 1 else 1.0)


def branch(module, x, y):
    loss = F.cross_entropy(module.net(x), y)
    return loss * 2 if loss > 1 else loss


def picked(module, x, y):
    out = module.net(x)
    return out[out > 0].sum()


def graph_kept(module, x, y):
    out = module.net(x)
    module.last = out
    return F.cross_entropy(out, y)


def prints(module, x, y):
    print("a step")
    return F.cross_entropy(module.net(x), y)


def turned(module, x, y):
    module.bank.t_()
    return F.cross_entropy(module.net(x), y)


def moved(module, x, y):
    module.mean.data = module.mean.data + 1
    return F.cross_entropy(module.net(x), y) * module.mean


def foreign(module, x, y):
    return (F.cross_entropy(module.net(x), y) * module.outside).sum()


def sparse(module, x, y):
    return F.embedding(y, module.table, sparse=True).square().sum()


def logged_item(module, x, y):
    loss = F.cross_entropy(module.net(x), y)
    module.log("loss", loss.item())
    return loss


def counted(module, x, y):
    module.count += 1
    return F.cross_entropy(module.net(x), y) * module.count


PLANNED = {
    "cross entropy": of_classes(F.cross_entropy),
    "weighted classes": weighted,
    "focal": lambda m, x, y: ((1 - (c := F.cross_entropy(m.net(x), y, reduction="none")).neg().exp()) ** 2 * c).mean(),
    "mse": regression(F.mse_loss),
    "huber": regression(lambda a, b: F.huber_loss(a, b, delta=0.3)),
    "smooth l1": regression(F.smooth_l1_loss),
    "bce with logits": one_hot(F.binary_cross_entropy_with_logits),
    "soft margin": one_hot(lambda scores, wanted: F.soft_margin_loss(scores, 2 * wanted - 1)),
    "multi margin": of_classes(F.multi_margin_loss),
    "triplet": lambda m, x, y: F.triplet_margin_loss(m.net(x), m.net(x.roll(1, 0)), m.net(x.flip(0))),
    "kl": lambda m, x, y: F.kl_div(F.log_softmax(m.net(x), 1), x[:, :CLASSES].softmax(1), reduction="batchmean"),
    "relu in place": mlp(lambda: nn.ReLU(inplace=True)),
    "gelu": mlp(nn.GELU),
    "prelu": mlp(nn.PReLU),
    "dropout": mlp(nn.ReLU, lambda: nn.Dropout(0.4)),
    "layer norm": mlp(lambda: nn.LayerNorm(9), nn.ReLU),
    "batch norm": mlp(lambda: nn.BatchNorm1d(9), nn.ReLU),
    "without bias": net(lambda: nn.Linear(SIZE, CLASSES, bias=False)),
    "convolutions": net(
        lambda: nn.Unflatten(1, (1, SIZE)), lambda: nn.Conv1d(1, 3, 3), lambda: nn.BatchNorm1d(3), nn.ReLU,
        lambda: nn.MaxPool1d(2), nn.Flatten, lambda: nn.Linear(6, CLASSES),
    ),
    "attention": net(
        lambda: nn.Unflatten(1, (3, 2)), lambda: nn.TransformerEncoderLayer(2, 1, 4, batch_first=True), nn.Flatten,
        lambda: nn.Linear(SIZE, CLASSES),
    ),
    "contrast": contrast,
    "penalty": penalised,
    "mixed up": mixed_up,
    "distilled": distilled,
    "a mean that follows": followed,
    "a memory bank": queued,
    "variational": variational,
    "kept outputs": kept_outputs,
    "annealed": annealed,
    "logged": logged,
    "skipped": skipped,
    "autocast": autocast,
    "some parameters": in_parts,
    "no batch": nothing_of_the_batch,
    "sorted": lambda m, x, y: m.net(x).sort(1).values[:, 0].sum() + m.net(x).topk(2).values.sum(),
    "row by row": lambda m, x, y: sum(row.square().sum() for row in m.net(x)),
    "gathered": lambda m, x, y: -m.net(x).log_softmax(1).gather(1, y[:, None]).mean(),
    "noise on weights": lambda m, x, y: F.cross_entropy(F.linear(x, m.net[0].weight + torch.randn(CLASSES, SIZE)), y),
    "spectral": lambda m, x, y: torch.fft.rfft(m.net(x)).abs().sum(),
    "matrix norm": lambda m, x, y: torch.linalg.matrix_norm(m.net(x)) + torch.einsum("ij,kj->", m.net(x), m.net(x)),
    "double": lambda m, x, y: m.net(x).double().square().sum().float(),
    "counted in batches": lambda m, x, y: m.net(x).square().mean() * (1 + m.steps.add_(1) * 0.1),
}  # fmt: skip
REFUSED = {
    "item": (item, "TorchDynamo cannot follow"),
    "logged item": (logged_item, "_local_scalar_dense"),
    "branch": (branch, "TorchDynamo cannot follow"),
    "picked": (picked, ""),
    "with a graph": (graph_kept, "keeps tensors with their graphs"),
    "prints": (prints, "TorchDynamo cannot follow"),
    "turned": (turned, "TorchDynamo cannot follow"),
    "moved": (moved, ""),
    "foreign": (foreign, "that no optimizer holds"),
    "sparse gradients": (sparse, "sparse"),
    "one hot": (lambda m, x, y: F.mse_loss(m.net(x), F.one_hot(y, CLASSES).float()), "_local_scalar_dense"),
    "random numbers of Python": (from_random, "a tensor of a number"),
    "random numbers of NumPy": (from_numpy, ""),
    "a number of NumPy": (lambda m, x, y: F.cross_entropy(m.net(x), y) * m.double, ""),
    "counted": (counted, "too often"),
}


class Module(LightningModule):
    """A network, and what some of the steps keep beside it."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        layers = getattr(step, "layers", (lambda: nn.Linear(SIZE, CLASSES),))
        self.net = nn.Sequential(*(layer() for layer in layers))
        self.decoder, self.frozen = nn.Linear(2, SIZE), nn.Linear(SIZE, CLASSES).requires_grad_(False)
        self.table, self.one = nn.Parameter(torch.randn(CLASSES, 3)), nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("bank", torch.randn(CLASSES, CLASSES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.step, self.temperature, self.count = step, 1.0, 0
        self.last = None
        self.outside = torch.ones((), requires_grad=True)
        self.heard, self.double = [], np.float64(0.3)

    def log(self, name, value, **options):
        self.heard.append((name, float(torch.as_tensor(value).detach()), options))

    def training_step(self, batch, batch_idx):
        return self.step(self, *batch)


class Calls:
    """Calls the module as training does."""

    def __init__(self, module):
        self.module = module

    def training_output(self, batch, index):
        return self.module.training_step(batch, index)

    def training_loss(self, batch, index):
        return loss_of(self.training_output(batch, index))


class Hooks:
    """A client rule that does nothing."""

    keeps_gradients = False

    def add_loss_term(self, loss, batch):
        return loss


def eager_step(module, batch, index):
    loss = loss_of(module.training_step(batch, index))
    for parameter in module.parameters():
        parameter.grad = None
    if loss is not None:
        loss.backward()
        loss = loss.detach()
    return loss


def trained(step, plan, steps=STEPS):
    """A module after some steps of SGD, what it was told, and the calls."""
    torch.manual_seed(1)
    module, said = Module(step), []
    x, y = torch.randn(4 * 8, SIZE), torch.randint(0, CLASSES, (4 * 8,))
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    fast = FastSGD(optimizer)
    calls, hooks = Calls(module), Hooks()
    calls = PlannedGradients(EagerGradients(calls, hooks, fast), parameters)
    calls.announce = said.append
    calls.begin_visit()
    losses = []
    for index in range(steps):
        rows = slice(index % 4 * 8, index % 4 * 8 + 8)
        module.temperature = 1.0 + index // 4
        losses.append(calls([x[rows], y[rows]], index) if plan else eager_step(module, [x[rows], y[rows]], index))
        optimizer.step()
    if plan:
        kept = deepcopy(module.state_dict()), torch.get_rng_state()
        calls.check()
        assert torch.equal(torch.get_rng_state(), kept[1])
        assert all(map(torch.equal, kept[0].values(), module.state_dict().values()))
    drawn = torch.rand(()), torch.tensor(random.random())
    tensors = [*losses, *module.state_dict().values(), module.last, *drawn]
    return SimpleNamespace(module=module, tensors=tensors, calls=calls, said=said)


def agree(one, other):
    for a, b in zip(one.tensors, other.tensors, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert one.module.heard == other.module.heard
    assert one.module.count == other.module.count


@pytest.mark.parametrize("name", PLANNED)
def test_the_bits_of_pytorch(name):
    planned = trained(PLANNED[name], True)
    agree(trained(PLANNED[name], False), planned)
    assert planned.calls.reason is None
    assert planned.calls.planned >= STEPS - 3 or name == "skipped"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_repeated_is_named(name, capsys):
    step, reason = REFUSED[name]
    planned = trained(step, True, 12)
    agree(trained(step, False, 12), planned)
    assert planned.calls.planned == 0
    assert "eager" in planned.said[-1]
    assert reason in planned.said[-1]
    assert "\n" not in planned.said[-1]
