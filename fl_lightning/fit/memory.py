# SPDX-License-Identifier: Apache-2.0
"""How much memory a fit takes."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from fl_lightning.algorithms.base import ClientRule, ServerRule
from fl_lightning.algorithms.records import Federation
from fl_lightning.core.tensors import padded


def memory_plan(
    federation: Federation,
    rules: Iterable[ServerRule | ClientRule],
    server_optimizer: bool,
    keeps_client_optimizers: bool,
    summed: bool = False,
) -> dict[str, int]:
    """Lists what a fit allocates, in bytes by name; the federation's cohort size is known.

    ``summed``: one update is held at a time, and the sum of a round's in float64.

    An optimizer counts with two numbers per parameter. The server's takes copies of parameters and state as well,
    because a step after which something is not finite is not taken.
    """
    rows, clients = federation.cohort_size or 0, federation.num_clients
    columns, total = federation.numel, federation.layout.numel
    params = total * federation.dtype.itemsize
    row, whole, in_training = (
        sum(padded(size, federation.dtype) for size in sizes) * federation.dtype.itemsize
        for sizes in ([columns], [total], federation.layout.sizes)
    )
    parts = {"global parameters": params, "parameters in training (per process)": in_training}
    if summed:
        parts[f"one update, and the sum of {rows}"] = row + 8 * columns
    else:
        parts[f"update matrix ({rows} x {columns})"] = rows * row
    if federation.columns is not None:
        trained = ceil(rows / len(federation.columns.spans))
        parts[f"updates of clients that train here ({trained} x {total})"] = trained * whole
    for rule in rules:
        parts |= rule.memory(federation, rows)
    if federation.buffers > 0:
        parts[f"buffers ({rows + 1} copies)"] = (rows + 1) * federation.buffers
    if server_optimizer:
        parts["server optimizer (up to)"] = 2 * params
        parts["copies to take a step back (up to)"] = 3 * params
    if keeps_client_optimizers:
        parts[f"client optimizers (up to, {clients} clients)"] = 2 * clients * params
    return parts
