# SPDX-License-Identifier: Apache-2.0
"""What a module keeps from step to step travels: clients elsewhere and a server give the bits of ``trainer.fit``."""

import itertools
import random
from collections import Counter, deque
from dataclasses import replace
from importlib.util import find_spec

import hostile
import lightning as L
import pytest
import torch
from by_hand import wired
from support import quiet_trainer, reload
from torchmetrics import CatMetric, SumMetric
from visit_variants import LOST, VARIANTS, WIDTH, Meter, Together
from visits_by_hand import PARTS, Samples

import fl_lightning as fl
from fl_lightning.federation.module_changes import ModuleAtClient
from fl_lightning.federation.served_model import ModuleAtServer
from fl_lightning.lightning.module.plain_values import Limits

pytestmark = [
    pytest.mark.filterwarnings("ignore:what training gathers in (Together|Gathers) goes to the server"),
    pytest.mark.filterwarnings("ignore:what a client leaves in (Gathers|Refers) .*cache .make it in __init__"),
]


def inside(make, rounds=3, **options):
    """The module after a fit."""
    module = make()
    strategy = fl.FederatedStrategy(on_client_error="drop", **options)
    quiet_trainer(strategy, rounds).fit(module, fl.FederatedDataModule(Samples(), list(PARTS)))
    return module


def one_client(module, data, client, strategy=None):
    strategy = strategy or fl.FederatedStrategy()
    return fl.FederatedClient(module, data, strategy, client, 3, trainer={"accelerator": "cpu"})


def made(make, rounds=3, **options):
    """A server and its clients."""
    strategy = fl.FederatedStrategy(**options)
    server = fl.FederatedServer(make(), strategy, 3, rounds=rounds)
    clients = [one_client(make(), Samples(k), k, strategy) for k in range(3)]
    for client in clients:
        server.register(wired(client.introduction()))
    return server, clients


def one_round(server, clients, change=lambda answers: None):
    answers = {k: wired(clients[k].train(wired(server.message(k)))) for k in reversed(server.open_round())}
    change(answers)
    return server.close_round(answers)


def differing(one, other):
    return sorted(name for name in one if not torch.equal(one[name], other[name]))


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_clients_may_miss_rounds_and_the_server_may_be_restarted():
    names = sorted(VARIANTS.keys() - LOST.keys())
    options = {"clients_per_round": 2, "seed": 3}
    server, clients = made(lambda: Together(names), 4, **options)
    for _ in range(2):
        one_round(server, clients)
    state = reload(server.state_dict())
    server, _ = made(lambda: Together(names), 4, **options)
    server.load_state_dict(state)
    clients = made(lambda: Together(names), 4, **options)[1]
    for _ in range(2):
        one_round(server, clients)
    server.finish()
    assert not differing(inside(lambda: Together(names), 4, **options).found(), server.module.found())


