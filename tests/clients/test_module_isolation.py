# SPDX-License-Identifier: Apache-2.0
"""What a module keeps from step to step: every visit begins as the round found it, and the round goes on from there."""

import pickle
from collections import deque

import lightning as L
import pytest
import torch
from by_hand import wired
from resuming import Rows, SaveAt
from support import training_only
from torchmetrics import SumMetric
from visit_variants import LOST, REFUSED, VARIANTS, WIDTH, Together
from visits_by_hand import PARTS, Samples, rounds_by_hand
from worker_processes import EXECUTORS, HERE

import fl_lightning as fl
from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.core.errors import ModuleError
from fl_lightning.core.processes import pack, unpack


def differing(one, other, atol=0):
    return sorted(name for name in one if not torch.allclose(one[name], other[name], rtol=0, atol=atol))


def in_turn(module, executor=None, method=fl.algorithms.FedAvg, rounds=3):
    strategy = fl.FederatedStrategy(method(), executor=executor)
    training_only(strategy, rounds).fit(module, fl.FederatedDataModule(Samples(), PARTS))
    assert strategy.executor_fallback is None
    return module


def in_workers(module):
    return in_turn(module, fl.executors.Parallel(2))


def in_a_federation(module, rounds=3):
    def make():
        return Together(list(module.parts))

    strategy = fl.FederatedStrategy()
    server = fl.FederatedServer(module, strategy, 3, rounds=rounds)
    trainer = {"accelerator": "cpu"}
    clients = [fl.FederatedClient(make(), Samples(k), strategy, k, 3, trainer=trainer) for k in range(3)]
    for client in clients:
        server.register(wired(client.introduction()))
    for _ in range(rounds):
        answers = {k: wired(clients[k].train(wired(server.message(k)))) for k in server.open_round()}
        server.close_round(answers)
    server.finish()
    return server.module


CARRIERS = {"in turn": in_turn, "workers": in_workers, "federation": in_a_federation}


@pytest.fixture(scope="module")
def by_hand():
    """The weights of each variant, of which every client trains a copy of its own."""
    batches = [list(Samples(client).train_dataloader()) for client in range(3)]
    return {
        name: rounds_by_hand(Together([name]).parts[name], batches, 3, name in LOST).w.detach() for name in VARIANTS
    }


@pytest.mark.filterwarnings("ignore:what training gathers in Together goes to the server")
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_client_trains_a_copy_of_its_own(carrier, by_hand):
    with pytest.warns(UserWarning, match="what clients leave in Together must be plain values") as said:
        found = CARRIERS[carrier](Together()).found()
    assert not differing(found, by_hand, atol=1e-6)
    words = {str(one.message) for one in said if "must be plain values" in str(one.message)}
    assert len(words) == 1, "nothing is said twice"
    assert set(words.pop().partition("after every client: ")[2].replace("parts.", "").split("; ")) == {
        f"{name}.{what}" for name, what in LOST.items()
    }


@pytest.mark.parametrize("variant", REFUSED)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_no_visit_may_change_is_refused_by_name(carrier, variant):
    with pytest.raises(
        (fl.ClientError, ModuleError), match=rf"found changes in .parts\.{variant}\.{REFUSED[variant].changes}"
    ):
        CARRIERS[carrier](Together([variant]))


@pytest.mark.filterwarnings("ignore:what clients leave in Together", "ignore:Seems like `optimizer.step")
def test_worker_processes_give_the_same_bits_with_other_methods():
    ends = [
        in_turn(Together(), executor, fl.algorithms.FedLF, 2).found() for executor in (None, fl.executors.Parallel(3))
    ]
    assert not differing(*ends)


