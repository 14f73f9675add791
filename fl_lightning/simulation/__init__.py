# SPDX-License-Identifier: Apache-2.0
"""One fit: rounds open, clients train, the server aggregates, models are evaluated, and checkpoints carry it all.

Uses ``executors``, ``training``, ``guards`` and the rooms below them; ``strategy.py`` and ``integrations`` call it.
"""
