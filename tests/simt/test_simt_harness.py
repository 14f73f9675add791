# SPDX-License-Identifier: Apache-2.0
"""The harness itself: it runs a correct kernel right under every schedule, and finds every planted fault."""

import pytest
import simt_library
import torch

FAULTS = {
    "missing_barrier_before_read": "race: numbers|numbers.* was never written",
    "missing_barrier_before_write": "race: numbers",
    "missing_warp_barrier": "race: numbers",
    "wrong_shuffle_mask": "partial warp mask at",
    "partial_warp_at_shuffle": "not all lanes come|lanes of one warp wait at two places",
    "exited_thread_at_barrier": "1 threads have exited",
    "two_barriers_at_once": "two barriers at once",
    "read_of_nothing": r"numbers\[5\] is read and was never written",
    "outside_of_the_array": r"numbers\[64\] is outside of its 64 elements",
    "two_writers": r"race: numbers\[8\] was written",
    "too_much_shared_memory": "bytes of shared memory, of which the launch has 49152",
    "half_a_warpgroup": "fewer than 128 threads at",
    "copy_that_is_not_aligned": "a copy that is not aligned",
    "device_memory_without_barrier": r"race: output\[\d+\] was (read|written)|output.* was never written",
    "device_memory_written_while_read": r"race: output\[\d+\] was (read|written)",
    "device_memory_of_another_block": r"race: output\[\d+\] was written by thread \d+ of another block",
    "device_memory_that_nobody_wrote": r"output\[\d+\] is read and was never written",
    "outside_of_device_memory": "8 bytes are read outside of the device's memory",
    "input_that_is_written": "input is written to",
}
IN = torch.arange(64, dtype=torch.float64)


@pytest.mark.parametrize("schedule", simt_library.SCHEDULES)
def test_a_correct_kernel_passes(kernels, schedule):
    assert torch.equal(kernels.schedule(schedule).fault(0, IN), 8 * IN.roll(-99))


@pytest.mark.parametrize("schedule", simt_library.SCHEDULES)
@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1), ids=FAULTS)
def test_every_fault_is_found_under_every_schedule(kernels, number, schedule):
    with pytest.raises(simt_library.KernelError, match=list(FAULTS.values())[number - 1]):
        kernels.schedule(schedule, seed=3).fault(number, IN)


def test_a_launch_after_a_fault_is_fine(kernels):
    with pytest.raises(simt_library.KernelError):
        kernels.schedule("forward").fault(6, IN)
    assert torch.equal(kernels.fault(0, IN), 8 * IN.roll(-99))
