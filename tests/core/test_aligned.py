# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fl_lightning import ops
from fl_lightning.core.tensors import ALIGNMENT, aligned, empty_rows, empty_tensors


def off_line(tensors):
    """By how many bytes the tensors miss the boundaries."""
    return {tensor.data_ptr() % ALIGNMENT for tensor in tensors} - {0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("n", [1, 7, 8, 64, 129])
def test_rows_are_contiguous_and_start_at_boundaries(n, dtype):
    rows = empty_rows(3, torch.empty(n, dtype=dtype))
    assert rows.shape == (3, n)
    assert off_line(rows) == set()
    assert all(row.is_contiguous() for row in rows)
    assert rows.untyped_storage().nbytes() < 3 * (n * dtype.itemsize + ALIGNMENT)


def test_tensors_of_one_block_do_not_overlap():
    shapes = [(3, 5), (), (0, 4), (17,), (1, 1, 1)]
    tensors = empty_tensors(shapes, torch.empty(0))
    assert [tuple(t.shape) for t in tensors] == shapes
    assert off_line(tensors) == set()
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [t.unique().tolist() for t in tensors] == [[0], [1], [], [3], [4]]


def test_what_does_not_start_at_a_boundary_is_copied():
    vector = torch.arange(33.0)
    assert aligned(vector) is vector
    for view in (vector[1:], vector[::2]):
        assert torch.equal(aligned(view), view)
        assert aligned(view).is_contiguous()
        assert off_line([aligned(view)]) == set()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_op_copies_rows_that_lie_apart(dtype):
    m, n, offsets = 3, 1001, torch.tensor([0, 400, 1001])
    rows = torch.stack([torch.randn(n).to(dtype) for _ in range(m)], out=empty_rows(m, torch.empty(n, dtype=dtype)))
    assert not rows.is_contiguous()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        ops.layer_gram(rows, offsets)
        ops.layer_cross_gram(rows, rows, offsets)
        ops.layer_cross_gram(rows, rows, offsets, torch.tensor([0, 2]))
        ops.layer_dots(rows, rows[0], offsets)
        ops.layer_combine(rows, offsets, torch.ones(2, m))
        ops.layer_cross_combine(rows, rows, offsets, torch.ones(2, 2 * m))
    events = found.events()
    assert events
    copies = ("aten::contiguous", "aten::clone", "aten::copy_")
    assert [e.name for e in events if e.name in copies and [m, n] in e.input_shapes] == []
