# SPDX-License-Identifier: Apache-2.0
"""The gradient of all of a client's data, uploaded in place of local training (FedSGD)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms.records import LocalWork


def full_gradient(
    work: LocalWork,
    batches: Iterable[tuple[Any, int]],
    loss_of_batch: Callable[[Any, int, int], Tensor | None],
    out: Tensor,
) -> Tensor:
    """Computes the learning rate times the full gradient.

    Args:
        work: the client, bound to the global parameters; its learning rate is known.
        batches: one pass over its training data, with numbers of samples.
        loss_of_batch: the module's loss, from a batch, its index and its samples.
        out: contiguous ``[n]``, takes the result.

    Returns:
        The sample-weighted mean training loss.

    Raises:
        ValueError: the module skips a batch, or there is none.
    """
    assert work.client_lr is not None
    total: Tensor | None = None
    for parameter in work.parameters:
        parameter.grad = None
    for index, (batch, size) in enumerate(batches):
        loss = loss_of_batch(batch, index, size)
        if loss is None:
            raise ValueError(
                f"training_step must return a loss for full gradients, found None at client {work.client_id}"
            )
        share = loss * (size / work.num_samples)
        torch.autograd.backward(share)
        total = share.detach() if total is None else total + share.detach()
    if total is None:
        raise ValueError(f"client {work.client_id} has no batch to train on ({work.num_samples} samples)")
    for parameter, view in zip(work.parameters, work.layout.views(out), strict=True):
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        view.zero_() if gradient is None else torch.mul(gradient, work.client_lr, out=view)
    return total
