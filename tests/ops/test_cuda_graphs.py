# SPDX-License-Identifier: Apache-2.0
"""Ops in a captured CUDA graph: for new inputs, the bits of plain calls. FL_LIGHTNING_TEST_DEVICE=cpu tries the tests
themselves, with plain calls in the place of graphs."""

import os

import pytest
import torch
from implementations import EXTENSION, dispatched, samples

from fl_lightning.ops import _library

DEVICE = os.environ.get("FL_LIGHTNING_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    EXTENSION is None or (DEVICE == "cuda" and not (_library.EXTENSION.cuda and torch.cuda.is_available())),
    reason="no CUDA kernels, or no GPU that tests may see",
)
M, N = 10, 100_003


def tensors(result):
    return list(result) if isinstance(result, tuple) else [] if result is None else [result]


class Graph:
    """A call whose kernels are queued again by ``replay``; ``results`` are in the same memory each time."""

    def __init__(self, call):
        self._call, self._graph = call, None
        if DEVICE == "cpu":
            self.results = tensors(call())
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.results = tensors(call())

    def replay(self):
        if self._graph is None:
            for result, new in zip(self.results, tensors(self._call()), strict=True):
                result.copy_(new)
        else:
            self._graph.replay()


def place(arguments, host):
    """Copies on the device, but for whole numbers, and everything else where ``host`` names its place."""
    return [
        a.clone().to(a.device if i in host or a.dtype == torch.int64 else DEVICE) if torch.is_tensor(a) else a
        for i, a in enumerate(arguments)
    ]


def inputs(op, seed, dtype):
    """Arguments that depend on a seed; offsets, positions and an order do not."""
    found = list(samples(m=M, n=N)[op])
    generator = torch.Generator().manual_seed(seed)
    for i, argument in enumerate(found):
        if torch.is_tensor(argument) and argument.dtype.is_floating_point:
            if op in ("min_norm", "project_conflicts"):
                rows = torch.randn(3, M, 7, generator=generator, dtype=torch.float64)
                found[i] = rows @ rows.mT
            else:
                values = torch.rand(argument.shape, generator=generator, dtype=torch.float64) - 0.25 * (
                    argument.numel() != M
                )
                found[i] = values.to(dtype if argument.shape[-1] == N else argument.dtype)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", _library.NAMES)
def test_a_replay_has_the_bits_of_a_call(op, dtype):
    held = place(inputs(op, 0, dtype), host=())
    graph = Graph(lambda: dispatched(op)(*held))
    for seed in (1, 2, 3):
        for target, source in zip(held, inputs(op, seed, dtype), strict=True):
            if torch.is_tensor(target):
                target.copy_(source)
        other = [a.clone() if torch.is_tensor(a) else a for a in held]
        graph.replay()
        want = tensors(dispatched(op)(*other))
        assert all(torch.equal(a, b) for a, b in zip(graph.results, want, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(held, other, strict=True) if torch.is_tensor(a))


@pytest.mark.parametrize(
    ("op", "host"),
    [
        ("layer_combine", 2),
        ("layer_combine_add", 3),
        ("layer_cross_combine", 3),
        ("puc_combine", 2),
        ("project_conflicts", 2),
    ],
)
def test_numbers_of_the_host_are_those_of_the_capture(op, host):
    """The graph holds them: what becomes of the host's tensor does not matter."""
    held = place(inputs(op, 0, torch.float32), host=(host,))
    own = [a.clone() if torch.is_tensor(a) else a for a in held]
    want = [*tensors(dispatched(op)(*own)), *filter(torch.is_tensor, own[:host])]
    start = [a.clone() for a in held[:host]]
    graph = Graph(lambda: dispatched(op)(*[*held[:host], held[host].clone(), *held[host + 1 :]]))
    for target, source in zip(held[:host], start, strict=True):
        target.copy_(source)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip([*graph.results, *held[:host]], want, strict=True))


@pytest.mark.parametrize("m", [17, 40])
def test_a_gram_matrix_of_many_rows_and_layers(m):
    """Tiles and tensor cores, and offsets that do not fit the launch."""
    offsets = torch.tensor([0, *([9] * 300), N - 2700]).cumsum(0)
    rows = torch.randn(m, N, generator=torch.Generator().manual_seed(m)).to(DEVICE)
    graph = Graph(lambda: dispatched("layer_gram")(rows, offsets))
    rows.mul_(1.5)
    graph.replay()
    assert torch.equal(graph.results[0], dispatched("layer_gram")(rows, offsets))
