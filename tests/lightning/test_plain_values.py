# SPDX-License-Identifier: Apache-2.0
"""Values are written with plain parts and come back as they were; what is none of a module's is neither."""

import enum
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support import reload

from fl_lightning.lightning.module.plain_values import Limits, Reader, UnwritableError, Writer, is_own_name
from fl_lightning.lightning.module.shared import Shared

CPU = torch.device("cpu")


class Pair(NamedTuple):
    count: int
    items: list


class Meter:
    """Has attributes, and a method that nobody may hide."""

    limit: int = 3

    def __init__(self):
        self.total, self.seen = 0.5, [1]

    def update(self):
        pass

    @property
    def mean(self):
        return self.total


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(1))
        self.part = torch.nn.Linear(1, 1)
        self.own = 1


class Mood(enum.Enum):
    HIGH = 1


class Loose:
    """Not among the classes that both sides have."""


def shared(*classes, **by_path):
    """What both sides have."""
    found = Shared(by_path)
    found.classes |= {kind.__qualname__: kind for kind in classes}
    return found


CLASSES = Pair, Meter, Layer, Mood


def back(value, classes=CLASSES, device=CPU):
    """What a reader makes of it, behind a file of plain tensors."""
    writer = Writer(shared(*classes))
    (written,) = writer.tried([value])
    nodes, written = reload((writer.nodes, written))
    return Reader(nodes, shared(*classes), device).of(written)


