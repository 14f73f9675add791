# SPDX-License-Identifier: Apache-2.0
"""All faults of the kernels, by list."""

from mutations import csrc_cpu, csrc_cuda

LISTS = {"csrc/cpu": csrc_cpu.MUTATIONS, "csrc/cuda": csrc_cuda.MUTATIONS}
