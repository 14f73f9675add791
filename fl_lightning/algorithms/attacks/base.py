# SPDX-License-Identifier: Apache-2.0
"""What a dishonest client may do, and which clients are dishonest."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.arguments import Bounds, checked
from fl_lightning.core.seeding import derive_seed
from fl_lightning.core.storage import rule_state
from fl_lightning.core.taken_names import refuse_taken_names
from fl_lightning.core.updates import UpdateMatrix


@checked(num_clients=Bounds(1), share=Bounds(0, 1))
def dishonest_clients(num_clients: int, share: float, seed: int = 0) -> tuple[int, ...]:
    """Draws the clients that are dishonest throughout a run.

    Args:
        num_clients: registered clients.
        share: fraction of them, in [0, 1], rounded to the nearest count.
        seed: of the draw.

    Returns:
        Ascending client ids.

    Raises:
        ValueError: an argument is out of range.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "dishonest"))
    chosen = torch.randperm(num_clients, generator=generator)[: round(share * num_clients)]
    return tuple(sorted(chosen.tolist()))


class Attack(ABC):
    """What some clients do instead of what they should. The base class is honest; override what an attack changes.

    Extras of client rules and companions stay honest.

    Attributes:
        clients: ids of the dishonest clients.
        columnwise: as in :class:`ServerRule`, for what :meth:`conspire` does.
    """

    clients: Sequence[int]
    columnwise: bool = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        rule_state.set_columnwise(cls, "conspire")
        refuse_taken_names(cls, Attack)

    def change_batch(self, batch: Any) -> Any:
        """What a dishonest client takes for a batch of its training data; the batch itself must not change."""
        return batch

    def report(self, measured: Mapping[str, float]) -> dict[str, float]:
        """What a dishonest client says about its ``"loss"`` and ``"accuracy"``, as far as it is asked for them."""
        return dict(measured)

    def replace(self, update: Tensor, params: Tensor, seed: int) -> None:
        """Overwrites an update in place.

        Args:
            update: what the client would send, ``params`` minus its trained parameters, ``[n]``.
            params: the global model that it trained from, ``[n]``, not to be written to.
            seed: belongs to this client and round.
        """

    def conspire(self, updates: UpdateMatrix, dishonest: Sequence[int]) -> bool:
        """Overwrites the updates of the round's dishonest clients in place, with those of all clients in view.

        Args:
            updates: one row per client of the round.
            dishonest: places of the dishonest clients, at least one.

        Returns:
            Whether a row has changed.
        """
        return False

    def among(self, client_ids: Sequence[int]) -> list[int]:
        """The places of the dishonest clients among these."""
        return [place for place, client in enumerate(client_ids) if client in self.clients]

    def check(self, num_clients: int) -> None:
        """Raises ValueError unless all ids are those of clients."""
        strangers = [client for client in self.clients if not 0 <= client < num_clients]
        if strangers:
            raise ValueError(f"clients of {type(self).__name__} must be ids below {num_clients}, found {strangers}")
