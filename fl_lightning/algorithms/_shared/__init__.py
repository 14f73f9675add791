# SPDX-License-Identifier: Apache-2.0
"""What several methods compute alike: weights, common descent directions, disparities, prototypes, earlier models.

Uses ``core``, ``ops`` and ``arguments``, and what all methods share in ``algorithms``; never a method's file.
"""
