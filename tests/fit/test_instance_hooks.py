# SPDX-License-Identifier: Apache-2.0
"""Hooks that were set on an object rather than defined in its class run as often as Lightning runs them."""

import functools

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from support import Classifier, federated_blobs, fit, fresh, on_path, quiet_trainer, train, weights

import fl_lightning as fl

STEPS = 2  # local steps of each of three clients


def count(calls):
    return lambda *args, **kwargs: calls.append(len(args))


def lambda_callback(hook, calls):
    return {"callbacks": [LambdaCallback(**{hook: count(calls)})]}


def patched_callback(hook, calls):
    callback = Callback()
    setattr(callback, hook, count(calls))
    return {"callbacks": [callback]}


@pytest.mark.parametrize(
    ("make", "hook"),
    [
        (lambda_callback, "on_before_backward"),
        (patched_callback, "on_after_backward"),
        (patched_callback, "on_before_optimizer_step"),
    ],
)
def test_step_hooks_on_callback_instances_run(make, hook):
    calls = []
    fit(rounds=1, local_steps=STEPS, **make(hook, calls))
    assert len(calls) == 3 * STEPS


def test_a_hook_on_a_callback_instance_does_not_run_in_a_worker():
    calls = []
    watched = lambda_callback("on_after_backward", calls)
    done = fit(rounds=1, local_steps=STEPS, executor=fl.executors.Parallel(2), **watched)
    assert len(calls) == 3 * STEPS
    assert "LambdaCallback.on_after_backward" in done.strategy.executor_fallback


@pytest.mark.parametrize(
    "hook", ["on_after_backward", "on_train_batch_end", "optimizer_zero_grad", "on_after_batch_transfer"]
)
def test_module_hooks_wrapped_on_the_instance_run(hook):
    module, calls = fresh(), []
    own = getattr(module, hook)

    @functools.wraps(own)
    def wrapper(*args, **kwargs):
        calls.append(hook)
        return own(*args, **kwargs)

    setattr(module, hook, wrapper)
    train(module, rounds=1, local_steps=STEPS)
    assert len(calls) == 3 * STEPS


def test_what_a_subclass_of_the_strategy_does_in_a_step_is_done():
    class Halves(fl.FederatedStrategy):
        def backward(self, closure_loss, *args, **kwargs):
            super().backward(closure_loss / 2, *args, **kwargs)

    def trained(kind, **options):
        module = fresh(**options)
        quiet_trainer(kind(clients_per_round=3, seed=5), 2).fit(module, federated_blobs())
        return weights(module)

    assert torch.equal(trained(Halves), trained(fl.FederatedStrategy, lr=0.05))


# ---- self.log


@pytest.mark.parametrize("lean", [True, False])
def test_a_log_method_of_the_modules_own_sees_every_call(lean):
    seen = []

    class LogsByItself(Classifier):
        def log(self, name, value, *args, **kwargs):
            seen.append(name)
            super().log(name, value, *args, **kwargs)

    train(fresh(LogsByItself, log=True), 2, local_steps=STEPS, **on_path(lean))
    assert seen == ["train_loss"] * (2 * 3 * STEPS)


@pytest.mark.parametrize(("lean", "executor"), [(True, None), (False, None), (True, fl.executors.Parallel(2))])
def test_a_log_function_on_the_instance_sees_every_call_and_stays(lean, executor):
    module, seen = fresh(log=True), []
    own = module.log

    def log(name, value, *args, **kwargs):
        seen.append(name)
        own(name, value, *args, **kwargs)

    module.log = log
    done = fit(module, rounds=2, local_steps=STEPS, limit_val_batches=0, executor=executor, **on_path(lean))
    assert seen == ["train_loss"] * (2 * 3 * STEPS)
    assert module.log is log
    assert "train_loss" in done.trainer.callback_metrics
