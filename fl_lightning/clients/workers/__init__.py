# SPDX-License-Identifier: Apache-2.0
"""Clients that train in worker processes, with the same bits as one after the other.

Uses the rest of ``clients`` and the rooms below it.
"""
