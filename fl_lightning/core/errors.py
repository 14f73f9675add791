# SPDX-License-Identifier: Apache-2.0
"""Errors that users can catch by name, and how sentences about missing packages end."""

from __future__ import annotations


class ClientError(RuntimeError):
    """A client could not contribute to a round; the message names it and says why."""


class ModuleError(ValueError):
    """A method of the module returns what no client's data can explain; leaving clients out would not help."""


class RankError(RuntimeError):
    """The processes of a fit cannot go on together; no client is to blame."""


def how_to_install(extra: str) -> str:
    """The commands for a checkout and for a release, as the end of a sentence."""
    return f"pip install '.[{extra}]' in a checkout, pip install 'fl-lightning[{extra}]' for a release"
