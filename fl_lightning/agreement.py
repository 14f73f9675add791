# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint must have in common with the fit that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning._lightning import rank_zero_warn
from fl_lightning.updates import ParamLayout

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


def layout_fingerprint(layout: ParamLayout) -> dict[str, list[str]]:
    """Order, names and shapes of the parameters, and the layers with where they begin, as a checkpoint keeps them."""
    bounds = zip(layout.layer_names, layout.layer_starts[:-1], layout.layer_starts[1:], strict=True)
    return {
        "parameters": [f"{n} {list(shape)}" for n, shape in zip(layout.names, layout.shapes, strict=True)],
        "layers": [f"{name} [{start}:{stop}]" for name, start, stop in bounds],
    }


def layout_difference(old: Mapping[str, Sequence[str]], new: Mapping[str, Sequence[str]]) -> str:
    """Where two fingerprints first differ, in words that go on after "was written with"."""
    for kind, singular in (("parameters", "parameter"), ("layers", "layer")):
        for place, (a, b) in enumerate(zip(old[kind], new[kind], strict=False)):
            if a != b:
                return f"{singular} {place}: {a}, and this fit has {b}"
        if len(old[kind]) != len(new[kind]):
            return f"{len(old[kind])} {kind}, and this fit has {len(new[kind])}"
    return "the same layout"
