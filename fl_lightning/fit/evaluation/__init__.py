# SPDX-License-Identifier: Apache-2.0
"""Validation and test of one model on every client's data, with each client's own values.

Uses ``training``, ``callbacks``, ``metrics`` and the rooms below them.
"""
