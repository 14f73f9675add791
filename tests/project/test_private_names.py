# SPDX-License-Identifier: Apache-2.0
"""Private names of torch and Lightning: those in use are there in this release, and few rooms know them."""

import ast
import random
from functools import cache
from importlib import import_module

import numpy as np
import torch
from house import room, syntax
from support import Classifier
from test_house import MODULES
from torchmetrics import SumMetric
from torchmetrics.wrappers import Running

from fl_lightning.lightning.loop_parts import CONTRACT
from fl_lightning.lightning.names import lightning_module

NO_NAMES = {
    "_fields", "_replace", "_asdict", "_exit", "_is_protocol", "_io", "_thread", "_logger", "_lives_on_device",
    "_batch_start", "_batch_end", "_epoch_end", "_epoch", "_dataloader", "_dataloaders", "_orig", "_hparams", "_queue",
    "_hooks_with_kwargs", "_hooks_always_called",
}  # fmt: skip
"""Of Python, of this package, and strings that begin or end alike."""


@cache
def of_torch():
    """Objects of torch, and their names in use."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()  # sets _opt_called
    return [
        (torch, "_C", "_foreach_add", "_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_sub"),
        (torch._C, "_set_grad_enabled"),
        (torch.nn.Module(), "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
        (torch.nn.Parameter(torch.zeros(1)), "_backward_hooks", "_post_accumulate_grad_hooks"),
        (torch.nn.modules.batchnorm, "_BatchNorm"),
        (import_module("torch.optim.optimizer"), "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
        (torch.amp.GradScaler("cpu"), "_per_optimizer_states"),
        (optimizer, "_opt_called", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    ]


@cache
def of_others():
    """Objects of Lightning, NumPy and Python, and their names in use that the contract with Lightning does not have."""
    results, call = lightning_module("trainer.connectors.logger_connector.result"), lightning_module("trainer.call")
    return [
        (np.random.mtrand, "_rand"),
        (random, "_inst"),
        (Classifier(), "_trainer", "_fabric", "_metric_attributes", "_hparams_initial", "_log_hyperparams"),
        (lightning_module("core.optimizer"), "_MockOptimizer", "_configure_optimizers"),
        (call, "_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"),
        (lightning_module("").Trainer, "_active_loop"),
        (lightning_module("loops.evaluation_loop")._EvaluationLoop, "_is_sequential"),
        (results, "_ResultCollection", "_ResultMetric", "_Sync"),
        (results._Sync(), "_should"),
        (Running(SumMetric()), "_num_vals_seen"),
        (results._Metadata("fx", "name"), "_sync"),
    ]


def names_of(owners):
    return {name for _, *names in owners for name in names}


def known():
    """All names whose owners are checked; torchmetrics has a contract of its own."""
    lightning = {part for path, names in CONTRACT.items() for part in (*path.split("."), *names)}
    return lightning | names_of(of_torch()) | names_of(of_others()) | set(dir(SumMetric()))


def private(name):
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name not in NO_NAMES | {"_"}


def defined_by(tree):
    """What a module defines, or keeps in its objects."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.alias(asname=str(name)):
                yield name


def asked_by(tree, torchs):
    """Attributes, imported names, and strings that may be names."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) if name in torchs:
                pass  # of this package: none of its classes is one of torch's
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name
            case ast.ImportFrom(module=str(home), names=aliases) if not home.startswith(("fl_lightning", "__")):
                yield from (alias.name for alias in aliases)


@cache
def used():
    """Private names of others, by module."""
    torchs = names_of(of_torch())
    own = {name for path in MODULES.values() for name in defined_by(syntax(path))} - torchs
    return {
        module: {name for name in asked_by(syntax(path), torchs) if private(name)} - own
        for module, path in MODULES.items()
    }


def test_private_names_in_use_are_there():
    assert [n for owner, *names in (*of_torch(), *of_others()) for n in names if not hasattr(owner, n)] == []


def test_every_private_name_in_use_is_checked():
    assert {module: names - known() for module, names in used().items() if names - known()} == {}


def test_the_inside_of_torch_is_known_to_two_rooms():
    assert {room(m) for m, names in used().items() if names & names_of(of_torch())} == {"lightning", "core"}


def test_none_is_read_with_a_default():
    for path in MODULES.values():
        for node in ast.walk(syntax(path)):
            match node:
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), _]):
                    assert not private(name), ast.unparse(node)
