# SPDX-License-Identifier: Apache-2.0
"""However a project gathers, a client's values are plain Lightning's on its data, and those of all can be added up."""

import math

import lightning as L
import pytest
import torch
from cases import in_turn
from gathering import KINDS, BestOfLists, Counts, Lists, Locked, Metrics, OfLoaders, ReadsInSteps, Sums, Wrappers
from lightning.pytorch.utilities import CombinedLoader
from plain_loop import client_batches
from support import fit, fresh, quiet_trainer, weights
from torch.utils.data import DataLoader

import fl_lightning as fl
from fl_lightning.core.errors import ModuleError
from fl_lightning.core.processes import pack, unpack
from fl_lightning.fit.evaluation import evaluator
from fl_lightning.fit.evaluation.client_evaluation import ClientEvaluation

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pytree|The variance of predictions|.*does not have many workers|Total length|You have overridden"
)
RUNS = {"val": "validate", "test": "test"}


def data_of(kind):
    """The kind's data over six clients; of several loaders, some clients have nothing of the second."""
    return fl.FederatedDataModule(kind.DATA(), fl.data.Dirichlet(6, 0.3 if kind is OfLoaders else 1.0), seed=0)


def federated(module, stage="val", data=None, strategy=None):
    """What an evaluation with clients logs, and its record."""
    strategy = fl.FederatedStrategy() if strategy is None else strategy
    trainer = quiet_trainer(strategy)
    getattr(trainer, RUNS[stage])(module, data_of(type(module)) if data is None else data, verbose=False)
    logged = {name: float(v) for name, v in trainer.callback_metrics.items() if not name.startswith("fed/")}
    return logged, strategy.last_evaluation


def plain(module, loader, stage="val"):
    """What a Trainer without any of this library logs."""
    trainer = quiet_trainer("auto")
    getattr(trainer, RUNS[stage])(module, loader, verbose=False)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def loaders_of(kind, stage):
    """The clients' data in ordinary loaders with the same batches, and those of all of them."""
    given = client_batches(stage, data_of(kind))
    given = given if isinstance(given, (list, tuple)) else [given]
    batches = [[[b for b, _ in one.batches(c, seed=None)] for c in range(6)] for one in given]
    clients = {c: [of[c] for of in batches] for c in range(6) if any(of[c] for of in batches)}
    pooled = [[batch for mine in of for batch in mine] for of in batches]
    *clients_loaders, together = (
        [DataLoader(some, batch_size=None) for some in of] for of in (*clients.values(), pooled)
    )
    return dict(zip(clients, clients_loaders, strict=True)), together


def same(one, other):
    return one == pytest.approx(other, rel=1e-6, nan_ok=True)


def expected_of(kind, stage):
    """By name: what a Trainer without clients logs for each of them alone, and the value of all."""
    clients, together = loaders_of(kind, stage)
    rows = {client: plain(fresh(kind), loaders, stage) for client, loaders in clients.items()}
    sizes = {c: sum(len(batch[1]) for one in loaders for batch in one) for c, loaders in clients.items()}
    of_all = plain(fresh(kind), together, stage)
    for name in kind.MEANS:
        known = [c for c, row in rows.items() if name in row]
        of_all[name] = sum(rows[c][name] * sizes[c] for c in known) / sum(sizes[c] for c in known)
    for name, function in kind.OF_CLIENTS.items():
        of_all[name] = function(row[name] for row in rows.values() if name in row)
    return rows, of_all


def check(kind, stage, logged, record):
    """Every client's values are those of a plain Trainer, and those of all what the table of docs/logged.md says."""
    rows, of_all = expected_of(kind, stage)
    assert record.client_ids == tuple(rows)
    for name, values in record.values.items():
        assert same(values.tolist(), [row.get(name, math.nan) for row in rows.values()]), name
    assert {name for name in logged if not name.endswith(("_step", "_epoch"))} == record.values.keys()
    for name, value in logged.items():
        assert same(value, of_all[name]), name


