# SPDX-License-Identifier: Apache-2.0
"""Clients that train on the ranks of a distributed fit, with rows that are shared by columns.

Uses the rest of ``clients`` and the rooms below it.
"""
