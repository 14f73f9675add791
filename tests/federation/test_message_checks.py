# SPDX-License-Identifier: Apache-2.0
"""Whatever one client, or a server, sends: nobody else notices, and the record names who sent what."""

import io
import math
import random
from collections import Counter
from dataclasses import replace

import hostile
import pytest
import torch
from by_hand import own_loader
from support import Classifier, federated_blobs, fresh

import fl_lightning as fl
from fl_lightning.algorithms import SCAFFOLD, FedAvg, FedHEAL, FedMDFG, QFedAvg
from fl_lightning.federation.message_checks import (
    FEDERATION,
    METRICS,
    SENTENCE,
    MessageError,
    evaluation,
    loss,
    printable,
    read,
)
from fl_lightning.federation.server_run import joined

pytestmark = pytest.mark.filterwarnings(
    "ignore:client \\d .*is left out of round", "ignore:client \\d computes with other versions",
    "ignore:round \\d (had|was left out)",
)  # fmt: skip
METHODS = {"FedAvg": FedAvg, "QFedAvg": QFedAvg, "SCAFFOLD": SCAFFOLD, "FedMDFG": FedMDFG}
WILD = 1
"""The client that sends whatever it likes."""


def made_server(method):
    return fl.FederatedServer(fresh(norm=True), fl.FederatedStrategy(method(), seed=5), 4, rounds=3)


def made_client(method, client):
    module, data = fresh(seed=50 + client, norm=True), own_loader(client, federated_blobs(4))
    strategy = fl.FederatedStrategy(method(), seed=5)
    return fl.FederatedClient(module, data, strategy, client, 4, trainer={"accelerator": "cpu"})


class Recorded:
    """Four clients' introductions and answers of round 0, and the model of the honest three."""

    def __init__(self, method):
        self.method, server = method, made_server(method)
        clients = [made_client(method, k) for k in range(4)]
        self.introductions = [vars(client.introduction()) for client in clients]
        server.open_round()
        self.orders = [vars(server.message(k)) for k in range(4)]
        self.answers = {k: vars(clients[k].train(self.orders[k])) for k in range(4)}
        self.expected = self.closed({k: v for k, v in self.answers.items() if k != WILD}, {WILD: "nothing"})[1]

    def closed(self, answers, missing=None, last=0.5):
        """The record and the weights after the round; client 1 says ``last`` when it is asked for its loss again."""
        server = made_server(self.method)
        for introduction in self.introductions:
            server.register(introduction)
        server.open_round()
        asked = {k: {0: 0.3, WILD: last, 2: 0.4, 3: 0.6}[k] for k in range(4)}
        record = server.close_round(answers, missing, lambda params, ids: {k: asked[k] for k in ids})
        return record, server.module_state_dict()


@pytest.fixture(scope="module", params=METHODS)
def recorded(request):
    return Recorded(METHODS[request.param])


@pytest.fixture(scope="module")
def weighed():
    return Recorded(QFedAvg)


@pytest.fixture(scope="module")
def plain():
    return Recorded(FedAvg)


def same(one, two):
    return all(torch.equal(one[name], value) for name, value in two.items())


def arrived(dice, fields):
    """The fields as ``torch.save`` carries them, perhaps damaged on their way; ``None`` if nobody can read them."""
    file = io.BytesIO()
    try:
        torch.save(fields, file)
    except RecursionError:  # nobody could have sent it in this way
        return fields
    data = hostile.damaged(dice, file.getvalue()) if dice.random() < 0.1 else file.getvalue()
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        return None


