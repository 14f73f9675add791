# SPDX-License-Identifier: Apache-2.0
"""What is computed of a batch, recorded once and repeated in memory that stays.

Uses ``training/`` and the rooms below it.
"""
