# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of several processes, and of the simulation of large ones."""
