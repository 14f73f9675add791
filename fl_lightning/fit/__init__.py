# SPDX-License-Identifier: Apache-2.0
"""One fit: rounds open, clients train, the server aggregates, models are evaluated, and checkpoints carry it all.

Uses ``clients`` and the rooms below it; ``strategy`` has the methods that Lightning calls.
"""
