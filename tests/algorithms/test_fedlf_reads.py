# SPDX-License-Identifier: Apache-2.0
"""FedLF on a device: one look at what is there per step, and the same step as on the CPU."""

import itertools

import pytest
import torch
from algorithm_cohorts import elsewhere, make_cohort, random_rows, sampled_rounds, switched
from cases import pairwise
from remote_device import RemoteDevice

from fl_lightning.algorithms import FedLF
from fl_lightning.core.layout import ParamLayout


def both(make_rule, cohorts):
    """Steps, reports and looks at the device, round by round, of a rule there and of the same rule on the CPU."""
    here, there, device = make_rule(), make_rule(), RemoteDevice()
    for cohort in cohorts:
        want = here.aggregate(cohort)
        with device:
            remote = elsewhere(device, cohort)
            assert device.reads == device.waits == []  # nor does a cohort look at what it is given
            step = there.aggregate(remote)
        queued = device.calls.index("synchronize") - 1
        assert "combine" in device.calls[queued]  # the device has the step before the CPU waits
        assert device.calls[queued + 1 :].count(device.calls[queued]) == (len(device.reads) > 1)
        device.calls.clear()
        yield device.get(step), want, there.report, here.report, device.reads[:], device.waits[:]
        device.reads.clear()
        device.waits.clear()


def assert_same(step, want, report, other):
    torch.testing.assert_close(step, want, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(report.weights, other.weights, rtol=1e-9, atol=1e-12)
    assert (report.flagged, report.scalars) == (other.flagged, other.scalars)


@pytest.mark.parametrize(
    ("window", "switches", "dtype"),
    pairwise(
        ["none", "last", "all"],
        [{}, {"equal_lengths": False}, {"fair_kind": "h"}, {"fair_kind": "none"}, {"fair_row": "needed"}],
        [torch.float64, torch.float32],
    ),
)
def test_one_look_per_step(window, switches, dtype):
    layout = ParamLayout.from_sizes([300, 0, 80, 120])
    cohorts, rows = sampled_rounds(6, 9, 3, 51, dtype, 500, layout), 0.0
    switches = dict(switches)
    asked = switches.pop("fair_row", "always")
    for step, want, report, other, reads, waits in both(
        lambda: switched(FedLF(history_window=window, fair_row=asked), **switches), cohorts
    ):
        assert not report.flagged
        assert len(reads) == 1
        assert waits == []
        torch.testing.assert_close(step, want)
        torch.testing.assert_close(report.weights, other.weights, rtol=1e-6, atol=1e-9)
        assert report.scalars == other.scalars
        rows += report.scalars["history_rows"]
    assert (rows == 0) == (window == "none")


@pytest.mark.parametrize("losses", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("equalise", [True, False])
def test_losses_that_define_no_fair_row(losses, equalise):
    cohorts = [make_cohort(random_rows(3, 52), losses), make_cohort(random_rows(1, 53), losses[:1], when=1)]
    for step, want, report, other, reads, _ in both(lambda: switched(FedLF(), equal_lengths=equalise), cohorts):
        assert len(reads) == 1
        assert_same(step, want, report, other)


def test_degenerate_rounds_are_solved_on_the_cpu_as_they_were():
    flagged = merged = usual = 0
    for seed, (sizes, m) in itertools.product(range(4), (((2, 1, 12, 1, 3), 4), ((2, 30, 20), 3))):
        cohorts = sampled_rounds(4, 6, m, seed, n=sum(sizes), layout=ParamLayout.from_sizes(sizes))
        for step, want, report, other, reads, _ in both(FedLF, cohorts):
            assert_same(step, want, report, other)
            assert (len(reads) == 1) == (not report.flagged and not report.scalars["merged_layers"])
            flagged += report.flagged
            merged += report.scalars["merged_layers"] > 0
            usual += len(reads) == 1
    assert min(flagged, merged, usual) > 0
