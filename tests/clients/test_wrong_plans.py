# SPDX-License-Identifier: Apache-2.0
"""What happens if a plan is wrong after all."""

from __future__ import annotations

import pytest
import torch
from planned_fits import OLD, agree, both
from support import Blobs, fresh, train, weights

import fl_lightning as fl
from fl_lightning.clients.planned import plan

pytestmark = pytest.mark.fit


def broken_after(steps, monkeypatch):
    """Lets programs give other gradients from some step on."""
    right, calls = plan.function_of, []

    def function_of(*args):
        program, size = right(*args)

        def wrong(*inputs):
            calls.append(1)
            returned, gradients = program(*inputs)
            return returned, [g * 1.5 for g in gradients] if len(calls) > steps else gradients

        return wrong, size

    monkeypatch.setattr(plan, "function_of", function_of)


REPEATED = {
    "SGD": ({}, {}),
    "SCAFFOLD": ({"algorithm": fl.algorithms.SCAFFOLD()}, {}),
    "momentum and BatchNorm": ({}, {"norm": True, "momentum": 0.9}),
}


@pytest.mark.parametrize("case", REPEATED)
def test_a_round_with_wrong_plans_is_repeated_without(case, caplog, monkeypatch):
    strategy, options = REPEATED[case]
    if OLD and "norm" in options:
        pytest.skip("steps with BatchNorm are not planned")
    options, kept = {"log": True, **options}, {"client_optimizer_state": "keep", **strategy}
    eager = train(fresh(**options), 4, planned_steps=False, **kept)
    broken_after(30, monkeypatch)
    with (
        caplog.at_level("INFO"),
        pytest.warns(UserWarning, match="is repeated without planned steps, because a gradient"),
    ):
        planned = train(fresh(**options), 4, planned_steps=True, **kept)
    assert torch.equal(weights(eager.module), weights(planned.module))
    assert planned.strategy.last_round.planned_steps == 0
    assert sum("eager from now on" in message for message in caplog.messages) == 1


def alike():
    """Data of which all batches have one shape."""
    return fl.FederatedDataModule(Blobs(), fl.data.IID(6), seed=0)


def test_the_end_of_a_round_finds_what_no_first_step_shows(monkeypatch):
    """All batches have one shape, so after the first step of the fit no plan is new."""
    eager = train(fresh(), 4, planned_steps=False, data=alike())
    broken_after(20, monkeypatch)
    with pytest.warns(UserWarning, match="Round 1 is repeated without planned steps, because a gradient"):
        planned = train(fresh(), 4, planned_steps=True, data=alike())
    assert torch.equal(weights(eager.module), weights(planned.module))


def test_a_round_with_wrong_plans_in_workers_is_repeated_without(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("worker processes are copies of this one, in which CUDA may have been used")
    eager = train(fresh(), 4, planned_steps=False, data=alike())
    broken_after(3, monkeypatch)  # steps of each worker, which is new in every round
    with pytest.warns(UserWarning, match="is repeated without planned steps, because a gradient"):
        planned = train(fresh(), 4, planned_steps=True, data=alike(), executor=fl.executors.Parallel(workers=2))
    assert torch.equal(weights(eager.module), weights(planned.module))


def test_a_plan_that_is_wrong_from_the_start_is_never_used(caplog, monkeypatch, recwarn):
    broken_after(0, monkeypatch)
    eager, planned, said = both(caplog)
    assert not any("is repeated" in str(warning.message) for warning in recwarn)
    agree(eager, planned)
    assert said == ["Local steps: eager from now on, because a gradient from a plan would differ from PyTorch's"]
