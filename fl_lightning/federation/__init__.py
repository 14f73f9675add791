# SPDX-License-Identifier: Apache-2.0
"""A real federation: a server and clients that are processes of their own, by messages, on Flower or on NVFlare.

Executors that carry clients of a simulation to workers, such as Ray, send messages in the same way.

Uses ``fit`` and the rooms below it. Each adapter to another library needs its own extra and is imported by name.
"""
