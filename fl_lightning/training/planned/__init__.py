# SPDX-License-Identifier: Apache-2.0
"""Forward and backward pass of a local step, traced once and repeated in memory that stays."""