VALUES = [
    None, True, 7, -(2**63), 2**63, -(2**70), 1.5, "text", 1 - 2j, b"\x00\xff", b"", bytearray(b"ab"),
    [1, [2.0, "x"]], (1, (2,)), {1, 2}, frozenset({3}), {"a": 1, 2: [3]}, OrderedDict(b=1, a=2), Counter("aab"),
    deque([1, 2], maxlen=3), deque([1]), array("h", [1, -2]), Pair(1, [2, "x"]),
    torch.Size([2, 3]), torch.float16, CPU, Mood.HIGH,
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
    assert Writer(shared()).tried([least, most]) == [least, most]
    assert Writer(shared()).tried([least - 1, most + 1]) == [{"node": 0}, {"node": 1}]


@pytest.mark.parametrize("factory", [None, list, int])
def test_defaults_come_back(factory):
    found = back(defaultdict(factory, a=[1]))
    assert (found, found.default_factory) == ({"a": [1]}, factory)


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
    sparse = back(torch.eye(3).to_sparse())
    assert sparse.layout == torch.sparse_coo
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    node = ["tensor", torch.ones(2), False, False]
    Reader([node], shared(), CPU).of({"node": 0}).zero_()
    assert node[1].tolist() == [1.0, 1.0], "the message's own tensor stays"


def test_tensors_of_another_device_are_put_on_that_of_the_reader_and_told_from_others_later():
    here, away = Reader(
        [["tensor", torch.ones(2), flag, False] for flag in (False, True)], shared(), torch.device("meta")
    ).all([{"node": 0}, {"node": 1}])
    assert (here.device.type, away.device.type) == ("cpu", "meta")
    passed_on = Reader([["tensor", torch.ones(2), True, False]], shared(), CPU).of({"node": 0})
    writer = Writer(shared())
    writer.tried([passed_on, torch.ones(2)])
    assert [node[2] for node in writer.nodes] == [True, False]


def test_objects_are_made_of_classes_that_the_reader_has():
    value = Meter()
    value.total = 2.0
    found = back([value, value])
    assert type(found[0]) is Meter
    assert found[0] is found[1]
    assert vars(found[0]) == {"total": 2.0, "seen": [1]}
    other = type("Meter", (), {"__qualname__": "Meter"})()
    for stays, words in ((Loose(), "a Loose"), (other, "a Meter"), (Layer(), "a Layer"), (len, "a builtin_function")):
        with pytest.raises(UnwritableError, match=words):
            Writer(shared(*CLASSES)).tried([stays])


def test_what_both_sides_have_goes_by_its_name():
    one = [1]
    writer = Writer(shared(one=one))
    assert writer.tried([one, [one]]) == [{"known": "one"}, {"node": 0}]
    found = Reader(writer.nodes, shared(one=one), CPU).all([{"known": "one"}, {"node": 0}])
    assert found[0] is found[1][0] is one


def test_attributes_that_hide_something_are_not_written():
    value = Meter()
    vars(value).update({"update": 1, "mean": 2, "limit": 4, "a b": 5})
    assert vars(back(value)) == {"total": 0.5, "seen": [1], "limit": 4}


class Slots:
    __slots__ = ("own",)


OWN = {
    (Meter(), "total"): True, (Meter(), "limit"): True, (Meter(), "update"): False, (Meter(), "mean"): False,
    (Meter(), "__class__"): False, (Meter(), "__private"): False, (Meter(), "a b"): False, (Meter(), 3): False,
    (Meter(), None): False,
    (Meter(), "n" * 200): True, (Meter(), "n" * 201): False, (Slots(), "own"): True, (Layer(), "own"): True,
    (Layer(), "weight"): False, (Layer(), "mean"): False, (Layer(), "part"): False, (Layer(), "training"): True,
    (Layer(), "_forward_hooks"): False, (Layer(), "forward"): False,
}  # fmt: skip


@pytest.mark.parametrize("case", OWN, ids=lambda case: f"{type(case[0]).__name__}.{str(case[1])[:12]}")
def test_who_may_bind_which_attribute(case):
    assert is_own_name(*case) == OWN[case]


STAYS = {
    "a long string": ("x" * 101, "a string of 101 characters"),
    "objects": (np.array([object()]), "an array of object"),
    "texts": (np.array(["a"]), "an array of <U1"),
    "a subclass": (torch.nn.Parameter(torch.zeros(1)), "a Parameter of torch.float32"),
    "complex": (torch.zeros(1, dtype=torch.complex64), "a Tensor of torch.complex64"),
    "meta": (torch.zeros(1, device="meta"), "a Tensor of torch.float32"),
    "a factory": (defaultdict(Meter), "a defaultdict"),
    "a dict's subclass": (type("Settings", (dict,), {})(), "a Settings"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_cannot_be_written_stays(name):
    value, words = STAYS[name]
    with pytest.raises(UnwritableError, match=words):
        Writer(shared(*CLASSES), Limits(characters=100)).tried([value])


def test_an_object_that_holds_itself_stays_and_may_be_tried_again_without():
    value = [[1]]  # the inner one is written before the outer one is found to hold itself
    value.append(value)
    writer = Writer(shared())
    with pytest.raises(UnwritableError, match="an object that holds itself"):
        writer.tried([value])
    del value[1]
    written = writer.tried([value])
    assert Reader(writer.nodes, shared(), CPU).all(written) == [[[1]]]


def test_what_is_too_deep_stays():
    value = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(UnwritableError, match="recursion"):
        Writer(shared()).tried([value])


@pytest.mark.parametrize(
    "value",
    [torch.zeros(11), np.zeros(3), b"x" * 21, [torch.zeros(4), torch.ones(4)]],
    ids=["one", "array", "bytes", "both"],
)  # fmt: skip
def test_messages_have_a_size(value):
    writer = Writer(shared(), Limits(1000, 20))
    with pytest.raises(UnwritableError, match="more than 1000 entries or 0 MiB in all"):
        writer.tried([value])
    assert (writer.nbytes, writer.entries, writer.nodes) == (0, 0, [])
    writer.tried([torch.zeros(5)])
    assert writer.nbytes == 20
    Writer(shared(), Limits(3)).tried([1, 2, 3])
    with pytest.raises(UnwritableError, match="more than 3 entries"):
        Writer(shared(), Limits(3)).tried([1, [2, 3]])


def test_what_is_gathered_is_counted():
    writer = Writer(shared())
    writer.tried([1, torch.tensor(2.0), np.float64(1.0), "text"])
    assert writer.gathered == 0, "single numbers apart"
    writer.tried([torch.zeros(2, 3), np.zeros(4), [1, 2], {"a": (1,)}, deque([5]), defaultdict(int, b=1)])
    assert writer.gathered == 6 + 4 + 2 + (1 + 1) + 1 + 1


LIES = {
    "a module": [["object", "Layer", []]],
    "a method": [["object", "Meter", ["update", 1]]],
    "another class": [["object", "Loose", []]],
    "an object as a tuple": [["named", "Meter", []]],
    "a short tuple": [["named", "Pair", [1]]],
    "another enum": [["enum", "Meter", "HIGH"]],
    "a member that is none": [["enum", "Mood", "LOW"]],
    "an array of objects": [["ndarray", "|O", [1], torch.zeros(8, dtype=torch.uint8), False]],
    "an array of pairs": [["ndarray", "<f4,<f4", [1], torch.zeros(8, dtype=torch.uint8), False]],
    "an array of another shape": [["ndarray", "<f4", [3], torch.zeros(8, dtype=torch.uint8), False]],
    "an odd mapping": [["dict", ["a"]]],
    "an unknown kind": [["Popen", []]],
    "a factory": [["defaultdict", [], "Meter"]],
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
        Reader(LIES[name], shared(*CLASSES), CPU)


def test_numbers_of_any_length_take_no_time():
    found = Reader([["int", "0x1" + "0" * 10**6]], shared(), CPU).of({"node": 0})
    assert found == 16 ** (10_000 - 3)


def test_what_cannot_be_written_leaves_nothing_and_one_object_stays_one():
    writer, one = Writer(shared()), [1]
    with pytest.raises(UnwritableError, match="a function"):
        writer.tried([one, (2, 3), "text", lambda: 0])
    assert (writer.nodes, writer.entries) == ([], 0)
    written = writer.tried([one, (one, 2), {"a": one}])
    found = Reader(writer.nodes, shared(), CPU).all(written)
    assert found == [[1], ([1], 2), {"a": [1]}]
    assert found[0] is found[1][0] is found[2]["a"]