def can_travel(name):
    try:
        pickle.dumps(Together([name]))
    except TypeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:what clients leave in Together", "ignore:Seems like `optimizer.step")
def test_copies_that_were_pickled_call_objects_by_the_same_names():
    names = list(filter(can_travel, VARIANTS))
    assert len(names) > 70
    ends = [in_turn(Together(names), executor).found() for executor in (None, HERE)]
    assert not differing(*ends)


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_one_client_with_all_data_is_plain_lightning():
    names, ends = sorted(VARIANTS.keys() - LOST.keys()), []
    for strategy in ("auto", fl.FederatedStrategy()):
        module, data = Together(names), Samples()
        divided = data if strategy == "auto" else fl.FederatedDataModule(data, [torch.arange(44)])
        training_only(strategy, 3).fit(module, divided)
        ends.append(module.found())
    assert not differing(*ends)


class Between(L.Callback):
    """Changes an attribute between two clients of a round."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for part in pl_module.parts.values():
            part.n = 10 * batch_idx


@pytest.mark.parametrize("executor", [None, fl.executors.Parallel(2)])
def test_what_callbacks_change_between_clients_stays(executor):
    module = Together(["counts_steps"])
    strategy = fl.FederatedStrategy(executor=executor)
    data = fl.FederatedDataModule(Samples(), torch.arange(44).split([9, 12, 23]))
    training_only(strategy, 1, callbacks=[Between()]).fit(module, data)
    assert module.parts["counts_steps"].n == 20 + 3  # the last client has most samples, and three batches


class Gathers(L.LightningModule):
    """Keeps a bit of everything that is joined or chosen."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(WIDTH))
        self.seen, self.by_name, self.last = [], {}, deque([-1], maxlen=4)
        self.count, self.latest, self.sizes = 0, None, SumMetric()
        self.starts = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.starts.append((self.count, len(self.seen), float(self.sizes.compute())))
        self.count += 1
        self.w.steps = getattr(self.w, "steps", 0) + 1
        self.latest = float(batch[0][0, 0])
        self.seen.append(self.latest)
        self.by_name.setdefault("first", []).append(self.latest)
        self.last.append(len(batch[0]))
        self.sizes.update(len(batch[0]))
        return (batch[0] @ self.w - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_outcomes_are_joined_in_the_order_of_the_cohort(executor):
    module, data, parts = Gathers(), Samples(), PARTS
    strategy = fl.FederatedStrategy(executor=executor)
    training_only(strategy, 2).fit(module, fl.FederatedDataModule(data, parts))
    firsts = [float(data.samples.tensors[0][i, 0]) for i in (0, 10, 12, 21, 31, 41)]  # two, one and three batches
    assert module.seen == 2 * firsts
    assert module.by_name["first"] == firsts[3:] + firsts  # first that of the largest client, which nobody had before
    # Three steps of the largest client in each round.
    assert (module.count, module.w.steps, module.latest) == (6, 6, firsts[-1])
    assert list(module.last) == [9, 10, 10, 3]
    assert module.sizes.compute() == 88
    assert module.starts == 3 * [(0, 0, 0.0)] + 3 * [(3, 6, 0.0)]


def test_hooks_come_back_and_are_refused():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    first = module[0].register_forward_hook(print)
    isolation = ModuleIsolation(module)
    isolation.begin()
    assert isolation.changed() == []
    first.remove()
    module[1].register_forward_pre_hook(print)
    assert isolation.changed() == ["0._forward_hooks", "1._forward_pre_hooks"]
    with pytest.raises(ModuleError, match=r"submodules or hooks.*found changes in '0\._forward_hooks'"):
        isolation.end()
    isolation.restore()
    assert list(module[0]._forward_hooks) == [first.id]
    assert not module[1]._forward_pre_hooks


def test_objects_that_hold_one_another_come_back_and_go_on(tmp_path):
    class Holder(torch.nn.Module):
        pass

    module = Holder()
    module.shared = [1.0]
    module.twice = {"a": module.shared, "b": [module.shared]}
    module.file = (tmp_path / "file").open("w")
    isolation, shared = ModuleIsolation(module), module.shared
    assert isolation.unfollowed() == ["attribute 'file' (TextIOWrapper) cannot be put back after a client"]
    outcomes = []
    for value in (2.0, 3.0):
        isolation.begin()
        module.shared[0] = value
        module.twice["b"].append(module.shared)
        del module.twice["a"]
        outcomes.append(isolation.end())
        isolation.restore()
        assert shared == [1.0]
        assert module.twice == {"a": shared, "b": [shared]}
    outcomes = [unpack(pack(outcome), torch.device("cpu")) for outcome in outcomes]
    isolation.merge(outcomes, None)
    assert module.twice["b"] == [shared, shared, shared]
    isolation.merge([], outcomes[0])
    isolation.merge(outcomes[1:], outcomes[1])
    assert module.shared is shared
    assert shared == [3.0]
    assert list(module.twice) == ["b"]
    assert all(item is shared for item in module.twice["b"])
    module.file.close()


class Saves(Gathers):
    """Writes its attributes into checkpoints itself, and anneals."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0.9**self.count

    def on_save_checkpoint(self, checkpoint):
        checkpoint["own"] = {"count": self.count, "last": list(self.last)}

    def on_load_checkpoint(self, checkpoint):
        self.count, self.last = checkpoint["own"]["count"], deque(checkpoint["own"]["last"], maxlen=4)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_a_fit_that_is_resumed_in_the_middle_of_a_round_goes_on_from_the_same_attributes(tmp_path):
    ends, save = [], SaveAt(tmp_path, 1, ("on_train_batch_end-1",))
    for checkpoint in (None, tmp_path / "on_train_batch_end-1.ckpt"):
        module = Saves()
        data = fl.FederatedDataModule(Samples(), PARTS)
        trainer = training_only(fl.FederatedStrategy(), 3, logger=Rows(), callbacks=[save])
        trainer.fit(module, data, ckpt_path=checkpoint)
        ends.append((module.w.tolist(), module.count, list(module.last)))
    assert ends[0] == ends[1]
    assert ends[0][1] == 9
