# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must have in common with the fit that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.core.layout import layout_difference
from fl_lightning.core.lightning.names import rank_zero_warn

_MUST_AGREE = ("method", "clients", "trainable parameters", "server_optimizer")
_LAYOUT = "layout"


def refuse_checkpoint(found: Mapping[str, Any], expected: Mapping[str, Any], source: str) -> None:
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
