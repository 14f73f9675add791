# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels run on the current stream, and never wait for the device. Runs where there is a GPU."""

import pytest
import torch
from implementations import NO_GPU, Implementation, dispatched, results_of, samples

from fl_lightning.ops import _library

A_WHILE = 400_000_000  # clock cycles: some tenths of a second


def cases(n):
    """Arguments of every op, and the tensors among them that stay on the CPU: offsets, and the rows that are chosen."""
    arguments = samples(m=10, n=n)
    return arguments, (arguments["layer_gram"][1], arguments["layer_chosen_gram"][3])


@NO_GPU
@pytest.mark.parametrize("op", _library.NAMES)
def test_results_on_the_current_stream_without_waiting(op):
    every_case, stay = cases(100_003)
    arguments = every_case[op]
    moves = [torch.is_tensor(a) and not any(a is other for other in stay) for a in arguments]
    want = results_of(Implementation(dispatched, "cuda"), op, arguments)
    pinned = [a.pin_memory() if move else a for a, move in zip(arguments, moves, strict=True)]
    inputs = [torch.zeros_like(a, device="cuda") if move else a for a, move in zip(arguments, moves, strict=True)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)
        # The true inputs arrive late: whoever reads them from another stream finds zeros.
        for target, source, move in zip(inputs, pinned, moves, strict=True):
            if move:
                target.copy_(source, non_blocking=True)
        result = dispatched(op)(*inputs)
        assert not stream.query(), "the op waited for the device"
    stream.synchronize()
    returned = result if isinstance(result, tuple) else () if result is None else (result,)
    found = [*returned, *filter(torch.is_tensor, inputs)]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))


@NO_GPU
def test_scratch_memory_is_not_handed_out_while_a_kernel_uses_it():
    """Many calls in a row on two streams, whose scratch memory the allocator takes back at once."""
    every_case, (offsets, _) = cases(300_001)
    rows = every_case["layer_gram"][0].cuda()
    want = dispatched("layer_gram")(rows, offsets)
    torch.cuda.synchronize()
    results = []
    for stream in [torch.cuda.Stream(), torch.cuda.Stream()] * 10:
        with torch.cuda.stream(stream):
            results.append(dispatched("layer_gram")(rows, offsets))
            torch.full((1 << 20,), float("nan"), device="cuda")  # memory that was just freed, overwritten
    torch.cuda.synchronize()
    assert all(torch.equal(result, want) for result in results)


@NO_GPU
def test_other_work_on_the_device_changes_no_bit():
    every_case, (offsets, _) = cases(300_001)
    rows, other, noise = every_case["layer_gram"][0].cuda(), torch.randn(2048, 2048, device="cuda"), torch.cuda.Stream()
    want = dispatched("layer_gram")(rows, offsets)
    for _ in range(100):
        with torch.cuda.stream(noise):
            other @ other
        assert torch.equal(dispatched("layer_gram")(rows, offsets), want)
