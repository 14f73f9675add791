# SPDX-License-Identifier: Apache-2.0
"""Argument checks shared by the public ops: each names the argument, the rule and what was found.

Shapes, dtypes and devices are read, and the values of small tensors on the CPU: the checks never wait for a device and
vanish under ``torch.compile``. There the kernels look at the values themselves; a compiled one raises RuntimeError.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, check, shown
from fl_lightning.ops.slices import slice_columns

_LARGEST = 2**63 - 1  # that an op takes
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def floating(name: str, tensor: Tensor, shape: tuple[int | None, ...], beside: Tensor | None = None) -> None:
    """Requires a floating-point tensor of a shape (None: any size), on the device of ``beside`` when given."""
    check_shape(name, tensor, shape)
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, found {tensor.dtype}")
    if beside is not None and tensor.device != beside.device:
        raise ValueError(f"{name} must be on the rows' device {beside.device}, found {tensor.device}")


def dense(name: str, tensor: Tensor) -> None:
    """Requires a tensor with a place in memory for each element."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, found {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, found {shown(tensor)}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Requires a tensor of a shape, in which None stands for any size, and of one of the dtypes if there are any."""
    dense(name, tensor)
    found = tensor.shape
    if len(found) != len(shape) or any(
        want is not None and want != have for want, have in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], found {list(found)}")
    if dtypes:
        check_dtype(name, tensor, *dtypes)


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Requires one of some dtypes."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, found {tensor.dtype}")


def reachable(name: str, tensor: Tensor, beside: Tensor) -> None:
    """Requires a small tensor to be on the CPU or on the device of ``beside``."""
    if tensor.device.type != "cpu" and tensor.device != beside.device:
        raise ValueError(f"{name} must be on the CPU or on {beside.device}, found {tensor.device}")


def matrix(name: str, rows: Tensor) -> None:
    """Requires a floating-point matrix with at least one row."""
    floating(name, rows, (None, None))
    if rows.shape[0] == 0:
        raise ValueError(f"{name} must have at least one row, found shape {list(rows.shape)}")


def layer_offsets(offsets: Tensor, columns: int) -> None:
    """Requires a CPU vector of at least two int64 numbers that rise from 0 to the number of columns."""
    check_shape("offsets", offsets, (None,), torch.int64)
    if offsets.device.type != "cpu":
        raise ValueError(f"offsets must be on the CPU, found {offsets.device}")
    if offsets.shape[0] < 2:
        raise ValueError(f"offsets must have at least two entries, found {offsets.shape[0]}")
    if _readable(offsets):
        starts: list[int] = offsets.tolist()
        if starts[0] != 0 or starts[-1] != columns or starts != sorted(starts):
            raise ValueError(f"offsets must rise from 0 to n = {columns} without decreasing, found {starts}")


def layers(rows: Tensor, offsets: Tensor, total_columns: int | None = None) -> None:
    """Requires a :func:`matrix`, the offsets of its layers, and as many columns as :func:`node_of_tree` says."""
    matrix("rows", rows)
    layer_offsets(offsets, rows.shape[1])
    node_of_tree(rows.shape[1], total_columns)


def node_of_tree(columns: int, total_columns: int | None) -> None:
    """Requires as many columns as a node of the tree of sums over ``total_columns`` can have.

    Where the columns begin is not known here: a node is one of some size, or whatever the last of that size has.
    """
    integer("total_columns", total_columns, optional=True)
    if total_columns is None or columns in (0, total_columns):
        return
    width = slice_columns(total_columns)
    while width < columns:
        width *= 2
    if columns > total_columns or (columns != width and (total_columns - columns) % width):
        raise ValueError(
            f"total_columns must be that of a matrix of which {columns} columns are a node of the tree of sums "
            f"(fl_lightning.ops.slices), found {total_columns}"
        )


def integer(name: str, value: int | None, optional: bool = False, least: int = 0, most: float = inf) -> None:
    """Requires an integer within bounds, or None if it is optional."""
    # Every call of an op passes here: what is right at a glance does not go through the check that words errors.
    plain = type(value) is int and least <= value <= min(most, _LARGEST)
    if plain or (value is None and optional) or torch.compiler.is_compiling():
        return
    check(name, value, int | None if optional else int, Bounds(least, most))


def ratio(name: str, value: float) -> None:
    """Requires a number from 0 on."""
    if (type(value) is float and 0 <= value < inf) or torch.compiler.is_compiling():
        return
    check(name, value, float, Bounds(0))


def positions(name: str, chosen: Tensor, count: int) -> None:
    """Requires a CPU vector of int64 numbers from 0 to ``count - 1``."""
    check_shape(name, chosen, (None,), torch.int64)
    if chosen.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, found {chosen.device}")
    if _readable(chosen) and any(not 0 <= place < count for place in chosen.tolist()):
        raise ValueError(f"{name} must lie between 0 and {count - 1}, found {chosen.tolist()}")


def permutation(name: str, order: Tensor) -> None:
    """Requires each of 0..m - 1 once, if the numbers are at hand."""
    if _readable(order) and sorted(order.tolist()) != list(range(order.shape[0])):
        raise ValueError(f"{name} must be a permutation of 0..{order.shape[0] - 1}, found {order.tolist()}")


def positive(name: str, weights: Tensor) -> None:
    """Requires positive numbers, if they are at hand."""
    if _readable(weights) and not all(weight > 0 for weight in weights.tolist()):
        raise ValueError(f"{name} must be positive, found {weights.tolist()}")


def _readable(tensor: Tensor) -> bool:
    """Whether the values can be read now: not on another device, and not while a graph is traced."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and tensor.device.type == "cpu"
