# SPDX-License-Identifier: Apache-2.0
"""Clients on their own and a server by hand give the bits of ``trainer.fit``."""

from functools import cache
from importlib.util import find_spec

import lightning as L
import pytest
import torch
from by_hand import Federation, Own, own_loader
from resuming import ALGORITHMS
from support import Classifier, Manual, federated_blobs, fit, fresh, on_path, weights
from torch.utils.data import DataLoader, Subset
from watching import Records

import fl_lightning as fl
from fl_lightning.algorithms import (
    MOON,
    SCAFFOLD,
    DifferentialPrivacy,
    Ditto,
    FedAvg,
    FedBN,
    FedDyn,
    FedLF,
    FedPer,
)


def compare(method, module=Classifier, options=None, rounds=3, trainer=None, folder=None, data=None, **shared):
    """The same federation of 4 clients, 3 in a round, in a trainer and apart: weights, records, evaluations."""
    shared = {"clients_per_round": 3, "seed": 5, **shared}
    halves = {"algorithm": method(), "client": shared.pop("client", lambda: None)()}
    records, trainer, options = Records(), trainer or {}, options or {}
    inside = fit(
        fresh(module, **options), rounds, data=federated_blobs(4), callbacks=[records], **halves, **shared, **trainer
    )
    apart = Federation(
        fl.FederatedStrategy(**halves, **shared), lambda seed: fresh(module, seed, **options), trainer=trainer,
        data=data or Own, rounds=rounds, folder=folder,
    )  # fmt: skip
    found = [apart.round() for _ in range(rounds)]
    clients = apart.clients
    evaluated = [clients[k].evaluate(apart.server.evaluation_message(k)) for k in range(4)]
    apart.server.finish()
    assert torch.equal(weights(apart.server.module), weights(inside.module))
    for ours, theirs in zip(found, records.rounds, strict=True):
        for name in ("client_ids", "dropped", "step_norm", "local_steps", "layer_conflicts"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=0, nan_ok=True)
    assert [record.client_ids for record in evaluated] == [(0,), (1,), (2,), (3,)]
    for name, values in records.evaluations[-1].values.items():
        assert torch.equal(torch.cat([record.values[name] for record in evaluated]), values), name
    assert torch.equal(torch.cat([record.sizes for record in evaluated]), records.evaluations[-1].sizes)
    return inside, apart, records.rounds


QUICK = ("FedAvg", "FedFa", "SCAFFOLD", "MOON", "Ditto", "FedLF", "FedMDFG")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(ALGORITHMS)]
)
def test_every_method_gives_the_bits_of_a_fit(tmp_path, name):
    compare(ALGORITHMS[name], options={"norm": True, "dropout": 0.3}, folder=tmp_path)


KEEP = {"client_optimizer_state": "keep"}
CASES = {
    "kept Adam, local steps": {"method": FedAvg, "options": {"optimizer": "Adam"}, "local_steps": 5, **KEEP},
    "kept momentum, double": {
        "method": FedLF, "options": {"momentum": 0.9}, "trainer": {"precision": "64-true"}, **KEEP,
    },
    "full gradients": {"method": FedLF, "full_gradients": True},
    "two epochs, limit": {"method": SCAFFOLD, "local_epochs": 2, "trainer": {"limit_train_batches": 2}},
    "full path, global buffers": {
        "method": MOON, "options": {"norm": True}, "buffers": "global", "trainer": on_path(lean=False),
    },
    "full path, a pair": {"method": FedLF, "client": SCAFFOLD, "trainer": on_path(lean=False)},
    "manual": {"method": FedAvg, "module": Manual},
    "accumulated, largest buffers": {
        "method": FedDyn, "options": {"norm": True}, "buffers": "largest", "trainer": {"accumulate_grad_batches": 2},
    },
    "a pair": {"method": FedLF, "client": SCAFFOLD},
}  # fmt: skip
if find_spec("dp_accounting") is not None:
    CASES |= {
        "central privacy": {
            "method": lambda: FedAvg("uniform"),
            "client": lambda: DifferentialPrivacy(0.1, 1.0, seed=0),
        },
        "local privacy": {"method": FedAvg, "client": lambda: DifferentialPrivacy(0.1, 1.0, "local", seed=0)},
    }


@pytest.mark.parametrize("name", CASES)
def test_options_make_no_difference(tmp_path, name):
    compare(**CASES[name], rounds=2, folder=tmp_path)


@cache
def sample_of_client_2():
    loaders = federated_blobs(4).train_dataloader()
    return loaders.dataset.tensors[0][loaders.indices(2)[0]]


