# SPDX-License-Identifier: Apache-2.0
"""A federation on Flower: its network, this package's methods and clients, with the extra ``flower``.

Uses the rest of ``federation`` and the rooms below it.
"""

from fl_lightning.core.errors import how_to_install

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:
    raise ImportError(f"fl_lightning.federation.flower needs Flower: {how_to_install('flower')}") from error

from fl_lightning.federation.flower.client_app import client_id_of, lightning_client_app
from fl_lightning.federation.flower.strategy import FairStrategy

__all__ = ["FairStrategy", "client_id_of", "lightning_client_app"]
