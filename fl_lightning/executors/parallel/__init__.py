# SPDX-License-Identifier: Apache-2.0
"""Clients that train in worker processes, with the same bits as one after the other.

Uses ``training`` and the rooms below it.
"""
