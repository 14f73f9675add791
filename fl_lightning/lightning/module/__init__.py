# SPDX-License-Identifier: Apache-2.0
"""The state of a module: what a visit or an evaluation can change in it, and how it is put back.

Uses the rest of ``lightning``, and ``core``.
"""
