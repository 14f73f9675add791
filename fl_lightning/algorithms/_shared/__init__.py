# SPDX-License-Identifier: Apache-2.0
"""What several methods compute alike: weights, common descent directions, disparities, prototypes, earlier models.

Uses ``core``, ``solvers`` and ``ops``, and ``algorithms.base``; never a method's file.
"""
