# SPDX-License-Identifier: Apache-2.0
"""The experiments, a file per paper, with the published figures."""
