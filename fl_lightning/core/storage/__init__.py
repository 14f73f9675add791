# SPDX-License-Identifier: Apache-2.0
"""What methods keep from round to round: declarations (``declared``), what follows from them (``kept``), and files.

Uses the rest of ``core``, ``ops`` and ``arguments``.
"""