def test_no_answer_of_one_client_ends_a_round(recorded):
    dice, ends = random.Random(0), Counter()
    with hostile.nothing_unpickled():
        for case in range(hostile.CASES // len(METHODS)):
            fields = arrived(dice, hostile.mutated(dice, recorded.answers[WILD]))
            record, found = recorded.closed({**recorded.answers, WILD: fields})
            left_out = WILD in record.dropped
            ends[left_out] += 1
            assert set(record.client_ids) | record.dropped.keys() == {0, 1, 2, 3}, case
            assert record.client_ids == ((0, 2, 3) if left_out else (0, 1, 2, 3)), (case, record)
            assert not left_out or (record.dropped[WILD] and same(found, recorded.expected)), (case, record.dropped)
            assert all(value.isfinite().all() for value in found.values()), case
    assert ends[True] > ends[False]


LOSSES = (*hostile.NUMBERS, *hostile.TEXTS, [], {}, torch.zeros(3), torch.tensor(0.5, dtype=torch.complex64), object())


def test_no_loss_of_one_client_ends_a_round():
    recorded = Recorded(FedMDFG)
    for last in LOSSES:
        record, found = recorded.closed(recorded.answers, last=last)
        usable = type(last) in (int, float) and -1e15 <= last <= 1e15
        assert (WILD in record.dropped) == (not usable), last
        assert usable or same(found, recorded.expected), last


def test_no_introduction_ends_a_federation(recorded):
    dice, server = random.Random(1), made_server(recorded.method)
    expected = made_server(recorded.method)
    for introduction in recorded.introductions:
        server.register(introduction)
        expected.register(introduction)
    told = Counter()
    with hostile.nothing_unpickled():
        for case in range(hostile.CASES // len(METHODS)):
            fields = hostile.mutated(dice, recorded.introductions[WILD])
            words = server.refusal(fields)
            told[words is None] += 1
            assert words is None or (0 < len(words) <= 1100 and words.isprintable()), case
            if words is None and fields["client_id"] == WILD:  # who somebody is, the transport knows
                server.register(fields)
                assert all(name.isprintable() and len(name) <= 200 for name in server.client_names)
            server.register(recorded.introductions[WILD])
    assert told[False] > 0
    assert server.state_dict()["clients"] == expected.state_dict()["clients"]


@pytest.mark.parametrize(
    "fields",
    [{"description": {}}, {"description": {"versions": 5}}, {"description": {"layout": [1], "method": torch.ones(2)}},
     {"size": 2**63}, {"size": 10**13}, {"name": "n" * 10**6}, {"name": "a\nb"}, {"name": "\ud800"}, {"steps": 10**30},
     {"client_id": 4}],
)  # fmt: skip
def test_introductions_that_are_none_are_refused(plain, fields):
    server = made_server(FedAvg)
    with pytest.raises(ValueError, match=r"the message|client \d+ cannot take part"):
        server.register({**plain.introductions[WILD], **fields})
    assert server.registered == frozenset()


def test_one_client_does_not_set_the_length_of_rounds(plain):
    server = made_server(FedAvg)
    for introduction in plain.introductions:
        server.register({**introduction, **({"steps": 10**9} if introduction["client_id"] == WILD else {})})
    with pytest.warns(match=r"must not follow clients \{1: 1000000000\}"):
        server.open_round()
    others = [k["steps"] for k in plain.introductions if k["client_id"] != WILD]
    assert server.message(0).steps_per_round == -(-sum(others) // 3)


class Refusing(FedHEAL):
    """A method that finds only in the middle of its work what a client sent."""

    def aggregate(self, cohort):
        if 10 in cohort.sizes.tolist():
            raise LookupError("ten is too few")
        return super().aggregate(cohort)


@pytest.mark.parametrize("diverged", [False, True])
def test_who_breaks_the_method_is_left_out(diverged):
    recorded = Recorded(Refusing)
    answers, words = dict(recorded.answers), {WILD: "Refusing raised LookupError: ten is too few"}
    answers[WILD] = {**answers[WILD], "size": 10}
    if diverged:
        answers[3] = {**answers[3], "update": answers[3]["update"] * math.nan}
        words[3] = "its update is not finite"
    record, found = recorded.closed(answers)
    assert record.dropped == words
    honest = {k: answer for k, answer in recorded.answers.items() if k not in words}
    assert same(found, recorded.closed(honest, dict.fromkeys(words, "nothing"))[1])


EVALUATION = {
    "round": 1, "stage": "val", "client_ids": (2,), "sizes": torch.tensor([9]),
    "values": {"acc": torch.tensor([0.5], dtype=torch.float64)}, "undefined": {"acc": {2: "no data"}},
    "modes": {"acc": "max"}, "client_names": ("2",),
}  # fmt: skip


def test_evaluations_are_read_or_refused():
    dice = random.Random(3)
    assert evaluation(EVALUATION, 2, 1, "val").values["acc"].tolist() == [0.5]
    many = {f"m{k}": torch.tensor([0.5]) for k in range(METRICS)}
    assert len(evaluation({**EVALUATION, "values": many}, 2, 1, "val").values) == METRICS
    with pytest.raises(MessageError, match=f"at most {METRICS} metrics, found {METRICS + 1}"):
        evaluation({**EVALUATION, "values": {**many, "more": many["m0"]}}, 2, 1, "val")
    for _ in range(hostile.CASES):
        try:
            found = evaluation(hostile.mutated(dice, EVALUATION), 2, 1, "val")
        except MessageError:
            continue
        assert (found.client_ids, found.round, found.stage) == ((2,), 1, "val")
        assert int(found.sizes) >= 0
        assert all(value.shape == (1,) and name.isprintable() for name, value in found.values.items())


def test_one_client_does_not_turn_a_metric_around():
    records = [
        evaluation({**EVALUATION, "client_ids": (k,), "modes": {"acc": "min" if k == 3 else "max"}}, k, 1, "val")
        for k in range(4)
    ]
    assert joined(records, "val", 1, ("0", "1", "2", "3")).modes == {"acc": "max"}


@pytest.mark.parametrize(
    "fields",
    [{"round": 0}, {"round": 2}, {"client_ids": (1,)}, {"client_ids": (2, 3)}, {"stage": "test"},
     {"sizes": torch.tensor([9, 9])}, {"sizes": torch.tensor([-1])}, {"values": {"acc": torch.tensor([0.5, 0.5])}},
     {"values": {"acc": torch.tensor([0.5j])}}, {"values": {"a\nb": torch.tensor([0.5])}}],
    ids=str,
)  # fmt: skip
def test_evaluations_of_others_are_refused(fields):
    with pytest.raises(MessageError):
        evaluation({**EVALUATION, **fields}, 2, 1, "val")


# ---- the client's side


def test_no_message_of_a_server_breaks_a_client(recorded):
    """It is refused, or trained on; the next message is answered as ever."""
    dice, client = random.Random(4), made_client(recorded.method, WILD)
    refused = 0
    with hostile.nothing_unpickled():
        for case in range(hostile.CASES // len(METHODS)):
            fields = arrived(dice, hostile.mutated(dice, recorded.orders[WILD]))
            try:
                sent = client.train(fields)
            except Exception:  # what is valid may make no sense to method and module all the same
                refused += 1
            else:
                assert sent.client_id == WILD, case
        again = client.train(recorded.orders[WILD])
    assert refused > 0
    assert torch.equal(again.update, recorded.answers[WILD]["update"])


class Steps(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_server_that_names_any_round_costs_no_time():
    own, strategy = own_loader(1, federated_blobs(4)), fl.FederatedStrategy(seed=5)
    client = fl.FederatedClient(fresh(Steps), own, strategy, 1, 4, trainer={"accelerator": "cpu"})
    layout = fl.ParamLayout.from_module(fresh(Steps))
    first = fl.ServerMessage(10**6, layout.flatten(layout.parameters(fresh(Steps))), steps_per_round=10**6)
    with pytest.raises(ValueError, match=r"at most 10,000,000 steps, found 1,000,000,000,000"):
        client.train(first)
    with pytest.raises(ValueError, match="params must be finite"):
        client.train(replace(first, round=0, params=first.params * float("nan")))


@pytest.mark.parametrize(
    "value",
    [torch.ones(1).expand(10**9), torch.ones(3).to_sparse(), torch.empty(3, device="meta"),
     torch.ones(3).requires_grad_(), object(), b"bytes", hostile.deep(13), "x" * 10**6, list(range(10**6))],
    ids=["expanded", "sparse", "meta", "gradient", "object", "bytes", "deep", "long", "many"],
)  # fmt: skip
def test_values_that_no_message_has_are_refused(plain, value):
    with pytest.raises(MessageError, match=r"^the message(?! is not whole)"):
        read(fl.ClientMessage, {**plain.answers[WILD], "extras": {"more": value}})
    cyclic = []
    cyclic += [cyclic, cyclic]
    with pytest.raises(MessageError, match=r"^the message(?! is not whole)"):
        read(fl.ClientMessage, {**plain.answers[WILD], "extras": cyclic})


def test_what_no_message_has_is_no_loss_no_name_and_no_sentence():
    for value in (math.inf, -math.inf, math.nan, "0.5", None):
        with pytest.raises(MessageError, match="its loss must be"):
            loss(value)
    with pytest.raises(MessageError, match="must be a ClientMessage or its fields, found a ServerMessage"):
        read(fl.ClientMessage, fl.ServerMessage(0, torch.zeros(3)))
    assert FEDERATION.admits("0f" * 16)
    assert not any(map(FEDERATION.admits, ("", "0f" * 17, "0f/../../up", "0f\n", "0F")))
    assert printable("a\x1b[31m\nb") == "a?[31m?b"
    whole = "x" * SENTENCE
    assert [printable(whole), printable(whole + "x")] == [whole, whole + "..."]