@pytest.mark.parametrize(("kind", "stage"), [*in_turn(KINDS, ["val", "test"]), (OfLoaders, "test"), (OfLoaders, "val")])
def test_values_of_each_client_and_of_all(kind, stage, caplog, monkeypatch):
    module, strategy = fresh(kind), fl.FederatedStrategy()
    before, steps, add = weights(module), [], kind.add
    monkeypatch.setattr(module, "add", lambda *batch: steps.append(1) or add(module, *batch))
    for _ in range(2):  # the second evaluation must not remember the first
        logged, record = federated(module, stage, strategy=strategy)
        check(kind, stage, logged, record)
    assert weights(module).equal(before)
    assert len(steps) == 2 * sum(map(len, loaders_of(kind, stage)[1])), "no second pass"
    said = f"{kind.__name__}.{'validation' if stage == 'val' else 'test'}_step changes "
    assert caplog.text.count(said) == (bool(kind.MEANS) and kind is not ReadsInSteps)


@pytest.mark.parametrize(("kind", "stage"), in_turn((*KINDS, BestOfLists), ["test", "val"]))
def test_one_client_is_plain_lightning(kind, stage):
    """Bit for bit, also where what the module keeps goes on to the next evaluation."""
    module, other = fresh(kind), fresh(kind)
    data = fl.FederatedDataModule(kind.DATA(), fl.data.IID(1), seed=0)
    for _ in range(2):
        logged, record = federated(module, stage, data)
        expected = plain(other, kind.DATA(), stage)
        assert logged == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
        for name, values in record.values.items():
            assert same(float(values), expected[name]), name
        for part in (module, other):
            with torch.no_grad():
                part.net[2].bias[0] += 0.5


class Rank:
    """One of two processes that answers for the other one, whose message it knows if that one has run before."""

    size = 2

    def __init__(self, rank, theirs=None):
        self.rank, self.sent, self.theirs = rank, None, theirs

    def gather(self, value):
        self.sent = pack(value)
        own = unpack(self.sent, torch.device("cpu"))
        theirs = own if self.theirs is None else unpack(self.theirs, torch.device("cpu"))
        return [own, theirs] if self.rank == 0 else [theirs, own]


def on_two_ranks(kind, monkeypatch):
    """What the first of two processes logs, and the clients whose batches it has seen."""
    seen = {}

    def evaluated(ranks):
        def made(*options):
            return ClientEvaluation(*options[:6], ranks)

        steps = seen[ranks.rank] = []
        add = kind.add
        with monkeypatch.context() as patched:
            patched.setattr(evaluator, "ClientEvaluation", made)
            patched.setattr(kind, "add", lambda self, *args: steps.append(len(args[1])) or add(self, *args))
            return federated(fresh(kind))

    second = Rank(1)
    evaluated(second)
    found = evaluated(Rank(0, second.sent))
    return found, [sum(sizes) for sizes in seen.values()]


@pytest.mark.filterwarnings("ignore:clients that train")  # this rank does not hear of the other one's
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (Locked, OfLoaders)])
def test_two_processes_share_the_clients(kind, monkeypatch):
    (logged, record), samples = on_two_ranks(kind, monkeypatch)
    alone, expected = federated(fresh(kind))
    assert logged == pytest.approx(alone, rel=0, abs=0, nan_ok=True)
    assert record.sizes.equal(expected.sizes)
    for name, values in expected.values.items():
        assert values.equal(record.values[name]) or same(values.tolist(), record.values[name].tolist())
    assert sum(samples) == expected.sizes.sum()
    assert all(samples)


