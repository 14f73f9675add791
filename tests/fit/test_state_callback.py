# SPDX-License-Identifier: Apache-2.0
"""The state callback against parts that only write down what it asks of them."""

from types import SimpleNamespace

import pytest
import torch

from fl_lightning.fit.state_callback import VERSION, FederatedState


class Calls:
    """Every method exists and is written down with its arguments."""

    def __init__(self, name, calls):
        self.__dict__.update(name=name, calls=calls)

    def __getattr__(self, method):
        return lambda *arguments: self.calls.append((self.name, method, *arguments))


class Saved(Calls):
    def states(self):
        return {"algorithm": {"lam": torch.ones(2)}}


def make():
    calls = []
    state = FederatedState(Saved("fit", calls), Calls("evaluator", calls))
    state.attach(Calls("progress", calls))
    return state, calls


def trainer(fn, sanity_checking=False):
    return SimpleNamespace(state=SimpleNamespace(fn=fn), sanity_checking=sanity_checking)


def run(state, trainer, *hooks):
    for hook in hooks:
        getattr(state, hook)(trainer, None)


VALIDATION = ("on_validation_start", "on_validation_epoch_end", "on_validation_end")


def test_a_round_with_its_validation():
    (state, calls), fitting = make(), trainer("fit")
    run(state, fitting, "on_train_epoch_start", *VALIDATION, "on_train_epoch_end", "on_train_end")
    assert calls == [
        ("progress", "open_round"),
        ("fit", "begin_round"),
        ("evaluator", "begin", fitting, "val", None),
        ("evaluator", "end", fitting, state),
        ("evaluator", "stop"),
        ("progress", "end_epoch"),
        ("progress", "end_fit"),
        ("fit", "finish"),
    ]


@pytest.mark.parametrize("outside", [trainer("validate"), trainer("fit", sanity_checking=True)])
def test_a_validation_outside_rounds_is_no_part_of_one(outside):
    state, calls = make()
    run(state, outside, *VALIDATION)
    assert [name for name, *_ in calls] == ["evaluator"] * 3


def test_a_test_prints_after_the_parameters_are_back():
    (state, calls), testing = make(), trainer("test")
    run(state, testing, "on_test_start", "on_test_epoch_end", "on_test_end")
    assert [method for _, method, *_ in calls] == ["begin", "end", "stop", "print_table"]


def test_a_checkpoint_is_for_the_trainer_function_that_loads_it():
    (state, calls), saved = make(), make()[0].state_dict()
    assert set(saved) == {"version", "algorithm"}
    state.load_state_dict(saved)
    run(state, validating := trainer("validate"), "on_validation_start")
    assert calls == [("evaluator", "begin", validating, "val", saved)]
    state.attach(Calls("progress", calls))
    assert state.loaded is None
    for other in (VERSION - 1, VERSION + 1):
        with pytest.raises(ValueError, match=f"has version {other}, and this fl_lightning reads version {VERSION}"):
            state.load_state_dict({**saved, "version": other})
