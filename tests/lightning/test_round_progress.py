# SPDX-License-Identifier: Apache-2.0
"""The phases of a round follow one table."""

from itertools import product

import pytest
from support import quiet_trainer

import fl_lightning as fl
from fl_lightning.lightning.round_progress import TRANSITIONS, RoundPhase, RoundProgress


def progress_in(phase):
    progress = RoundProgress(quiet_trainer(fl.FederatedStrategy()))
    progress.phase = phase
    return progress


def test_the_table_names_every_phase_and_leads_from_each_to_a_next_round():
    assert TRANSITIONS.keys() == set(RoundPhase)
    for start in RoundPhase:
        seen, front = set(), {start}
        while front - seen:
            seen |= front
            front = set().union(*(TRANSITIONS[phase] for phase in front))
        assert RoundPhase.TRAINING in seen


@pytest.mark.parametrize(("before", "after"), list(product(RoundPhase, RoundPhase)), ids=lambda phase: phase.value)
def test_a_phase_follows_where_the_table_allows_it(before, after):
    progress = progress_in(before)
    if after in TRANSITIONS[before]:
        progress.enter(after)
        assert progress.phase is after
    else:
        with pytest.raises(RuntimeError, match=r"train its clients|cannot follow"):
            progress.enter(after)
        assert progress.phase is before


def test_a_round_that_ends_without_its_server_step_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"round 0 must train its clients before it ends, .* with a new Trainer"):
        progress_in(RoundPhase.TRAINING).enter(RoundPhase.EPOCH_END)


def test_phases_are_plain_strings_in_a_checkpoint():
    assert {phase.value for phase in RoundPhase} == {"between", "round", "aggregated", "validated", "epoch_end"}
    assert type(progress_in(RoundPhase.TRAINING).state_dict()["place"]) is str
