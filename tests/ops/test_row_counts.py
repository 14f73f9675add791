# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on every number of rows that goes another way, on very many rows, and on very many layers."""

import pytest
import torch
from implementations import compiled, exact_products, gaussian, offsets_of

SIZES = (300, 0, 3, 257, 4001)


def near(found, want, left, right, offsets):
    """Whether products are as accurate as the ops state, beside the products of the norms."""
    squares = [exact_products(rows, rows, offsets).diagonal(dim1=1, dim2=2).sqrt() for rows in (left, right)]
    scale = squares[0][:, :, None] * squares[1][:, None, :]
    return bool(((found - want).abs() <= 5e-7 * scale).all())


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [4, 17, 65, 100])
def test_products(call, m, dtype):
    offsets = offsets_of(SIZES)
    n = int(offsets[-1])
    rows = gaussian(m, n + 8, dtype)[:, m % 3 : n + m % 3]
    others = rows[: m // 2 + 1]
    gram = call("layer_gram", rows, offsets)
    assert torch.equal(gram, gram.mT)
    assert near(gram, exact_products(rows, rows, offsets), rows, rows, offsets)
    assert near(
        call("layer_cross_gram", rows, others, offsets), exact_products(rows, others, offsets), rows, others, offsets
    )
    step = others[-1:]
    dots = call("layer_dots", rows, step[0], offsets)[:, :, None]
    assert near(dots, exact_products(rows, step, offsets), rows, step, offsets)


@compiled
def test_very_many_rows(call):
    rows, offsets = gaussian(1100, 2050), offsets_of((2050,))
    assert near(call("layer_gram", rows, offsets), exact_products(rows, rows, offsets), rows, rows, offsets)


@compiled
def test_very_many_layers(call):
    """Their offsets take several launches, and no sum is in float32."""
    rows, offsets = gaussian(5, 60_000), offsets_of([3] * 20_000)
    coeff = gaussian(20_000, 5, torch.float64, seed=1)
    blocks = rows.double().view(5, 20_000, 3).transpose(0, 1)
    torch.testing.assert_close(call("layer_gram", rows, offsets), blocks @ blocks.mT, rtol=1e-12, atol=1e-12)
    step = torch.einsum("lmc,lm->lc", blocks, coeff).flatten()
    torch.testing.assert_close(call("layer_combine", rows, offsets, coeff).double(), step, rtol=1e-6, atol=1e-6)
    _, squares = call("puc_track", rows[0].clone(), torch.ones(60_000, dtype=torch.uint8), 0, 1, offsets)
    torch.testing.assert_close(squares, blocks[:, 0].square().sum(1), rtol=1e-12, atol=0)
