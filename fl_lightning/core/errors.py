# SPDX-License-Identifier: Apache-2.0
"""Errors that users can catch by name."""

from __future__ import annotations


class ClientError(RuntimeError):
    """A client could not contribute to a round; the message names it and says why."""
