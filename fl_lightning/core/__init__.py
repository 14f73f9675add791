# SPDX-License-Identifier: Apache-2.0
"""The nouns that every other room uses: cohorts, layouts, update matrices, records, seeds and the state of a module.

Uses ``ops``, ``metrics`` and ``arguments``. ``core.lightning`` holds everything that touches private parts of
Lightning, ``core.storage`` what methods keep per client across rounds.
"""
