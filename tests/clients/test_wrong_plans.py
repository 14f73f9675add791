# SPDX-License-Identifier: Apache-2.0
"""What happens if a plan is wrong after all."""

from __future__ import annotations

import pytest
import torch
from planned_fits import agree, both
from support import Blobs, fresh, train, weights

import fl_lightning as fl
from fl_lightning.clients.planned import plan

pytestmark = pytest.mark.fit


def broken_after(steps, monkeypatch):
    """Lets programs give other gradients from some step on."""
    right, calls = plan.program_of, []

    def program_of(*args):
        program = right(*args)

        def wrong(*inputs):
            calls.append(1)
            returned, gradients = program(*inputs)
            return returned, [g * 1.5 for g in gradients] if len(calls) > steps else gradients

        return wrong

    monkeypatch.setattr(plan, "program_of", program_of)


WRONG = "planned_steps must be left out of this fit, because what a plan computes would differ"


def alike():
    """Data of which all batches have one shape."""
    return fl.FederatedDataModule(Blobs(), fl.data.IID(6), seed=0)


@pytest.mark.parametrize("options", [{}, {"algorithm": fl.algorithms.SCAFFOLD()}], ids=["FedAvg", "SCAFFOLD"])
def test_a_round_with_wrong_plans_ends_the_fit(options, monkeypatch):
    """All batches have one shape, so after the first step of the fit no plan is new."""
    one = train(fresh(), 1, data=alike(), **options)
    broken_after(20, monkeypatch)
    module = fresh()
    with pytest.raises(ValueError, match=WRONG):
        train(module, 4, planned_steps=True, data=alike(), **options)
    assert torch.equal(weights(one.module), weights(module)), "of the round before"


def test_wrong_plans_in_workers_end_the_fit(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("worker processes are copies of this one, in which CUDA may have been used")
    broken_after(3, monkeypatch)  # steps of each worker, which is new in every round
    with pytest.raises(ValueError, match=WRONG):
        train(fresh(), 4, planned_steps=True, data=alike(), executor=fl.executors.Parallel(workers=2))


def test_a_plan_that_is_wrong_from_the_start_is_never_used(caplog, monkeypatch):
    broken_after(0, monkeypatch)
    eager, planned, said = both(caplog)
    agree(eager, planned)
    assert said == ["Local steps: eager from now on, because what a plan computes would differ from PyTorch's bits"]
