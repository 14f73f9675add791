# SPDX-License-Identifier: Apache-2.0
"""Checksums of what travels between processes."""

import pytest
import torch

from fl_lightning.core.tensors import checksum

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.uint8)


def numbers(n, dtype):
    generator = torch.Generator().manual_seed(n)
    return (100 * torch.randn(n, generator=generator)).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 7, 8192, 3 * 8192 + 5])
def test_parts_add_up_to_the_whole(n, dtype):
    vector = numbers(n, dtype)
    parts = [checksum(part) for part in vector.split(8192)]
    assert sum(parts) % 2**64 == checksum(vector)
    assert 0 <= checksum(vector) < 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_have_equal_checksums_wherever_they_lie(dtype):
    vector = numbers(50, dtype)
    for begin in range(9):
        assert checksum(vector[begin : begin + 33]) == checksum(vector[begin : begin + 33].clone())
    matrix = vector[:48].reshape(6, 8)
    assert checksum(matrix.t()) == checksum(matrix.t().contiguous()) == checksum(matrix.t().reshape(-1))
    assert checksum(vector[3]) == checksum(vector[3:4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype):
    vector = numbers(13, dtype)
    whole, raw = checksum(vector), vector.view(torch.uint8)
    for place in range(len(raw)):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert checksum(vector) != whole
            raw[place] ^= 1 << bit
