# SPDX-License-Identifier: Apache-2.0
"""Rounds of client rules on a small classifier in float64, without a Trainer."""

import torch
import torch.nn.functional as F
from torch import nn

from fl_lightning.algorithms import Federation, LocalWork
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.updates import UpdateMatrix

INPUTS, WIDTH, CLASSES = 5, 6, 4


class Net(nn.Module):
    """An encoder with BatchNorm and a linear head."""

    def __init__(self, seed=0, norm=True, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.Identity(), nn.Tanh()]
        self.encoder = nn.Sequential(*layers, nn.Dropout(dropout))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def federated_features(self, batch):
        x, y = batch
        return self.encoder(x), y

    def federated_groups(self, batch):
        x, y = batch
        logits = self.head(self.encoder(x))
        return logits[:, 0] - logits[:, 1], (y == 0).long(), (x[:, 0] > x[:, 0].mean()).long()

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x)), y)


def client_data(clients=4, batches=3, size=6, seed=1, labels=None):
    """``{client: [(x, y), ...]}``; ``labels(client)`` lists the classes that a client holds."""
    generator = torch.Generator().manual_seed(seed)
    data = {}
    for client in range(clients):
        held = torch.tensor(list(range(CLASSES)) if labels is None else labels(client))
        data[client] = []
        for _ in range(batches):
            y = held[torch.randint(0, len(held), (size,), generator=generator)]
            x = torch.randn(size, INPUTS, generator=generator, dtype=torch.float64) + y[:, None] + 0.3 * client
            data[client].append((x, y))
    return data


def buffers_of(module):
    return {name: value.clone() for name, value in module.named_buffers()}


@torch.no_grad()
def set_buffers(module, values):
    for name, value in module.named_buffers():
        value.copy_(values[name])


def work_of(module, num_samples, lr=None, client_id=0, **more):
    """A client's work at the module's present parameters."""
    layout = ParamLayout.from_module(module)
    parameters = layout.parameters(module)
    return LocalWork(client_id, 0, module, layout, parameters, layout.flatten(parameters), num_samples, lr, **more)


class Rounds:
    """Runs a method's two halves over clients; buffers stay the global ones, as with ``buffers="global"``."""

    def __init__(self, server, client, data, module=None, lr=0.2, momentum=0.0, epochs=1, window=1):
        self.server, self.client, self.data = server, client, data
        self.module = Net() if module is None else module
        self.layout = ParamLayout.from_module(self.module)
        self.parameters = self.layout.parameters(self.module)
        self.params = self.layout.flatten(self.parameters)
        self.lr, self.momentum, self.epochs, self.window = lr, momentum, epochs, window
        self.buffers = buffers_of(self.module)
        self.when = 0
        self.begin()

    def begin(self):
        self.client.check_module(self.module, self.layout)
        federation = Federation(len(self.data), self.layout, self.params.device, torch.float64, len(self.data))
        for half in (self.server, self.client):
            half.begin_fit(federation)

    def train(self, client_id):
        row = self.params.clone()
        for parameter, view in zip(self.parameters, self.layout.views(row), strict=True):
            parameter.data = view
            parameter.grad = None
        set_buffers(self.module, self.buffers)
        work = LocalWork(
            client_id, self.when, self.module, self.layout, self.parameters, self.params,
            sum(len(y) for _, y in self.data[client_id]), self.lr, self.momentum,
            own_loss=lambda batch, index: self.module.loss(batch),
            batches=lambda: ((batch, len(batch[1])) for batch in self.data[client_id]), window=self.window,
        )  # fmt: skip
        optimizer = torch.optim.SGD(self.parameters, self.lr, self.momentum)
        self.client.begin_client(work)
        for _ in range(self.epochs):
            for index, batch in enumerate(self.data[client_id]):
                self.client.begin_batch(work, batch, index)
                loss = self.module.loss(batch)
                term = self.client.loss_term(work, batch, index)
                loss = self.client.shape_loss(work, loss)
                if index % self.window == 0:
                    optimizer.zero_grad()
                ((loss if term is None else loss + term) / self.window).backward()
                if (index + 1) % self.window == 0 or index + 1 == len(self.data[client_id]):
                    self.client.correct_gradients(work)
                    optimizer.step()
                    work.steps += 1
        report = self.client.end_client(work)
        after = buffers_of(self.module)
        set_buffers(self.module, self.buffers)
        return self.params - row, report, work, after

    def round(self, client_ids, lost=()):
        """One round; reports of clients in ``lost`` do not arrive."""
        trained = {i: self.train(i) for i in client_ids}
        arrived = [i for i in client_ids if i not in lost]
        reports = [trained[i][1] for i in arrived]
        sent = {name: torch.stack([r.companions[name] for r in reports]) for name in reports[0].companions}
        cohort = Cohort(
            params=self.params,
            updates=UpdateMatrix(torch.stack([trained[i][0] for i in arrived]), self.layout),
            losses=None,
            sizes=torch.tensor([float(trained[i][2].num_samples) for i in arrived]),
            client_ids=tuple(arrived),
            round=self.when,
            client_lr=self.lr,
            num_clients=len(self.data),
            num_samples=sum(len(y) for own in self.data.values() for _, y in own),
            extras={name: torch.stack([r.extras[name] for r in reports]) for name in reports[0].extras},
            companions={name: UpdateMatrix(rows, self.layout) for name, rows in sent.items()},
        )
        step = self.client.adjust_step(cohort, self.server.aggregate(cohort))
        self.client.commit(cohort)
        for client, report in zip(arrived, reports, strict=True):
            if report.local_state:
                rule_state.set_local_state(self.client, client, report.local_state, self.when)
        self.params = self.params - step
        self.when += 1
        return cohort, step


def partial(when):
    """Who takes part: late joiners, and clients that miss rounds."""
    return ([0, 2], [1, 2, 3], [0, 3], [0, 1, 2, 3], [2, 0], [1, 3])[when]


def lost(when):
    return (2,) if when == 1 else ()


def by_rule(make, data, rounds=6, lost=lost, **options):
    """The parameters after every round; in the middle all goes on in new objects, from what a checkpoint has."""
    method = make()
    run = Rounds(method, method.client_rule(), data, **options)
    path = []
    for when in range(rounds):
        if when == rounds // 2:
            states, run.server = (rule_state.state_dict(run.server), rule_state.state_dict(run.client)), make()
            run.client = run.server.client_rule()
            rule_state.load_state_dict(run.server, states[0])
            rule_state.load_state_dict(run.client, states[1])
            run.begin()
        run.round(partial(when), lost(when))
        path.append(run.params)
    return torch.stack(path), run


def descend(net, loss, lr):
    """One step of SGD, without an optimizer."""
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for p, g in zip(net.parameters(), gradients, strict=True):
            p -= lr * g


def mean_of(models, data):
    """By samples."""
    sizes = torch.tensor([float(sum(len(y) for _, y in data[i])) for i in models]).double()
    return (sizes / sizes.sum()) @ torch.stack([flat(model) for model in models.values()])


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@torch.no_grad()
def assign(module, vector):
    for p, part in zip(module.parameters(), vector.split([p.numel() for p in module.parameters()]), strict=True):
        p.copy_(part.view_as(p))
