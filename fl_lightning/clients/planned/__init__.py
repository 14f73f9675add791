# SPDX-License-Identifier: Apache-2.0
"""Local steps whose operations are recorded once and repeated in memory that stays.

Uses the rest of ``clients`` and the rooms below it, and these parts of PyTorch that have no promise to stay:

- ``TorchDispatchMode`` shows the calls of a recording (``recording.py``); without it, this package fails to import.
- ``OpOverload._schema`` says what a call writes into, and ``OpOverload._op`` calls it without the Python around it
  (``program.py``); without them, the log says that steps are eager because they cannot be recorded.
- ``meta["grapharg"]`` of TorchDynamo's graphs shows numbers that became tensors (``plan.py``); without it, nothing is
  planned.
- The dictionaries of hooks show code that no graph has (``planned_gradients.py``); without them, a visit fails by name.
"""
