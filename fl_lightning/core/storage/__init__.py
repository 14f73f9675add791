# SPDX-License-Identifier: Apache-2.0
"""The state of methods from round to round: what they declare, what follows from it (``rule_state``), and files.

Uses the rest of ``core``, ``ops`` and ``arguments``.
"""
