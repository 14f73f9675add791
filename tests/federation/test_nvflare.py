# SPDX-License-Identifier: Apache-2.0
"""Federations on NVFlare give the bits of ``trainer.fit``; what goes wrong is named."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import hostile
import pytest
import torch
from by_hand import CARRIED, own_loader
from process_families import family
from resuming import ALGORITHMS
from support import Classifier, federated_blobs, fit, fresh, weights

import fl_lightning as fl
from fl_lightning.algorithms import MOON, SCAFFOLD, FedAvg, FedLF, FedMDFG

pytest.importorskip("nvflare")

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from fl_lightning.federation import nvflare
from fl_lightning.federation.nvflare import FederatedController, run_client

ROOT = Path(__file__).parents[2]
SITES = ["north", "east", "south", "west"]


def wired(model):
    """A message as it arrives: NVFlare has written and read it."""
    return FLModelUtils.from_shareable(fobs.loads(fobs.dumps(FLModelUtils.to_shareable(model))))


class Scripts:
    """Stands in for NVFlare's Client API: every site's script sees one message, answers it, and ends."""

    def __init__(self, make, monkeypatch):
        self.make, self.made = make, {}
        monkeypatch.setattr(nvflare, "flare", self)

    def deliver(self, task, model):
        """What the training script of a site sends for a message."""
        self.inbox, self.task, self.sent = [model], task, []
        run_client(self.client)
        return self.sent[0]

    def client(self, client_id):
        """The client of a site, which stays from message to message."""
        if client_id not in self.made:
            self.made[client_id] = self.make(client_id)
        return self.made[client_id]

    def init(self):
        pass

    def is_running(self):
        return bool(self.inbox)

    def receive(self):
        return self.inbox.pop()

    def get_task_name(self):
        return self.task

    def send(self, model):
        self.sent.append(model)


class Controller(FederatedController):
    """Without NVFlare's engine: messages are written and read, and answers come in reverse order."""

    def connect(self, scripts, silent=()):
        self.scripts, self.silent, self.waiting, self.records = scripts, silent, [], []
        return self

    def send_model(self, task_name, data, targets, timeout, callback):
        self.waiting.append((task_name, wired(data), targets[0], callback))

    def get_num_standing_tasks(self):
        for task, model, site, callback in reversed(self.waiting):
            if (task, site) not in self.silent:
                answer = wired(self.scripts.deliver(task, model))
                answer.meta["client_name"] = site
                callback(answer)
        self.waiting = []
        return 0

    def is_aborted(self):
        return False

    def _round(self, server):
        self.records.append(super()._round(server))
        return self.records[-1]


class Normed(Classifier):
    """With buffers, one of them not contiguous, and random numbers."""

    def __init__(self, **options):
        super().__init__(norm=True, dropout=0.3, **options)
        self.register_buffer("turned", torch.rand(3, 4, generator=torch.Generator().manual_seed(1)).T)


@pytest.fixture
def federation(monkeypatch, tmp_path):
    """Makes a controller of four clients, and the sites' scripts."""

    def made(method, module=Normed, rounds=3, silent=(), sites=SITES, theirs=None, folder="run", **options):
        data = federated_blobs(4)
        code = ModuleType("task_of_test")
        options = {"clients_per_round": 3, **options}
        code.server = lambda: fl.FederatedServer(fresh(module), fl.FederatedStrategy(method(), seed=5, **options), 4)
        monkeypatch.setitem(sys.modules, "task_of_test", code)

        def client(client_id):
            other = (theirs or {}).get(client_id, {})
            strategy = fl.FederatedStrategy(other.get("method", method)(), seed=other.get("seed", 5))
            return fl.FederatedClient(
                other.get("module") or fresh(module, 100 + client_id), own_loader(client_id, data), strategy, client_id,
                4, {"accelerator": "cpu"}, tmp_path / "kept",
            )  # fmt: skip

        controller = Controller("task_of_test:server", sites, rounds, folder=str(tmp_path / folder))
        return controller.connect(Scripts(client, monkeypatch), silent)

    return made


@pytest.fixture
def trained(tmp_path):
    """Weights and buffers of the checkpoint."""

    def read(module=Normed, folder="run"):
        found = fresh(module, seed=9)
        content = torch.load(tmp_path / folder / "last.ckpt", weights_only=True)
        found.load_state_dict(content["state_dict"])
        return weights(found)

    return read


def simulated(method, module=Normed, rounds=3, **options):
    """The same federation in a Trainer."""
    return weights(fit(fresh(module), rounds, data=federated_blobs(4), algorithm=method(), **options).module)


@pytest.mark.parametrize("name", CARRIED)
def test_every_method_gives_the_bits_of_a_fit(federation, trained, name):
    method = ALGORITHMS[name]
    federation(method).run()
    assert torch.equal(trained(), simulated(method))


