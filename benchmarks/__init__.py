# SPDX-License-Identifier: Apache-2.0
"""Measurements, each as ratios within one run."""
