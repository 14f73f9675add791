# SPDX-License-Identifier: Apache-2.0
"""Local training of one client: bound parameters, local steps, its optimizer, buffers and losses, and what it uploads.

Uses ``core``, ``data``, ``algorithms`` and ``attacks``; knows nothing of rounds, servers and other clients.
"""
