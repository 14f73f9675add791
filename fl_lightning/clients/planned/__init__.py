# SPDX-License-Identifier: Apache-2.0
"""Local steps whose operations are recorded once and repeated in memory that stays.

Uses the rest of ``clients`` and the rooms below it, and these parts of PyTorch that have no promise to stay:

- ``TorchDispatchMode`` (``plan.py``); without it, this package fails to import.
- ``OpOverload._schema`` and ``_op``, and ``meta["grapharg"]`` of TorchDynamo's graphs (``plan.py``); without them,
  nothing is planned, and the log says so.
- The dictionaries of hooks (``planned_gradients.py``); without them, a visit fails by name.
"""
