# SPDX-License-Identifier: Apache-2.0
"""Adapters to other libraries; each file needs its own extra and is imported by name.

Uses every room but ``strategy.py``, beside which it stands.
"""
