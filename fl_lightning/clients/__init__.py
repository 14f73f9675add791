# SPDX-License-Identifier: Apache-2.0
"""One client's visit, and who runs visits: one after the other, in worker processes, or on ranks.

Uses ``algorithms``, ``data``, ``lightning``, ``core``, ``ops`` and ``arguments``; knows nothing of rounds and
servers. ``executors`` holds what ``FederatedStrategy(executor=...)`` takes.
"""
