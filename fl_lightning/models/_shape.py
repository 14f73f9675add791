# SPDX-License-Identifier: Apache-2.0
"""One clear sentence for images of the wrong shape, instead of a matrix product that does not fit."""

from __future__ import annotations

from torch import Tensor


def check_images(images: Tensor, channels: int, side: int | None = None) -> None:
    """Raises ``ValueError`` unless ``images`` is ``[B, channels, side, side]``; any side if ``side`` is ``None``."""
    fits = images.dim() == 4 and images.shape[1] == channels
    if not fits or (side is not None and tuple(images.shape[2:]) != (side, side)):
        wanted = f"[B, {channels}, {side or 'H'}, {side or 'W'}]"
        raise ValueError(f"images must have shape {wanted}, found {list(images.shape)}")
