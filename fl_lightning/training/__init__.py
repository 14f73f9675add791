# SPDX-License-Identifier: Apache-2.0
"""Local training of one client: bound parameters, local steps, its optimizer, buffers and losses, and what it uploads.

Uses ``core``, ``data``, ``algorithms``, ``attacks`` and ``ops``; knows nothing of rounds, servers and other clients.
"""
