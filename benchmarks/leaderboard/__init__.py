# SPDX-License-Identifier: Apache-2.0
"""One table of all methods, tuned alike, on the same real data."""
