# SPDX-License-Identifier: Apache-2.0
"""What to install where an optional package is missing."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """The commands for a checkout and for a release, as the end of a sentence."""
    return f"pip install '.[{extra}]' in a checkout, pip install 'fl-lightning[{extra}]' for a release"