class Poisoned(Classifier):
    """One client's loss is NaN in the second round."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        hit = self.trainer.current_epoch == 1 and (batch[0] == sample_of_client_2()).all(1).any()
        return loss * float("nan") if hit else loss


@pytest.mark.filterwarnings("ignore:client 2 is left out of round 1")
@pytest.mark.parametrize(
    ("method", "state", "in_files"),
    [(MOON, "reset", True), (SCAFFOLD, "reset", False), (FedAvg, "keep", True), (FedAvg, "keep", False)],
)
def test_what_a_client_kept_of_a_round_that_did_not_count_is_forgotten(tmp_path, method, state, in_files):
    _, _, seen = compare(
        method, Poisoned, {"momentum": 0.5}, on_client_error="drop", client_optimizer_state=state,
        folder=tmp_path if in_files else None,
    )  # fmt: skip
    assert 2 in seen[1].dropped
    assert any(2 in record.client_ids for record in seen[2:])


@pytest.mark.parametrize("method", [Ditto, FedBN, FedPer])
def test_personal_models_are_those_of_the_fit(tmp_path, method):
    inside, apart, _ = compare(method, options={"norm": True}, folder=tmp_path)
    mine = inside.strategy.client_rule
    for client, when in apart.server.counted.items():
        path = tmp_path / f"client-{client:06d}" / f"round-{when:06d}.pt"
        kept = torch.load(path, weights_only=True)["rule"]["own"]
        own = mine.personal_model(client)
        own = own if method is Ditto else own.values
        assert torch.equal(kept["params"], own.params)
        assert torch.equal(kept["buffers"], own.buffers)
        assert len(list(path.parent.iterdir())) <= 2


@pytest.mark.parametrize("method", [Ditto, FedBN, FedPer, FedAvg])
def test_the_state_of_a_client_is_the_model_that_it_evaluates(tmp_path, method):
    _, apart, _ = compare(method, options={"norm": True}, folder=tmp_path)
    client, message, module = apart.clients[2], apart.server.evaluation_message(2), fresh(norm=True)
    module.load_state_dict(client.state_dict(message))
    loaders = federated_blobs(4).val_dataloader()
    mine = DataLoader(Subset(loaders.dataset, loaders.indices(2).tolist()), batch_size=8)
    found = L.Trainer(**CPU, logger=False, enable_progress_bar=False).validate(module, mine, verbose=False)[0]
    values = client.evaluate(message).values
    name = "val_loss" if method is FedAvg else "personal/val_loss"
    assert found["val_loss"] == pytest.approx(float(values[name][0]), rel=1e-6)
    assert ("personal/val_loss" in values) == (method is not FedAvg)


# ---- one client


CPU = {"accelerator": "cpu"}


def one_client(data=None, module=None, trainer=CPU, folder=None, num_clients=None, **options):
    """Client 1 of 4."""
    own = own_loader(1, federated_blobs(4)) if data is None else data
    if num_clients is None and not isinstance(own, fl.FederatedDataModule):
        num_clients = 4
    module, strategy = fresh() if module is None else module, fl.FederatedStrategy(**{"seed": 5, **options})
    return fl.FederatedClient(module, own, strategy, 1, num_clients, trainer, folder)


def message(when=0, **fields):
    module = fresh()
    layout = fl.ParamLayout.from_module(module)
    return fl.ServerMessage(when, layout.flatten(layout.parameters(module)), **fields)


def test_every_kind_of_data_gives_the_same_bits():
    loader = own_loader(1, federated_blobs(4))
    expected = one_client(loader).train(message(3))
    for data in (
        Own(1),
        federated_blobs(4),
        fl.FederatedDataModule(loader.dataset, [range(0), range(len(loader.dataset))], batch_size=10),
    ):
        sent = one_client(data).train(message(3))
        assert torch.equal(sent.update, expected.update)
        assert (sent.size, sent.client_id, sent.round) == (len(loader.dataset), 1, 3)


@pytest.mark.parametrize("keep", ["keep", "reset"])
def test_the_same_message_gives_the_same_answer_again(tmp_path, keep):
    client = one_client(algorithm=MOON(), client_optimizer_state=keep, folder=tmp_path)
    client.train(message(0))
    first, again = (client.train(message(2, counted=0)) for _ in range(2))
    other = client.train(message(2))
    assert torch.equal(first.update, again.update)
    assert not torch.equal(first.update, other.update)


def test_the_module_ends_with_what_it_received_and_generators_go_on():
    module, sent = fresh(seed=3), message(1)
    client = one_client(module=module)
    torch.manual_seed(1)
    client.train(sent)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    assert torch.equal(weights(module), weights(fresh()))


OTHERS = {
    "nothing": ({}, ""),
    "argument": ({"algorithm": FedLF(max_history=2)}, "method: FedLF(max_history=None) became FedLF(max_history=2)"),
    "method": ({"algorithm": FedDyn()}, "method: FedLF with client=SCAFFOLD became FedDyn"),
    "client half": ({"client": None}, "method: FedLF with client=SCAFFOLD became FedLF"),
    "seed": ({"seed": 6, "local_epochs": 2}, "local_epochs: 1 became 2, seed: 5 became 6"),
    "clients": ({"num_clients": 3}, "clients: 4 became 3"),
    "layers": (
        {"algorithm": FedLF(layers="model")},
        "layout: layer 0: net.0 [0:104] became model [0:140]; "
        "method: FedLF(layers='module') became FedLF(layers='model')",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_server_and_client_find_out_what_they_disagree_on(name):
    options, words = OTHERS[name]
    shared = {"algorithm": FedLF(), "client": SCAFFOLD()}
    server = fit(**shared, data=federated_blobs(4), rounds=1).strategy.fit_description
    if options.get("algorithm") and type(options["algorithm"]) is FedDyn:
        options = {"client": None, **options}
    assert server.difference(one_client(**{**shared, **options}).fit_description) == words


def test_nothing_is_written_where_nothing_stays(tmp_path):
    one_client(algorithm=SCAFFOLD(), folder=tmp_path).train(message(0))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", [Ditto, MOON, FedPer])
def test_what_stays_at_the_client_is_not_sent(method):
    client = one_client(algorithm=method())
    client.train(message(0))
    sent = client.train(message(1, counted=0))
    assert sent.extras == sent.companions == {}
    assert "local_state" not in vars(sent)


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.current_epoch == 1 and batch_idx == 2:
            raise LookupError("a broken sample")
        return super().training_step(batch, batch_idx)


def test_a_failed_visit_leaves_nothing_behind(tmp_path):
    module = fresh(Fails, seed=3)
    client = one_client(module=module, algorithm=MOON(), folder=tmp_path)
    client.train(message(0))
    own = tmp_path / "client-000001"
    (own / "round-000009.pt.part").touch()  # of a process that was killed
    with pytest.raises(LookupError, match="a broken sample"):
        client.train(message(1, counted=0))
    assert [path.name for path in own.iterdir()] == ["round-000000.pt"]
    assert torch.equal(weights(module), weights(fresh()))
    again = one_client(module=fresh(Fails), algorithm=MOON(), folder=tmp_path)
    assert torch.equal(client.train(message(2, counted=0)).update, again.train(message(2, counted=0)).update)


def test_the_fit_says_nothing(caplog, capsys):
    client = one_client()
    with caplog.at_level("INFO"):
        caplog.clear()
        client.train(message(0))
    assert caplog.records == []
    assert capsys.readouterr().out == ""


class Plateau(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


NORMED = fl.ServerMessage(0, torch.zeros(156), buffers={"net.1.running_mean": torch.zeros(8)})
REFUSED = {
    "epochs": ({"trainer": {"max_epochs": 3}}, None, "trainer must leave max_epochs to the visit, found max_epochs=3"),
    "devices": ({"trainer": {"accelerator": "cpu", "devices": "2"}}, None, "found num_devices=2 and num_nodes=1"),
    "nodes": ({"trainer": {"accelerator": "cpu", "num_nodes": 2}}, None, "found num_devices=1 and num_nodes=2"),
    "strategy of processes": ({"trainer": {"strategy": "ddp_spawn"}}, None, "must leave strategy to the visit, found"),
    "clients": ({"num_clients": 1}, None, "the first from 0 and below the second, found 1 and 1"),
    "all data": (
        {"data": federated_blobs(4), "num_clients": 4},
        None,
        "num_clients must be left out where data has all",
    ),
    "params": (
        {},
        fl.ServerMessage(0, torch.zeros(3)),
        r"params must be torch.float32 \[140\], found torch.float32 \[3\]",
    ),
    "dtype": (
        {},
        fl.ServerMessage(0, torch.zeros(140, dtype=torch.float64)),
        r"params must be torch.float32 \[140\], found torch.float64 \[140\]",
    ),
    "buffers": (
        {"module": fresh(norm=True)},
        NORMED,
        "buffers must be those of the module, .*found {'net.1.running_mean'",
    ),
    "plateau": ({"module": fresh(Plateau)}, message(), "ReduceLROnPlateau steps by a validation metric"),
    "broadcast": ({"algorithm": SCAFFOLD()}, message(broadcast={"c": torch.zeros(3)}), "must have 140 numbers"),
    "no broadcast": (
        {"algorithm": SCAFFOLD()},
        message(broadcast={"c": "one"}),
        "broadcast and client_state must be those of ControlVariates: a tensor is needed, found str",
    ),
    "kept": (
        {"algorithm": MOON()},
        message(4, counted=2),
        "the memory of another process is gone, the state of client 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_is_refused_in_words(name):
    options, sent, words = REFUSED[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
        one_client(**options).train(sent or message())


@pytest.mark.parametrize(
    ("fields", "words"), [({"when": -1}, "round of ServerMessage must be"), ({"counted": 0}, "counted must be")]
)
def test_messages_of_no_round_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        message(**fields)
    with pytest.raises(ValueError, match="round of ClientMessage must be"):
        fl.ClientMessage(1, -1, torch.zeros(3), 1, None, None, None, {}, {}, {})


def test_stages_and_clients_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="stage of evaluate must be 'val' or 'test', found 'validation'"):
        one_client().evaluate(message(), "validation")
    with pytest.raises(IndexError, match="client_id must lie between 0 and 0, found 1"):
        one_client(federated_blobs(1)).introduction()


def test_a_folder_that_is_gone_is_named(tmp_path):
    client = one_client(algorithm=Ditto(), folder=tmp_path)
    client.train(message(0))
    client.train(message(1, counted=0))
    (tmp_path / "client-000001" / "round-000001.pt").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"round-000001.pt is gone, the state of client 1 after round 1.*counted=None"
    ):
        client.train(message(2, counted=1))
