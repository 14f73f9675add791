# SPDX-License-Identifier: Apache-2.0
"""Errors that users can catch by name."""

from __future__ import annotations


class ClientError(RuntimeError):
    """A client could not contribute to a round; the message names it and says why."""


class ModuleError(ValueError):
    """A method of the module returns what no client's data can explain; leaving clients out would not help."""


class RankError(RuntimeError):
    """The processes of a fit cannot go on together; no client is to blame."""
