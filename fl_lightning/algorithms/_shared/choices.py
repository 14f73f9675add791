# SPDX-License-Identifier: Apache-2.0
"""Arguments that name one of a few forms."""

from __future__ import annotations

from typing import Literal

Reading = Literal["library", "paper", "code"]
"""Whose form a method takes in the steps where its paper and its authors' code differ.

``"library"`` decides step by step, as the method's page in docs/methods lists; the others take one source throughout.
"""
