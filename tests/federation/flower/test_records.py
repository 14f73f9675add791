# SPDX-License-Identifier: Apache-2.0
"""Records on Flower hold what a message holds, and nothing else is read."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch.utils.data import DataLoader, TensorDataset
from visit_variants import WIDTH, Together

import fl_lightning as fl
from fl_lightning.federation.flower.messages import _FORMAT, Answer, Loss, Order, Origin, packed, taken, unpacked

TREE = {
    "a.b": torch.tensor([1.0, 2.0]), "a": {"b": torch.tensor([3.0]), "b'": torch.tensor([4.0])},
    "kinds": [1, 2.5, None, True, "x", (1, [2]), OrderedDict(z=1, a=2), Counter("aab")],
    "keys": {1: "one", False: "no", None: 0, "1": "text"},
    "numbers": [torch.arange(6).view(2, 3).T, torch.ones((), dtype=torch.bfloat16), torch.empty(0, 3)],
}  # fmt: skip


def same(one, two):
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one) and type(one) is type(two)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return type(one) is type(two) and one == two


def test_a_record_gives_back_what_was_written():
    values = unpacked(packed(Loss(TREE), more=(1, 2)))
    assert same(taken(Loss, values).loss, TREE)
    assert values == {"more": (1, 2)}, "what is beside a message stays"


KINDS = [np.float64(1), {(1, 2): 3}, {1, 2}, object()]


@pytest.mark.parametrize("value", KINDS, ids=lambda value: type(value).__name__)
def test_other_values_are_not_written(value):
    with pytest.raises(TypeError, match=r"loss\.x must hold tensors, numbers, strings"):
        packed(Loss({"x": value}))


def record(form=_FORMAT, data=b"\0" * 8, stype="torch.bytes"):
    arrays = ArrayRecord({"x": Array("float32", (2,), stype, data)})
    return RecordDict({"arrays": arrays, "fields": ConfigRecord({"format": form, "json": '{"loss": {"tensor": "x"}}'})})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"form": _FORMAT + 1}, f"has form {_FORMAT + 1}, and this fl_lightning reads form {_FORMAT}"),
        ({"data": b"\0" * 4}, "came as 4 bytes"),
        ({"data": b"\0" * 12}, "came as 12 bytes"),
        ({"stype": "numpy.ndarray"}, "numpy.ndarray"),
    ],
)
def test_other_records_are_not_read(fields, words):
    assert unpacked(record())["loss"].tolist() == [0, 0]
    with pytest.raises(ValueError, match=words):
        unpacked(record(**fields))


@pytest.mark.parametrize(
    "make",
    [lambda: Order(True, ("val", "val"), None), lambda: Order(1, (), None), lambda: Order(True, ("train",), None),
     lambda: Answer(None, [3]), lambda: Answer([], []), lambda: Origin(0, "ab"), lambda: Origin(2, "../x"),
     lambda: Origin(2, "ab\n"), lambda: Origin(2, "a" * 33)],
)  # fmt: skip
def test_orders_answers_and_origins_are_checked(make):
    with pytest.raises((TypeError, ValueError)):
        make()


def evaluated(client=2, when=3, stage="val"):
    return fl.EvaluationRecord(when, stage, (client,), torch.tensor([9]), {"acc": torch.tensor([0.5]).double()})


def test_an_answer_holds_what_was_trained():
    sent = fl.ClientMessage(2, 3, torch.ones(3), 9, None, None, None, {}, {}, {}, 1)
    assert Answer.of(sent, []).trained == vars(sent)
    assert Answer.of(None, []).trained is None


def test_an_evaluation_is_of_the_client_the_round_and_the_stage():
    answer = Answer.of(None, [evaluated(), evaluated(stage="test")])
    assert [answer.evaluation(2, 3, stage).stage for stage in ("val", "test")] == ["val", "test"]
    assert Answer.of(None, [evaluated(stage="test")]).evaluation(2, 3, "val") is None
    for client, when in ((1, 3), (2, 4), (2, 2)):
        with pytest.raises(ValueError, match=r"it has evaluated clients \(2,\) after 3 rounds"):
            answer.evaluation(client, when, "val")


@pytest.mark.filterwarnings("ignore:what training gathers in Together goes to the server")
@pytest.mark.filterwarnings("ignore:.*treespec")
def test_what_a_module_keeps_is_the_same_behind_the_wire():
    names = ["keeps_the_last_few", "draws_from_numpy", "changes_an_array", "counts_deep_inside"]
    x, ends = torch.randn(20, WIDTH), []
    for wired in (False, True):
        strategy = fl.FederatedStrategy()
        server = fl.FederatedServer(Together(names), strategy, 1)
        client = fl.FederatedClient(Together(names), DataLoader(TensorDataset(x, x.sum(1)), 10), strategy, 0, 1)
        for _ in range(2):
            server.open_round()
            message = server.message(0)
            answer = client.train(unpacked(packed(message)) if wired else message)
            record = server.close_round({0: unpacked(packed(answer)) if wired else answer})
            assert record.client_ids == (0,)
        ends.append(server.module)
    plain, arrived = (module.parts for module in ends)
    assert list(plain["keeps_the_last_few"].seen) == list(arrived["keeps_the_last_few"].seen)
    assert plain["draws_from_numpy"].g.random() == arrived["draws_from_numpy"].g.random()
    assert plain["changes_an_array"].a.tolist() == arrived["changes_an_array"].a.tolist()
    assert plain["counts_deep_inside"].nested == arrived["counts_deep_inside"].nested
    assert all(torch.equal(one.w, other.w) for one, other in zip(plain.values(), arrived.values(), strict=True))
