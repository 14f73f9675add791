# SPDX-License-Identifier: Apache-2.0
"""Parts of the comparison with other packages; every ``side_*`` module runs as a program of its own."""
