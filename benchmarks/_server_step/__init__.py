# SPDX-License-Identifier: Apache-2.0
"""Parts of benchmarks.server_step."""