def test_another_job_goes_on_from_the_checkpoint(federation, trained):
    federation(SCAFFOLD, rounds=2).run()
    assert not torch.equal(trained(), simulated(SCAFFOLD))
    federation(SCAFFOLD).run()
    assert torch.equal(trained(), simulated(SCAFFOLD))
    with pytest.raises(ValueError, match=r"SCAFFOLD .*became MOON"):
        federation(MOON).run()


class Fails(Normed):
    """Client 2 cannot train in the second round."""

    def training_step(self, batch, batch_idx):
        first = federated_blobs(4).train_dataloader()
        theirs = first.dataset.tensors[0][first.indices(2)[0]]
        if self.trainer.current_epoch == 1 and bool((batch[0] == theirs).all(1).any()):
            raise LookupError("a broken sample")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:client 2 is left out of round 1")  # what the Trainer says of the same
def test_a_client_that_raises_is_left_out_of_its_round_and_named(federation, trained):
    with pytest.warns(match=r"client 2 \('south'\) is left out of round 1: LookupError: a broken sample"):
        federation(FedLF, Fails).run()
    assert torch.equal(trained(Fails), simulated(FedLF, Fails, on_client_error="drop"))


@pytest.mark.filterwarnings("ignore:client .* is left out of round 0")
def test_a_client_that_does_not_say_its_loss_again_is_left_out(federation, trained):
    with pytest.warns(
        match=r"client 1 \('east'\) is left out of round 0: it was asked for its loss once more: no answer"
    ):
        federation(FedMDFG, rounds=1, silent=[("loss", "east")], clients_per_round=4).run()
    found = trained()
    federation(FedMDFG, rounds=1, silent=[("train", "east")], clients_per_round=4, folder="other").run()
    assert torch.equal(trained(folder="other"), found)


class Wider(Normed):
    def __init__(self):
        super().__init__(hidden=9)


