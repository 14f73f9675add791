# SPDX-License-Identifier: Apache-2.0
"""Runs that repeat what the papers report."""
