# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must have in common with the fit that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from fl_lightning.algorithms.base import Needs
from fl_lightning.core.layout import ParamLayout, layout_difference, layout_fingerprint
from fl_lightning.core.lightning.names import rank_zero_warn
from fl_lightning.simulation.options import FitOptions

_MUST_AGREE = ("method", "clients", "trainable parameters", "server_optimizer")
_LAYOUT = "layout"


def fit_description(
    options: FitOptions,
    needs: Needs,
    layout: ParamLayout,
    server_optimizer: Optimizer | None,
    num_clients: int,
    clients_per_round: int,
) -> dict[str, Any]:
    """What a checkpoint should have in common with the fit that goes on from it, as the checkpoint holds it."""
    return {
        "method": f"{type(options.algorithm).__name__} with {type(options.client_rule).__name__}",
        "clients": num_clients,
        "trainable parameters": layout.numel,
        "layout": layout_fingerprint(layout),
        "server_optimizer": "none" if server_optimizer is None else type(server_optimizer).__name__,
        "clients_per_round": clients_per_round,
        "local_epochs": options.local_epochs,
        "local_steps": options.local_steps,
        "client_optimizer_state": options.client_optimizer_state,
        "buffers": options.buffers,
        "full_gradients": needs.full_gradients,
        "seed": options.seed,
    }


def check_resume(found: Mapping[str, Any], expected: Mapping[str, Any], source: str) -> None:
    """Compares the fit that wrote a checkpoint with the one that goes on from it; warns of what may differ.

    Args:
        found: of the fit that wrote it.
        expected: of this fit.
        source: what the state comes from, as a message names it.

    Raises:
        ValueError: the checkpoint's state means nothing to this fit: another method, server optimizer, number of
            clients or of trainable parameters, or another layout of them.
    """
    differing = {name: (found.get(name), value) for name, value in expected.items() if found.get(name) != value}
    for name in _MUST_AGREE:
        if name in differing:
            old, new = differing[name]
            raise ValueError(
                f"{source} was written with {name}: {old}, and this fit has {name}: {new}; use the same, or "
                "start from the weights alone (load_from_checkpoint)"
            )
    old, new = differing.pop(_LAYOUT, (None, None))
    if old is not None:  # files of earlier versions have none
        raise ValueError(
            f"{source} was written with {layout_difference(old, new)}: what it remembers of clients would be taken for "
            "other parameters; use the same layers and module, or start from the weights alone (load_from_checkpoint)"
        )
    if differing:
        changes = ", ".join(f"{name} from {old!r} to {new!r}" for name, (old, new) in differing.items())
        rank_zero_warn(f"the fit goes on with other settings than {source} was written with: {changes}")
