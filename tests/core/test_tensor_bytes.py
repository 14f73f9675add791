# SPDX-License-Identifier: Apache-2.0
"""Objects as bytes: whatever processes exchange comes back as it was."""

import warnings
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.core.processes import pack, unpack

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5, dtype=torch.float64),
        torch.randn(3, 4).t(),
        torch.arange(12).reshape(3, 4)[:, ::2],
        torch.empty(0, 5),
        torch.tensor([True, False]),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(4, dtype=torch.complex64).conj(),
        torch.randn(2, dtype=torch.complex64).conj().imag,
        torch._neg_view(torch.arange(3.0)),
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.randn(2, requires_grad=True),
        nn.Parameter(torch.randn(3)),
        nn.Parameter(torch.randn(3), requires_grad=False),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
)
def test_tensors_come_back(tensor):
    found = unpack(pack(tensor), CPU)
    assert (type(found), found.dtype, found.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert found.requires_grad == tensor.requires_grad
    torch.testing.assert_close(found.detach(), tensor.detach(), rtol=0, atol=0, equal_nan=True)
    if found.layout is torch.strided and found.dtype is torch.float32:
        assert torch.equal(found.detach().signbit(), tensor.detach().signbit())
    if found.numel() and not found.requires_grad and found.layout is torch.strided:
        found.zero_()  # memory of its own


def test_sparse_tensors_leave_nothing_that_the_next_file_waits_for(tmp_path):
    unpack(pack([torch.eye(3).to_sparse()] * 2), CPU)
    torch.save(torch.zeros(1), tmp_path / "file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if there are sparse tensors to look through
        torch.load(tmp_path / "file", weights_only=True)


def test_objects_come_back():
    tensor = torch.randn(3)
    value = {"a": [tensor, tensor, 1.5, None], "b": (ValueError("no"), torch.float32, "text"), 3: tensor[1:]}
    found = unpack(pack(value), CPU)
    assert torch.equal(found["a"][0], tensor)
    assert found["a"][0] is found["a"][1]
    assert str(found["b"][0]) == "no"
    assert found["b"][1:] == (torch.float32, "text")
    assert torch.equal(found[3], tensor[1:])


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 3, 4, 5), (1, 3, 1, 2)])
def test_memory_formats_are_kept_and_memory_is_aligned(shape):
    for order in permutations(range(len(shape))):
        tensor = torch.randn([shape[place] for place in order]).permute(*map(order.index, range(len(shape))))
        found = unpack(pack(["text of any length", tensor]), CPU)[1]
        assert torch.equal(found, tensor)
        assert found.shape == shape
        assert [s for s, n in zip(found.stride(), shape, strict=True) if n > 1] == [
            s for s, n in zip(tensor.stride(), shape, strict=True) if n > 1
        ]
        assert found.data_ptr() % 64 == 0


def test_a_view_travels_without_the_rest():
    whole = torch.zeros(1_000_000)
    assert len(pack(whole[:2])) < 500


def test_only_what_was_on_a_device_comes_to_the_readers(monkeypatch):
    on_cpu, elsewhere = torch.zeros(3), torch.ones(2)
    own = Tensor.device.__get__
    moved = torch.device("meta")
    monkeypatch.setattr(Tensor, "device", property(lambda t: moved if t is elsewhere else own(t)))
    packed = pack([on_cpu, elsewhere])
    monkeypatch.undo()
    assert [tensor.device.type for tensor in unpack(packed, moved)] == ["cpu", "meta"]