REFUSED = {
    "method": (
        {"theirs": {1: {"method": MOON}}},
        "site east: it cannot take part: .*FedAvg became MOON",
    ),
    "seed": ({"theirs": {3: {"seed": 6}}}, "site west: it cannot take part: .*seed: 5 became 6"),
    "layout": ({"theirs": {0: {"module": Wider()}}}, "site north: it cannot take part: .*layout: .*net.0"),
    "silent": ({"silent": [("introduce", "south")]}, "site south: it does not introduce itself: no answer"),
    "sites": ({"sites": SITES[:3]}, "sites must be as many as num_clients of task_of_test:server, 4, found 3"),
    "twice": ({"sites": ["north", *SITES[:3]]}, "sites must be distinct names"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_ends_the_job_before_the_first_round(federation, tmp_path, name):
    options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        federation(FedAvg, **{"min_clients": 4, "clients_per_round": 4, **options}).run()
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:client 1 is left out of round")
def test_a_site_that_cannot_take_part_leaves_the_job_to_the_others(federation, trained):
    with pytest.warns(match="site east: it cannot take part: .*MOON.*; the others go on"):
        federation(FedAvg, theirs={1: {"method": MOON}}, clients_per_round=4, rounds=2).run()
    with pytest.warns(match="no answer"):
        federation(FedAvg, silent=[("train", "east")], clients_per_round=4, rounds=2, folder="other").run()
    assert torch.equal(trained(), trained(folder="other"))


@pytest.mark.filterwarnings("ignore:client 1 is left out of round")
def test_who_a_site_is_the_controller_knows(federation, monkeypatch):
    """A site that cannot take part is sent nothing, and the others are just as many as are needed."""
    answered, sent = nvflare._answer, []

    def answer(client, task, message):
        sent.append((task, client.client_id, message.get("rounds")))
        fields = answered(client, task, message)
        return {**fields, "client_id": 3, "name": "liar"} if task == "introduce" else fields

    monkeypatch.setattr(nvflare, "_answer", answer)
    controller = federation(FedAvg, rounds=1, clients_per_round=4, min_clients=3, theirs={1: {"method": MOON}})
    with pytest.warns(match="site east: it cannot take part"):
        controller.run()
    assert controller.records[0].client_names == ("north", "south", "west")
    assert controller.records[0].dropped[1].startswith("it cannot take part: from server to client, method")
    assert sorted(sent) == sorted([("introduce", k, None) for k in range(4)] + [("train", k, 1) for k in (0, 2, 3)])


def test_a_site_makes_its_client_once_and_the_controller_knows_which(federation):
    scripts, made = federation(FedAvg).scripts, []
    scripts.inbox = [FLModel(params={"message": {}}, meta={"client_id": 2}) for _ in range(2)]
    scripts.task, scripts.sent = "introduce", []
    run_client(lambda client_id: made.append(client_id) or scripts.client(client_id))
    assert made == [2]
    assert [model.params["client_id"] for model in scripts.sent] == [2, 2]


class Second(fl.data.CohortSampler):
    """Always the second site."""

    def select(self, *_):
        return fl.data.Selection((1,))


@pytest.mark.filterwarnings("ignore:client 1 is left out of round", "ignore:round . had no", "ignore:site east")
def test_rounds_of_sites_that_cannot_take_part_fail_in_nothing_that_the_controller_knows(federation):
    options = {"sampler": Second(), "clients_per_round": 1, "max_failed_rounds": 1}
    controller = federation(FedAvg, rounds=2, theirs={1: {"method": MOON}}, **options)
    controller.run()
    assert [record.skipped for record in controller.records] == ["no usable report"] * 2


def test_a_round_that_is_aborted_changes_nothing_that_the_controller_knows(federation, tmp_path):
    controller = federation(FedAvg, rounds=2)
    controller.is_aborted = lambda: bool(controller.scripts.made) and controller.scripts.task == "train"
    controller.run()
    assert controller.records == [None]
    assert not (tmp_path / "run" / "last.ckpt").exists()


@pytest.mark.parametrize("path", ["task_of_test", "task_of_test:nothing"])
def test_a_server_that_is_none_is_refused(federation, monkeypatch, path):
    controller = federation(FedAvg)
    sys.modules["task_of_test"].nothing = dict
    with pytest.raises(ValueError, match=r"server must be a module and|must return a FederatedServer, found dict"):
        Controller(path, SITES, 3).connect(controller.scripts).run()


@pytest.mark.parametrize("task", ["introduce", "train", "loss"])
@pytest.mark.filterwarnings("ignore:client 1 .*is left out of round", "ignore:site east: ")
def test_no_answer_of_one_site_ends_a_job(federation, task):
    """What fields hold, ``test_message_checks.py`` tries; these are none at all."""
    controller, answers = federation(FedMDFG, rounds=1, clients_per_round=4, min_clients=3), {}
    deliver = controller.scripts.deliver

    def delivered(kind, model):
        key = kind, model.meta["client_id"]
        if key not in answers:
            answers[key] = deliver(kind, model).params
        return FLModel(params=answers[key])

    controller.scripts.deliver = delivered
    for fields in ({"error": "a\nbroken\x1b sample"}, {"error": None}, {"error": {}}, {3: 1}, {"round": 0}):
        answers[task, 1] = fields
        shutil.rmtree(controller.folder, ignore_errors=True)
        controller.run()
        record = controller.records.pop()
        assert record.client_ids == (0, 2, 3)
        assert record.dropped[1].isprintable()
        before = {"loss": "it was asked for its loss once more: ", "introduce": "it does not introduce itself: "}
        if "error" in fields:
            assert record.dropped[1] == before.get(task, "") + str(fields["error"]).translate({10: "?", 27: "?"})


def test_no_message_of_a_server_ends_the_loop_of_a_site(federation):
    dice, controller, kept = random.Random(8), federation(SCAFFOLD, rounds=1, clients_per_round=4), []
    deliver = controller.scripts.deliver
    controller.scripts.deliver = lambda task, model: kept.append((task, model)) or deliver(task, model)
    controller.run()
    orders = [(task, model) for task, model in kept if model.meta["client_id"] == 1]
    honest = {task: deliver(task, model).params for task, model in orders}
    with hostile.nothing_unpickled():
        for _ in range(hostile.CASES // 3):
            task, model = dice.choice(orders)
            changed = hostile.mutated(dice, {"params": dict(model.params), "meta": {"client_id": 1}})
            task = dice.choice((task, task, task, "train", "other", ""))
            answer = deliver(task, SimpleNamespace(params=changed.get("params"), meta={"client_id": 1}))
            assert answer.params
    for task, model in orders:
        again = deliver(task, model).params
        assert again.keys() == honest[task].keys()
        if task == "train":
            assert torch.equal(again["update"], honest[task]["update"])


# ---- NVFlare itself


@pytest.mark.process
def test_the_simulator_gives_the_bits_of_a_fit(tmp_path):
    """The example's own command: a server and three sites in processes of their own."""
    command = [sys.executable, str(ROOT / "examples" / "nvflare_digits" / "job.py"), "--folder", str(tmp_path / "job")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with family() as processes, open(tmp_path / "log", "w") as log:
        done = subprocess.run(command, env={**env, **processes.env}, stdout=log, stderr=log, timeout=300, check=False)
    words = (tmp_path / "log").read_text()
    assert done.returncode == 0, words[-6000:]
    assert "the weights are equal, bit for bit" in words
