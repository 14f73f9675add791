# SPDX-License-Identifier: Apache-2.0
"""The nouns that every other room uses: cohorts, layouts, update matrices, records and seeds.

Uses ``ops``, ``metrics`` and ``arguments``. ``core.storage`` holds what methods keep per client across rounds.
"""