class Streams(L.LightningModule):
    """Goes on in an iterator; counts, too, or not."""

    def __init__(self, counts):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(WIDTH))
        self.stream, self.counts, self.count = itertools.count(), counts, 0

    def training_step(self, batch, batch_idx):
        next(self.stream)
        self.count += self.counts
        return (batch[0] @ self.w - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("counts", [0, 1])
def test_what_goes_on_at_the_client_is_said(counts):
    client = made(lambda: Streams(counts))[1][0]
    with pytest.warns(UserWarning, match="what a client leaves in Streams stays at the client") as said:
        sent = client.train(fl.ServerMessage(0, torch.zeros(WIDTH)))
    assert any("stream (a count)" in str(one.message) for one in said)
    assert bool(sent.module) == bool(counts)


class Gathers(L.LightningModule):
    """Keeps a bit of everything that is joined or chosen, and makes a dictionary in a hook."""

    def __init__(self, site="all"):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(WIDTH))
        self.seen, self.last, self.sizes = [], deque([-1], maxlen=4), SumMetric()
        self.count, self.latest, self.heat, self.site = 0, None, 1.0, site
        self.of_round, self.dice, self.table, self.meter = [], torch.Generator(), torch.zeros(2), Meter()

    def setup(self, stage):
        self.cache, self.of_setup = {}, self.count

    def on_train_start(self):
        self.count = 0

    def on_train_epoch_start(self):
        self.heat *= 0.5

    def training_step(self, batch, batch_idx):
        self.count += 1
        self.latest = float(batch[0][0, 0])
        self.seen.append(self.latest)
        self.of_round.append(self.latest)
        self.cache.setdefault("a", []).append(self.latest)
        self.last.append(len(batch[0]))
        self.sizes.update(len(batch[0]))
        return (self.heat + self.meter.update(0.1 * self.count)) * (batch[0] @ self.w - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("heat", self.heat + len(self.seen), batch_size=len(batch[0]))

    def on_train_epoch_end(self):
        self.of_round.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_attributes_lists_and_metrics_are_those_of_a_fit():
    fit = inside(Gathers)
    server, clients = made(Gathers)
    for _ in range(3):
        one_round(server, clients)
    found = server.module
    assert torch.equal(fit.w, found.w)
    for name in ("seen", "last", "count", "latest", "heat", "of_round"):
        assert getattr(fit, name) == getattr(found, name), name
    assert (len(fit.seen), fit.count, fit.heat) == (18, 9, 0.125)
    assert not hasattr(found, "cache"), "the server's module has had no setup"
    assert fit.sizes.compute() == found.sizes.compute() == 3 * 44
    assert vars(found.meter) == vars(fit.meter)
    again, _ = made(Gathers)
    again.load_state_dict(reload(server.state_dict()))
    assert again.module.seen == fit.seen
    assert again.module.sizes.compute() == 132


def test_a_client_gets_its_module_back():
    server, clients = made(Gathers)
    own = Gathers("north")
    clients[2] = one_client(own, Samples(2), 2)
    for _ in range(2):
        one_round(server, clients)
        assert (own.seen, own.count, own.heat, own.latest, own.site) == ([], 0, 1.0, None, "north")
        assert list(own.last) == [-1]
        assert own.sizes.update_count == 0
        assert not hasattr(own, "cache")
    first, again = (clients[2].train(server.message(2)) for _ in range(2))
    assert torch.equal(first.update, again.update)
    assert server.module.site == "all"  # nobody has changed it


def test_the_model_is_evaluated_with_what_rounds_have_left():
    class Held(Samples):
        def val_dataloader(self):
            return self.train_dataloader()

    server, clients = made(Gathers)
    one_round(server, clients)
    client = one_client(Gathers(), Held(1), 1)
    assert float(client.evaluate(server.evaluation_message(1)).values["heat"]) == 6.5


def test_what_grows_without_end_begins_anew(monkeypatch):
    for room in ("module_changes", "served_model"):
        monkeypatch.setattr(f"fl_lightning.federation.{room}.LIMITS", Limits(40))
    server, clients = made(Gathers, 6)
    with pytest.warns(UserWarning, match="'seen' begins anew at every client: more than 40 entries"):
        _ = [one_round(server, clients) for _ in range(6)]
    assert len(server.module.seen) < 36
    assert server.module.count == 18


class Refers(Gathers):
    """Has attributes that are parts of the module, and a tuple in a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.parts, self.records, self.more = [], [(0, [])], []

    def training_step(self, batch, batch_idx):
        self.parts = [self.w, self.mean, self.sizes]
        self.records = [(self.records[0][0] + 1, [])]
        self.more.append(1)
        return super().training_step(batch, batch_idx)


class Less(Refers):
    """Lacks something that the clients have."""

    def __init__(self):
        super().__init__()
        del self.more


@pytest.mark.filterwarnings("ignore:what training gathers in (Less|Refers) goes to the server")
def test_parts_are_the_servers_own_and_what_it_lacks_stays_and_is_named():
    server, _ = made(Less)
    clients = [one_client(Refers(), Samples(k), k) for k in range(3)]
    with pytest.warns(UserWarning, match="'more' is not among what the server's module has: it stays with them"):
        record = one_round(server, clients)
    module = server.module
    assert record.client_ids == (0, 1, 2)
    assert list(map(id, module.parts)) == [id(module.w), id(module.mean), id(module.sizes)]
    assert module.records[0][0] == 3  # the largest client's
    assert not hasattr(module, "more")


class Sums(L.LightningModule):
    """Gathers in a metric, and changes nothing else."""

    def __init__(self):
        super().__init__()
        self.w, self.sizes = torch.nn.Parameter(torch.zeros(WIDTH)), SumMetric()

    def training_step(self, batch, batch_idx):
        self.sizes.update(len(batch[0]))
        return (batch[0] @ self.w - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_metrics_alone_reach_the_server():
    server, clients = made(Sums)
    one_round(server, clients)
    assert server.module.sizes.compute() == 44


def test_a_restart_takes_the_place_of_what_there_was():
    first, second = ModuleAtServer(Hoards(), torch.device("cpu")), Hoards()
    first._module.outputs.append(1), first._module.sum.update(2.0)
    state, home = reload(first.plain(metrics=True)), ModuleAtServer(second, torch.device("cpu"))
    second.count = 5
    for _ in range(2):
        home.load(state)
        assert (second.outputs, second.sum.compute(), second.count) == ([1], 2.0, 0)


def test_metrics_that_are_too_large_begin_anew_and_nothing_else_does(monkeypatch):
    module = Hoards()
    home = ModuleAtServer(module, torch.device("cpu"))
    module.cat.update(torch.zeros(100))
    module.sum.update(3.0)
    module.count = 7
    monkeypatch.setattr("fl_lightning.federation.served_model.LIMITS", Limits(nbytes=200))
    with pytest.warns(UserWarning, match="'cat' begins anew at every client: more than"):
        home.plain(metrics=True)
    assert (module.cat.update_count, module.sum.compute(), module.count) == (0, 3.0, 7)


def test_a_server_says_so_much_and_nothing_twice():
    home = ModuleAtServer(Hoards(), torch.device("cpu"))
    with pytest.warns(UserWarning, match="of what clients leave in Hoards, ") as said:
        _ = [home._warn_once(f"name {number}", f"{number} is odd") for number in [*range(3), *range(40)]]
    assert len(said) == 32


class Hoards(L.LightningModule):
    """Gathers in every way, some of it until the epoch is over."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(WIDTH))
        self.outputs, self.losses, self.of_epoch, self.bank = [], deque(maxlen=30), [], torch.zeros(4)
        self.count, self.last, self.loss, self.dice = 0, None, torch.zeros(()), torch.Generator()
        self.cat, self.sum = CatMetric(), SumMetric()

    def training_step(self, batch, batch_idx):
        loss = (batch[0] @ self.w - batch[1]).square().mean()
        self.outputs.append({"x": batch[0], "size": len(batch[0])})
        self.losses.append(loss.item())
        self.of_epoch.append(batch[1])
        self.bank[batch_idx] = batch[1][0]
        self.seen = torch.cat([getattr(self, "seen", torch.zeros(0)), batch[1]])
        self.count, self.last, self.loss = self.count + 1, "text", loss.detach()
        torch.rand(3, generator=self.dice)
        self.cat.update(batch[1]), self.sum.update(1)
        return loss

    def on_train_epoch_end(self):
        self.of_epoch.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_what_training_gathers_is_named_once_before_it_is_sent():
    """Of client 0, with 12 samples in two batches."""
    clients = made(Hoards)[1]
    message = fl.ServerMessage(0, torch.zeros(WIDTH))
    with pytest.warns(UserWarning, match="what training gathers in Hoards goes to the server") as said:
        clients[0].train(message)
    (words,) = [str(one.message) for one in said if "what training gathers" in str(one.message)]
    found = dict(part.split()[-3:-1] for part in words.split(";"))
    counts = {"outputs": 2 + 2 * 2 + 12 * WIDTH, "losses": 2, "bank": 4, "seen": 12, "cat": 2 + 12}
    assert found == {name: f"({count}" for name, count in counts.items()}
    clients[0].train(message)  # any warning is an error


@pytest.mark.skipif(find_spec("dp_accounting") is None, reason="needs dp-accounting")
def test_nothing_of_the_module_is_sent_where_privacy_does_not_cover_it():
    module, private = Gathers(), fl.algorithms.DifferentialPrivacy(1.0, 1.0, "local", seed=0)
    client = one_client(module, Samples(1), 1, fl.FederatedStrategy(client=private))
    params = torch.zeros(WIDTH)
    with pytest.warns(UserWarning, match=r"stays at the client.*all of it \(DifferentialPrivacy does not cover it"):
        assert client.train(fl.ServerMessage(0, params)).module == {}


# ---- what a client may not do

LIES = {
    "a mode that is none": ["module ", "bound", ["training", 3]],
    "a mode goes": ["module ", "gone", ["training"]],
    "a method": ["module ", "bound", ["training_step", 1]],
    "what the class calls": ["meter#", "bound", ["update", 1]],
    "a method goes": ["module ", "gone", ["training_step"]],
    "a parameter": ["module ", "bound", ["w", 1.0]],
    "the class": ["module ", "bound", ["__class__", 1]],
    "hooks": ["module ", "bound", ["_forward_hooks", 1]],
    "no name": ["module ", "bound", ["a b", 1]],
    "a number for a list": ["seen#", "whole", [3]],
    "a tuple for a list": ["seen#", "whole", [{"node": 2}]],
    "another dtype": ["table#", "whole", [{"node": 3}]],
    "names of a list": ["seen#", "bound", ["append", 3]],
    "items of an object": ["meter#", "added", [3]],
    "items of a tensor": ["table#", "added", [3]],
    "an unknown object": ["seen#", "added", [{"known": "more"}]],
    "a later node": ["seen#", "added", [{"node": 99}]],
    "a node from the end": ["seen#", "added", [{"node": -1}]],
    "a state that no generator has": ["dice#", "whole", [{"node": 1}]],
    "another form": ["seen#", "__init__", [3]],
    "a part": ["seen#", "added"],
    "a class": ["seen#", "added", [{"node": 0}]],
}


def lying(client, left):
    """Puts what is left into a client's answer."""
    return lambda answers: answers.update({client: replace(answers[client], module=left)})


@pytest.mark.filterwarnings("ignore:client 2 is left out of round 0")
@pytest.mark.parametrize("lie", LIES)
def test_a_client_that_lies_about_the_module_is_left_out(lie):
    server, clients = made(Gathers)
    nodes = [["object", "Popen", []] if lie == "a class" else ["list", []]]
    nodes.append(["tensor", torch.zeros(3, dtype=torch.uint8), False, False])
    nodes += [["tuple", []], ["tensor", torch.zeros(2, dtype=torch.float64), False, False]]
    record = one_round(server, clients, lying(2, {"nodes": nodes, "changes": [LIES[lie]], "metrics": []}))
    assert record.client_ids == (0, 1)
    assert record.dropped.keys() == {2}
    assert one_round(server, clients).client_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("states", "updates"),
    [
        (["sum_value", 1.0], 1),
        ([], 1),
        (["sum_value", {"node": 0}], 1),
        (["sum_value", {"node": 1}], 0),
        (["sum_value", {"node": 1}, "more", {"node": 1}], 1),
        (["sum_value", {"node": 2}], 1),
    ],
)
@pytest.mark.filterwarnings("ignore:client 2 is left out of round 0")
def test_a_client_that_lies_about_metrics_is_left_out(states, updates):
    server, clients = made(Gathers)
    values = torch.zeros(3), torch.zeros(()), torch.zeros((), dtype=torch.float64)
    nodes = [["tensor", value, False, False] for value in values]
    left = {"nodes": nodes, "changes": [], "metrics": [["sizes", updates, states]]}
    assert one_round(server, clients, lying(2, left)).dropped.keys() == {2}
    assert server.module.sizes.compute() == 12 + 9


@pytest.mark.filterwarnings("ignore:client 2 is left out of round 0", "ignore:of what clients leave in Together")
def test_nothing_that_a_client_says_of_the_module_ends_a_federation():
    def make():
        return Together(sorted(VARIANTS.keys() - LOST.keys()))

    dice, ends = random.Random(2), Counter()
    server, clients = made(make)
    answers = {k: vars(clients[k].train(server.message(k))) for k in server.open_round()}
    honest = make()
    with hostile.nothing_unpickled():
        for case in range(hostile.CASES // 4):
            fields = hostile.mutated(dice, {"module": answers[2]["module"]})
            server = fl.FederatedServer(make(), fl.FederatedStrategy(), 3, rounds=3)
            server.open_round()
            record = server.close_round({**answers, 2: {**answers[2], **fields}})
            ends[2 in record.dropped] += 1
            server.open_round()
            with ModuleAtClient(honest, server.message(0).module, set()) as module:
                module.take()
            assert all(name in VARIANTS for name in honest.parts), case
    assert min(ends[True], ends[False]) > 0
