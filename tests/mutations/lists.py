# SPDX-License-Identifier: Apache-2.0
"""All faults, by list."""

from mutations import (
    columns,
    csrc_cpu,
    csrc_cuda,
    defences,
    executors,
    federation,
    flower,
    flower_messages,
    messages,
    methods,
    newer_methods,
    nvflare,
    plans,
    rounds,
    storage,
)

LISTS = {
    "methods": methods.MUTATIONS,
    "newer methods": newer_methods.MUTATIONS,
    "defences": defences.MUTATIONS,
    "storage": storage.MUTATIONS,
    "columns": columns.MUTATIONS,
    "federation": federation.MUTATIONS,
    "flower": flower.MUTATIONS,
    "flower messages": flower_messages.MUTATIONS,
    "messages": messages.MUTATIONS,
    "nvflare": nvflare.MUTATIONS,
    "rounds": rounds.MUTATIONS,
    "executors": executors.MUTATIONS,
    "plans": plans.MUTATIONS,
    "csrc/cpu": csrc_cpu.MUTATIONS,
    "csrc/cuda": csrc_cuda.MUTATIONS,
}
