# SPDX-License-Identifier: Apache-2.0
"""What methods keep per client across rounds: update rows with their inner products, tensors, and models.

Uses the rest of ``core`` and ``ops``.
"""
