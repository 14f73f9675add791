# SPDX-License-Identifier: Apache-2.0
"""Whose answers count at a server, in what, and what of it a restart remembers: answers are made here, by hand."""

import math
from dataclasses import replace

import lightning as L
import pytest
import torch
from support import fresh, reload

import fl_lightning as fl
from fl_lightning.algorithms import AFL, FA, ClientRule, FairFed, FairReg, FedAvg, FedFa, FedMGDAPlus, Needs, QFedAvg
from fl_lightning.data import AllClients, Selection

pytestmark = pytest.mark.filterwarnings(
    "ignore:client .* is left out of round", "ignore:round \\d+ (had|was left out)", "ignore:client 0 computes with"
)


class Looks(FedAvg):
    """Writes down what the server lets in."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def aggregate(self, cohort):
        self.seen.append((cohort.client_ids, cohort.sizes.tolist(), cohort.num_samples))
        return super().aggregate(cohort)


class Weighs(Looks):
    """Needs losses, and learning rates."""

    needs = Needs(losses=True, client_lr=True)


class Fading(AllClients):
    """Client 3 trains and vanishes in every round."""

    def select(self, *_):
        return Selection((0, 1, 2, 3), (3,))


def made(method=Looks, module=None, **options):
    module = fresh(norm=True) if module is None else module
    strategy = fl.FederatedStrategy(method(), **{"sampler": AllClients(), "seed": 5, **options})
    return fl.FederatedServer(module, strategy, 4, rounds=9)


def introduced(server, steps=(4, 0, 7, 7), sizes=(10, 20, 30, 40)):
    for client, (number, size) in enumerate(zip(steps, sizes, strict=True)):
        description = server.fit_description.state_dict()
        server.register(fl.ClientIntroduction(client, f"ward {client}", size, number, description, server._frozen))
    return server


def answer(server, client, **fields):
    message = server.message(client)
    generator = torch.Generator().manual_seed(10 * message.round + client)
    buffers = {name: value + client + 1 for name, value in message.buffers.items()}
    made = fl.ClientMessage(
        client, message.round, torch.randn(message.params.shape, generator=generator), 10 * (client + 1), 0.5, 0.25,
        0.1 * (client + 1), {}, {}, buffers, client + 1,
    )  # fmt: skip
    return replace(made, **fields)


def answered(server, cohort=None, **of_one):
    """Everybody's answers, reversed; ``of_one`` are fields of client 2's."""
    cohort = server.open_round() if cohort is None else cohort
    answers = {k: answer(server, k) for k in reversed(cohort)}
    return {**answers, 2: {**vars(answers[2]), **of_one}} if of_one else answers


BUFFERS = {name: value.clone() for name, value in fresh(norm=True).named_buffers()}
ODD = [
    *({"size": value} for value in (0, 2**63, 10**13, 10**30)),
    *({"loss": value} for value in (None, 10**400, math.nan)),
    *({"train_loss": value} for value in (10**400, -1e308)),
    *({"client_lr": value} for value in (None, math.nan, math.inf)),
    *({"update": value} for value in (torch.full((156,), math.nan), torch.zeros(156, dtype=torch.float64))),
    *({"update": value} for value in (torch.full((156,), -2e30), torch.full((156,), 1e31), torch.zeros(3))),
    {"client_id": 1}, {"round": 3}, {"steps": 10**30}, {"extras": 3},
    {"extras": {"more": torch.zeros(3)}}, {"extras": {"more": torch.zeros(3, dtype=torch.complex64)}},
    {"companions": {"more": torch.zeros(156)}}, {"companions": {"control": torch.full((156,), 2e30)}},
    {"buffers": {}}, {"buffers": {**BUFFERS, "net.1.running_mean": torch.zeros(8, dtype=torch.float64)}},
]  # fmt: skip


@pytest.mark.parametrize("fields", ODD, ids=lambda fields: str(fields)[:40])
def test_an_odd_answer_counts_in_nothing(fields):
    server, other = introduced(made(Weighs)), introduced(made(Weighs))
    record = server.close_round(answered(server, **fields))
    answers = answered(other)
    del answers[2]
    expected = other.close_round(answers, {2: "nothing"})
    assert record.client_ids == expected.client_ids == (0, 1, 3)
    assert record.dropped.keys() == {2}
    assert server.counted == dict.fromkeys((0, 1, 3), 0)
    assert server.algorithm.seen == [((0, 1, 3), [10.0, 20.0, 40.0], 100)]
    assert server.learning_rate == pytest.approx((0.1 + 0.2 + 0.4) / 3)
    assert record.local_steps == 1 + 2 + 4
    assert server.client_sizes.tolist() == [10, 20, 30, 40]
    for one, two in zip(server.module_state_dict().values(), other.module_state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_reasons_are_in_the_record():
    server = made(Weighs)
    assert server.close_round(answered(server, loss=None)).dropped == {2: "it sent no loss"}
    server = made()
    server.open_round()
    record = server.close_round({2: answer(server, 2, extras={"more": torch.zeros(3, dtype=torch.complex64)})})
    assert record.dropped[2] == "its extras must be real, found complex ones"


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


COUNTED = {"group_predictions": numbers([2, 3], [4, 5]), "right_predictions": numbers(7, 10)}
SUMS = {"group_counts": numbers(20, 8), "kernel_sums": numbers([15, 12], [9, 4], [-3, 5], [1, 2])}
LIES = {
    "an accuracy": (FedFa, {"accuracy": numbers(0.5)[0]}, {"accuracy": numbers(1.5)[0]}),
    "more right than there are": (FairFed, COUNTED, {"right_predictions": numbers(11, 10)}),
    "more samples than it has": (FairFed, COUNTED, {"right_predictions": numbers(20, 31)}),
    "more of a group than the group": (FairFed, COUNTED, {"group_predictions": numbers([5, 3], [4, 5])}),
    "more in groups than samples": (FairFed, COUNTED, {"group_predictions": numbers([2, 3], [6, 5])}),
    "less than nobody": (FairFed, COUNTED, {"group_predictions": numbers([2, -1], [4, 5])}),
    "a disparity": (FairReg, {"disparity": numbers(0.1)[0]}, {"disparity": numbers(1.5)[0]}),
    "more members than samples": (lambda: FA([[0.0], [1.0]]), SUMS, {"group_counts": numbers(20, 21)}),
    "kernels above 1": (lambda: FA([[0.0], [1.0]]), SUMS, {"kernel_sums": SUMS["kernel_sums"] + 6}),
    "kernels below 0": (lambda: FA([[0.0], [1.0]]), SUMS, {"kernel_sums": -SUMS["kernel_sums"]}),
    "any large number": (FedAvg, {"more": numbers(1e30)}, {"more": numbers(-2e30)}),
}


@pytest.mark.parametrize("name", LIES)
def test_what_no_client_can_have_found_counts_in_nothing(name):
    method, honest, lie = LIES[name]
    companions = {"disparity": torch.zeros(156)} if "disparity" in honest else {}
    found = []
    for extras in (honest, {**honest, **lie}, None):
        server = introduced(made(method))
        answers = {k: answer(server, k, extras=honest, companions=companions) for k in server.open_round()}
        answers[2] = replace(answers[2], extras=extras) if extras else {"update": "nothing"}
        found.append((server.close_round(answers), server.module_state_dict()))
    assert [record.client_ids for record, _ in found] == [(0, 1, 2, 3), (0, 1, 3), (0, 1, 3)]
    assert repr(next(iter(lie))) in found[1][0].dropped[2]
    assert all(torch.equal(value, found[2][1][key]) for key, value in found[1][1].items())


def test_one_client_does_not_set_the_learning_rate_of_all():
    for method, dropped in ((FedAvg, set()), (lambda: FedMGDAPlus(server_lr=None), {2})):
        server = introduced(made(method))
        record = server.close_round(answered(server, client_lr=1e6))
        assert record.dropped.keys() == dropped
    assert record.dropped[2] == "its learning rate must be at most 100 times the median, 30, found 1e+06"
    answers = {k: replace(a, client_lr=0.0 if k < 3 else 0.1) for k, a in answered(server).items()}
    assert server.close_round(answers).dropped == {}


def test_the_step_is_the_mean_of_what_counts():
    server = introduced(made())
    before, answers = server.message(0).params.clone(), answered(server)
    record = server.close_round(answers)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    step = sum(weights[k] * answers[k].update for k in range(4))
    torch.testing.assert_close(server.message(0).params, before - step)
    means = server.message(0).buffers["net.1.running_mean"]
    torch.testing.assert_close(means, torch.full((8,), float((weights * torch.tensor([1.0, 2, 3, 4])).sum())))
    assert record.client_names == ("ward 0", "ward 1", "ward 2", "ward 3")
    assert record.train_loss == 0.25
    assert record.round == 0
    assert server.round == 1


def test_sizes_follow_what_clients_say_now():
    server = introduced(made())
    server.close_round(answered(server, size=1000))
    assert server.client_sizes.tolist() == [10, 20, 1000, 40]
    assert server.algorithm.seen[-1][2] == 1070
    partly = made()
    partly.register(fl.ClientIntroduction(2, "a", 10, 1, partly.fit_description.state_dict(), partly._frozen))
    partly.close_round(answered(partly))
    assert partly.client_sizes.tolist() == [0, 0, 30, 0]
    assert partly.algorithm.seen == [((0, 1, 2, 3), [10.0, 20.0, 30.0, 40.0], None)]
    assert partly.client_names == ("0", "1", "a", "3")
    assert partly.message(0).steps_per_round == 1


REFUSED = {
    "method": (lambda: made(FedAvg), {}),
    "arguments": (lambda: made(lambda: QFedAvg(2.0)), {}),
    "layout": (lambda: made(QFedAvg, fresh(norm=True, hidden=9)), {}),
    "settings": (lambda: made(QFedAvg, seed=6), {}),
    "version": (lambda: made(QFedAvg), {"versions": {"fl_lightning": "9.9"}}),
    "frozen": (lambda: made(QFedAvg), {}),
    "id": (lambda: made(QFedAvg), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_who_computes_something_else_is_refused(name):
    (other, changed), server = REFUSED[name], made(QFedAvg)
    description = {**other().fit_description.state_dict(), **changed}
    frozen = "others" if name == "frozen" else server._frozen
    told = fl.ClientIntroduction(4 if name == "id" else 3, "x", 10, 1, description, frozen)
    words = {"settings": "seed: 5 became 6", "arguments": "q=2.0", "id": "from 0 to 3, found 4"}.get(name, name)
    assert words in server.refusal(told)
    with pytest.raises(ValueError, match="cannot take part"):
        server.register(told)
    assert server.registered == frozenset()


@pytest.mark.parametrize("steps", [(4, 0, 7, 7), (6, 6, 6, 6), (0, 0, 0, 0)])
def test_a_round_is_as_long_as_the_mean_visit(steps):
    server = introduced(made(), steps)
    server.open_round()
    assert server.message(1).steps_per_round == (6 if any(steps) else None)
    assert server.message(1).rounds == 9


def test_who_drops_out_is_not_waited_for():
    server = introduced(made(sampler=Fading()))
    assert server.open_round() == (0, 1, 2)
    record = server.close_round(answered(server, (0, 1, 2)))
    assert record.dropped == {3: "dropped out"}
    assert record.client_ids == (0, 1, 2)


def test_rounds_fail_where_clients_answered_and_nothing_came_of_it():
    server = made(max_failed_rounds=2)
    for _ in range(4):  # nobody is there
        server.open_round()
        record = server.close_round({}, dict.fromkeys(range(4), "no reply"), silent=range(4))
        assert record.skipped == "no usable report"
    assert record.skipped_rounds == 4
    server.open_round()
    server.close_round({}, {0: "it raised", 1: "no reply"}, silent=[1, 2, 3])
    again = made(max_failed_rounds=2)
    again.load_state_dict(reload(server.state_dict()))
    for each in (server, again):
        each.open_round()
        with pytest.raises(fl.ClientError, match="2 rounds in a row changed nothing"):
            each.close_round({2: answer(each, 2, update=torch.zeros(3))}, {0: "no reply"}, silent=[0, 1, 3])
        state = each.state_dict()  # the round is open still, and is not counted before it ends
        assert (state["round"], state["skipped_rounds"], state["failed_rounds"]) == (5, 5, 1)


def test_a_round_that_counts_ends_the_row_of_failed_ones():
    server = introduced(made(max_failed_rounds=2))
    for fails in (True, False, True):
        answers = answered(server)
        server.close_round({} if fails else answers, {0: "it raised"} if fails else None)
    assert server.round == 3
    assert server.counted == dict.fromkeys(range(4), 1)


def test_everybody_who_was_asked_and_says_nothing_is_named():
    server = made()
    server.open_round()
    record = server.close_round({1: answer(server, 1)}, {0: "a\nreason"})
    assert record.dropped == {0: "a?reason", 2: "no answer", 3: "no answer"}


@pytest.mark.parametrize("method", [Looks, AFL])
def test_a_restart_remembers_everything(method):
    optimizer = {"server_optimizer": torch.optim.Adam}
    server = introduced(made(method, **optimizer))
    for index in range(3):
        cohort = server.open_round()
        answers = answered(server, cohort)
        server.close_round({k: answers[k] for k in cohort if k != index}, {index: "lost"})
    server.open_round()
    server.close_round({}, dict.fromkeys(range(4), "lost"), silent=range(4))
    again, state = made(method, fresh(seed=99, norm=True), **optimizer), server.state_dict()
    saved = reload(state)
    again.load_state_dict(saved)
    assert (again.round, again.counted) == (4, {0: 2, 1: 2, 2: 1, 3: 2})
    assert again.client_names == server.client_names
    assert again.client_sizes.tolist() == [10, 20, 30, 40]
    assert again.registered == frozenset(range(4))
    for each in (server, again):
        cohort = each.open_round()
        assert each.message(2).steps_per_round == 6
        assert each.message(2).counted == 1
        assert each.evaluation_message(2).counted == 1
        assert each.evaluation_message(2).round == 4
        record = each.close_round(answered(each, cohort))
        assert record.client_names == ("ward 0", "ward 1", "ward 2", "ward 3")
        assert (record.skipped_rounds, record.local_steps) == (1, 2 + 3 + 4 + 1 + 3 + 4 + 1 + 2 + 4 + 10)
    assert torch.equal(state["params"], saved["params"]), "a state is a copy"
    trained = again._model.binding.layout.views(saved["params"])
    named = dict(zip(again._model.binding.layout.names, trained, strict=True))
    same = all(torch.equal(saved["state_dict"][name], value) for name, value in named.items())
    assert same == (method is Looks), "the module is to be evaluated"
    assert (server.evaluated_params is server.message(0).params) == (method is Looks)
    told = server.evaluation_message(0)
    assert torch.equal(told.params, server.evaluated_params)
    assert torch.equal(told.buffers["net.1.running_mean"], server.message(0).buffers["net.1.running_mean"])
    for one, two in zip(server.module_state_dict().values(), again.module_state_dict().values(), strict=True):
        assert torch.equal(one, two)
    evaluated = server.evaluated_params.clone()
    server.finish()
    assert torch.equal(torch.cat([p.detach().flatten() for p in server.module.parameters()]), evaluated)


def test_clients_that_come_back_do_not_change_how_long_a_round_is():
    server, again = introduced(made()), made()
    server.open_round()
    server.close_round(answered(server))
    again.load_state_dict(reload(server.state_dict()))
    introduced(again, steps=(9, 9, 9, 9)).open_round()
    assert again.message(0).steps_per_round == 6


def test_other_versions_of_a_state_are_refused():
    server = made()
    with pytest.raises(ValueError, match="the state has version 7, and this fl_lightning reads version"):
        server.load_state_dict({**server.state_dict(), "version": 7})


class Late(torch.nn.Module):
    def __init__(self, frozen=2.0):
        super().__init__()
        self.frozen = frozen

    def make(self):
        torch.manual_seed(0)
        self.trained, self.idle = torch.nn.Linear(2, 3), torch.nn.Linear(3, 4)
        self.fixed = torch.nn.Parameter(torch.full((2,), self.frozen), requires_grad=False)


class OfLate(L.LightningModule):
    """Makes its parts late, and trains one of them."""

    def __init__(self, frozen=2.0):
        super().__init__()
        self.net = Late(frozen)

    def configure_model(self):
        self.net.make()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.trained.parameters(), lr=0.1)


def test_a_server_is_made_of_what_its_module_trains():
    server = made(FedAvg, OfLate())
    server.open_round()
    assert server.message(0).params.numel() == 9
    assert server._frozen == made(FedAvg, OfLate())._frozen != made(FedAvg, OfLate(3.0))._frozen
    server.finish()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in server.module.parameters())


class Refuses(ClientRule):
    def check_module(self, module, layout):
        raise ValueError(f"{type(module).__name__} has {layout.numel} parameters")


def test_a_rule_refuses_a_server_s_module():
    with pytest.raises(ValueError, match="Classifier has 156 parameters"):
        made(client=Refuses())
