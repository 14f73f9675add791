# SPDX-License-Identifier: Apache-2.0
"""What SCAFFOLD and FedDyn share: a vector of the model's size per client, and their weighted mean on the server.

All vectors start at 0. A client whose report did not arrive keeps what it had, so the server's vector is the weighted
mean of the clients' at all times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.algorithms._shared.rows import require_finite
from fl_lightning.algorithms.records import Federation, LocalWork
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.storage.per_client import PerClient
from fl_lightning.core.tensors import foreach_add_
from fl_lightning.core.updates import UpdateMatrix


def at_begin(vector: Tensor | None, federation: Federation, name: str) -> Tensor:
    """The server's vector as a fit begins: 0, or a restored one on the federation's device."""
    n = federation.numel
    if vector is None:
        return torch.zeros(n, dtype=federation.dtype, device=federation.device)
    if vector.shape != (n,):
        raise ValueError(f"{name} must have {n} numbers, found {vector.numel()} in the checkpoint")
    return vector.to(federation.device)


def mean_of(vectors: PerClient[Tensor], federation: Federation, shares: Tensor) -> Tensor:
    """The server's vector anew, where other clients are registered: the mean of theirs, weighted by ``shares [N]``."""
    mean = at_begin(None, federation, "")
    for client, vector in sorted(vectors.items()):
        mean += float(shares[client]) * vector.to(mean)
    return mean


def add_to_gradients(work: LocalWork, vectors: Sequence[Tensor], factor: float = 1.0) -> None:
    """Adds a multiple of a vector per parameter to its gradient; parameters without one stay as they are."""
    pairs = [(p.grad, vector) for p, vector in zip(work.parameters, vectors, strict=True) if p.grad is not None]
    if pairs:
        foreach_add_([gradient for gradient, _ in pairs], [vector for _, vector in pairs], alpha=factor)


def uniform_shares(cohort: Cohort) -> Tensor:
    """``[m]`` what each client of the round counts in the server's vector, of 1 for all registered clients."""
    return torch.full_like(cohort.sizes, 1.0 / (cohort.num_clients or len(cohort)))


def add_sent(vector: Tensor | None, cohort: Cohort, sent: UpdateMatrix, shares: Tensor) -> Tensor:
    """The server's vector ``[n]`` with what the round's clients sent ``[m, n]``, weighted by ``shares``."""
    return sent.combine(shares, out=torch.zeros_like(cohort.params) if vector is None else vector.clone())


def add_to_own(vectors: PerClient[Tensor], cohort: Cohort, sent: UpdateMatrix) -> None:
    """Adds to each client's vector what it sent."""
    for client, row in zip(cohort.client_ids, sent.rows, strict=True):
        held = vectors.get(client)
        vectors[client] = row.clone() if held is None else held + row.to(held.device)


def check_vector(vector: Tensor, cohort: Cohort, sent: UpdateMatrix, name: str) -> None:
    """Refuses a round that would leave the server something else than finite numbers."""
    if not bool(cohort.updates.norm_of(vector).isfinite()):
        require_finite(sent.norms().isfinite(), cohort, name)
