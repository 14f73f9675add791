# SPDX-License-Identifier: Apache-2.0
"""Values are written with plain parts and come back as they were; what is none of a module's is neither."""

import enum
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from support import reload
from visit_variants import Meter

from fl_lightning.lightning.module.changes import is_own_name
from fl_lightning.lightning.module.plain_values import Limits, Reader, UnwritableError, Writer

CPU = torch.device("cpu")


class Owner(torch.nn.Module):
    """Has attributes, and a method and a property that nobody may hide."""

    limit: int = 3

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))
        self.part = torch.nn.Linear(1, 1)
        self.own = 1

    @property
    def half(self):
        return self.own / 2


def back(value, device=CPU):
    """What a reader makes of it, behind a file of plain tensors."""
    writer = Writer({})
    (written,) = writer.tried([value])
    nodes, written = reload((writer.nodes, written))
    return Reader(nodes, {}, device).all([written])[0]


VALUES = [
    None, True, 7, -(2**63), 2**63, -(2**70), 1.5, "text", [1, [2.0, "x"]], (1, (2,)), {1, 2}, frozenset({3}),
    {"a": 1, 2: [3]}, OrderedDict(b=1, a=2), Counter("aab"), deque([1, 2], maxlen=3), deque([1]), torch.Size([2, 3]),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_plain_values_come_back(value):
    found = back(value)
    assert found == value
    assert type(found) is type(value)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)
    assert list(found) == list(value) if isinstance(value, OrderedDict) else True


def test_messages_hold_numbers_of_64_bits():
    least, most = -(2**63), 2**63 - 1
    assert Writer({}).tried([least, most]) == [least, most]
    assert Writer({}).tried([least - 1, most + 1]) == [{"node": 0}, {"node": 1}]