def test_what_cannot_travel_is_named(monkeypatch):
    with pytest.raises(ModuleError, match=r"what Locked leaves in attributes must be plain values .*, found tally"):
        on_two_ranks(Locked, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_elsewhere_has_the_same_values(kind):
    _, record = federated(fresh(kind))
    strategy, data = fl.FederatedStrategy(), data_of(kind)
    server = fl.FederatedServer(fresh(kind), strategy, num_clients=6)
    for place, client in enumerate(record.client_ids[:2]):
        one = fl.FederatedClient(fresh(kind), data, strategy, client_id=client, trainer={"accelerator": "cpu"})
        found = one.evaluate(server.evaluation_message(client))
        assert {name: float(v) for name, v in found.values.items()} == pytest.approx(
            {name: float(v[place]) for name, v in record.values.items() if not v[place].isnan()}, nan_ok=True
        )


@pytest.mark.parametrize("kind", [Counts, Metrics, Sums, Wrappers])
def test_own_models_are_evaluated_alone_too(kind):
    _, strategy, _ = fit(fresh(kind), 2, algorithm=fl.algorithms.Ditto(), clients_per_round=1.0)
    clients, _ = loaders_of(kind, "val")
    found = strategy.last_evaluation.values["personal/acc"].tolist()
    for place, (client, loader) in enumerate(clients.items()):
        own = fresh(kind)
        torch.nn.utils.vector_to_parameters(strategy.client_rule.personal_model(client).params, own.parameters())
        assert same(found[place], plain(own, loader)["acc"])


@pytest.mark.parametrize("kind", [Metrics, BestOfLists])
def test_what_evaluations_remember_is_that_of_the_call_for_all(kind):
    module = fresh(kind)
    first, before = federated(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.neg_()
    second, record = federated(module)
    best = max(first["acc"], second["acc"])
    assert first["acc"] != second["acc"]
    assert second["acc_best"] == best
    own = record.values["acc"]  # metrics are empty when a client begins; numbers are as the evaluation found them
    assert record.values["acc_best"].equal(own if kind is Metrics else own.clamp(min=first["acc"]))
    assert before.values["acc_best"].equal(before.values["acc"])


@pytest.mark.parametrize("kind", [Counts, Lists])
def test_callbacks_watch_the_value_of_all_clients(kind, tmp_path):
    """EarlyStopping and ModelCheckpoint decide as they would with the true values, in every round."""
    seen = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                truth = fresh(kind)
                truth.load_state_dict(pl_module.state_dict())
                seen.append((float(trainer.callback_metrics["acc"]), plain(truth, loaders_of(kind, "val")[1])["acc"]))

    stopping = L.pytorch.callbacks.EarlyStopping("acc", mode="max", patience=1)
    keeping = L.pytorch.callbacks.ModelCheckpoint(tmp_path, monitor="acc", mode="max")
    fit(fresh(kind), 4, callbacks=[Watch(), stopping, keeping], enable_checkpointing=True, num_sanity_val_steps=2)
    found, true = zip(*seen, strict=True)
    assert found == pytest.approx(true, rel=1e-6)
    assert float(keeping.best_model_score) == float(stopping.best_score) == max(found)


class BesideAnother(Counts):
    def validation_step(self, batch, batch_idx):
        if batch["own"] is not None:
            super().validation_step(batch["own"], batch_idx)
            self.log("step_acc", self.correct / self.tally.total, batch_size=1)


@pytest.mark.parametrize(("mode", "others"), [("min_size", 80), ("max_size", 40)])
def test_loaders_side_by_side(mode, others):
    clients, _ = loaders_of(BesideAnother, "val")
    _, record = federated(
        fresh(BesideAnother),
        data=CombinedLoader({"other": DataLoader(range(others)), "own": client_batches("val")}, mode),
    )
    assert record.client_ids == tuple(clients)
    for place, (loader,) in enumerate(clients.values()):
        beside = CombinedLoader({"other": DataLoader(range(80)), "own": loader}, "min_size")
        for name, value in plain(fresh(BesideAnother), beside).items():
            if name != "batches" or mode == "min_size":
                assert same(float(record.values[name][place]), value), name