@pytest.mark.parametrize(
    "value",
    [np.arange(6, dtype=np.int16).reshape(2, 3), np.float32(0.5), np.array(3), np.zeros((0, 2)), np.array([1j])],
    ids=str,
)  # fmt: skip
def test_arrays_come_back(value):
    found = back(value)
    assert type(found) is type(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert np.array_equal(found, value)
    if isinstance(found, np.ndarray):
        found[...] = 0  # it is the reader's own


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_tensors_come_back(dtype):
    value = torch.eye(3).to(dtype).T[:2]
    found = back(value)
    assert torch.equal(found, value)
    assert found.dtype == dtype
    node = ["tensor", torch.ones(2), False, False]
    Reader([node], {}, CPU).all([{"node": 0}])[0].zero_()
    assert node[1].tolist() == [1.0, 1.0], "the message's own tensor stays"


def test_tensors_of_another_device_are_put_on_that_of_the_reader_and_told_from_others_later():
    here, away = Reader(
        [["tensor", torch.ones(2), flag, False] for flag in (False, True)], {}, torch.device("meta")
    ).all([{"node": 0}, {"node": 1}])
    assert (here.device.type, away.device.type) == ("cpu", "meta")
    passed_on = Reader([["tensor", torch.ones(2), True, False]], {}, CPU).all([{"node": 0}])[0]
    writer = Writer({})
    writer.tried([passed_on, torch.ones(2)])
    assert [node[2] for node in writer.nodes] == [True, False]


def test_what_both_sides_have_goes_by_its_name():
    one = [1]
    writer = Writer({id(one): "one"})
    assert writer.tried([one, [one]]) == [{"known": "one"}, {"node": 0}]
    found = Reader(writer.nodes, {"one": one}, CPU).all([{"known": "one"}, {"node": 0}])
    assert found[0] is found[1][0] is one


class Slots:
    __slots__ = ("own",)


OWN = {
    (Meter(), "total"): True, (Owner(), "limit"): True, (Meter(), "update"): False, (Owner(), "half"): False,
    (Meter(), "__class__"): False, (Meter(), "__private"): False, (Meter(), "a b"): False, (Meter(), 3): False,
    (Meter(), None): False,
    (Meter(), "n" * 200): True, (Meter(), "n" * 201): False, (Slots(), "own"): True, (Owner(), "own"): True,
    (Owner(), "weight"): False, (Owner(), "mean"): False, (Owner(), "part"): False, (Owner(), "training"): True,
    (Owner(), "_forward_hooks"): False, (Owner(), "forward"): False,
}  # fmt: skip


@pytest.mark.parametrize("case", OWN, ids=lambda case: f"{type(case[0]).__name__}.{str(case[1])[:12]}")
def test_who_may_bind_which_attribute(case):
    assert is_own_name(*case) == OWN[case]


STAYS = {
    "a long string": ("x" * 101, "a string of 101 characters"),
    "objects": (np.array([object()]), "an array of object"),
    "texts": (np.array(["a"]), "an array of <U1"),
    "a parameter": (torch.nn.Parameter(torch.zeros(1)), "a Parameter"),
    "complex": (torch.zeros(1, dtype=torch.complex64), "a torch.ComplexFloatTensor"),
    "meta": (torch.zeros(1, device="meta"), "a torch.meta.FloatTensor"),
    "sparse": (torch.eye(2).to_sparse(), "a torch.sparse.FloatTensor"),
    "a factory": (defaultdict(list), "a defaultdict"),
    "a dict's subclass": (type("Settings", (dict,), {})(), "a Settings"),
    "an object": (Meter(), "a Meter"),
    "a module": (Owner(), "a Owner"),
    "a function": (len, "a builtin_function"),
    "an enum": (enum.Enum("Mood", "HIGH").HIGH, "a Mood"),
    "bytes": (b"a", "a bytes"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_cannot_be_written_stays(name):
    value, words = STAYS[name]
    with pytest.raises(UnwritableError, match=words):
        Writer({}, Limits(characters=100)).tried([value])


def test_what_holds_itself_or_is_too_deep_stays_and_may_be_tried_again_without():
    value, deep = [[1]], []  # the inner one is written before the outer one is found to hold itself
    value.append(value)
    for _ in range(10_000):
        deep = [deep]
    writer = Writer({})
    for odd in (value, deep):
        with pytest.raises(UnwritableError, match="an object that holds itself, or lies too deep"):
            writer.tried([odd])
    del value[1]
    written = writer.tried([value])
    assert Reader(writer.nodes, {}, CPU).all(written) == [[[1]]]


@pytest.mark.parametrize(
    "value",
    [torch.zeros(11), np.zeros(3), [torch.zeros(4), torch.ones(4)]],
    ids=["one", "array", "both"],
)  # fmt: skip
def test_messages_have_a_size(value):
    writer = Writer({}, Limits(1000, 20))
    with pytest.raises(UnwritableError, match="more than 1000 entries or 0 MiB in all"):
        writer.tried([value])
    assert (writer.nbytes, writer.entries, writer.gathered, writer.nodes) == (0, 0, 0, [])
    writer.tried([torch.zeros(5)])
    assert writer.nbytes == 20
    Writer({}, Limits(3)).tried([1, 2, 3])
    with pytest.raises(UnwritableError, match="more than 3 entries"):
        Writer({}, Limits(3)).tried([1, [2, 3]])


def test_what_is_gathered_is_counted():
    writer = Writer({})
    writer.tried([1, torch.tensor(2.0), np.float64(1.0), "text"])
    assert writer.gathered == 0, "single numbers apart"
    writer.tried([torch.zeros(2, 3), np.zeros(4), [1, 2], {"a": (1,)}, deque([5]), Counter(b=1)])
    assert writer.gathered == 6 + 4 + 2 + (1 + 1) + 1 + 1


LIES = {
    "an array of objects": [["ndarray", torch.zeros(8, dtype=torch.uint8), "|O", [1], False]],
    "an array of pairs": [["ndarray", torch.zeros(8, dtype=torch.uint8), "<f4,<f4", [1], False]],
    "an array of another shape": [["ndarray", torch.zeros(8, dtype=torch.uint8), "<f4", [3], False]],
    "an odd mapping": [["dict", ["a"]]],
    "an unknown kind": [["Popen", []]],
    "itself": [["list", [{"node": 0}]]],
    "a node from the end": [["list", []], ["list", [{"node": -1}]]],
    "two names": [["list", [{"node": 0, "known": "x"}]]],
    "another name": [["list", []], ["list", [{"other": 0}]]],
    "what nobody has": [["list", [{"known": "x"}]]],
    "digits": [["int", "0x" + "g"]],
}


@pytest.mark.parametrize("name", LIES)
def test_what_nobody_has_written_is_not_read(name):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Reader(LIES[name], {}, CPU)


def test_numbers_of_any_length_take_no_time():
    found = Reader([["int", "0x1" + "0" * 10**6]], {}, CPU).all([{"node": 0}])[0]
    assert found == 16 ** (10_000 - 3)


def test_what_cannot_be_written_leaves_nothing_and_one_object_stays_one():
    writer, one = Writer({}), [1]
    with pytest.raises(UnwritableError, match="a function"):
        writer.tried([one, (2, 3), "text", lambda: 0])
    assert (writer.nodes, writer.entries) == ([], 0)
    written = writer.tried([one, (one, 2), {"a": one}])
    found = Reader(writer.nodes, {}, CPU).all(written)
    assert found == [[1], ([1], 2), {"a": [1]}]
    assert found[0] is found[1][0] is found[2]["a"]
