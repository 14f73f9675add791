# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts of examples/projects: as they are, as they were without a federation, and with one client."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import fl_lightning as fl
from fl_lightning.core.seeding import derive_seed, seed_all
from fl_lightning.lightning.module import generators

PROJECTS = Path(__file__).parents[2] / "examples" / "projects"


def source(name: str) -> str:
    """The script."""
    return (PROJECTS / f"{name}.py").read_text(encoding="utf-8")


def plain(text: str) -> str:
    """The project as it was: without the lines marked ``# +``, and with those that stand behind ``# -``."""
    kept = [line for line in text.splitlines() if not line.endswith("# +")]
    return "\n".join(re.sub(r"^(\s*)# - ", r"\1", line) for line in kept) + "\n"


def changes(text: str) -> str:
    """The marked lines as a diff."""
    lines = []
    for line in text.splitlines():
        if line.endswith("# +"):
            lines.append("+" + line.removesuffix("# +").rstrip())
        elif (found := re.match(r"(\s*)# - (.*)", line)) is not None:
            lines.append("-" + found[1] + found[2])
    return "\n".join(lines)


def main_of(text: str, name: str) -> Callable[..., Any]:
    """``main`` of a script that is given as text."""
    scope = {"__name__": f"{name}_as_text"}
    exec(compile(text, f"{name}.py", "exec"), scope)
    return scope["main"]


@dataclass
class Fit:
    """What a fit did.

    Attributes:
        weights: the module's state at the end.
        logged: for every epoch and name, what loggers got, in order.
        rates: for every step of an optimizer, the learning rates of its groups.
        final: the learning rates after the fit.
        evaluation: what its strategy says of the last validation of the fit.
        trainer: its trainer.
    """

    trainer: Any = None
    evaluation: Any = None
    weights: dict[str, Any] = field(default_factory=dict)
    logged: dict[tuple[int, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    rates: list[list[float]] = field(default_factory=list)
    final: list[list[float]] = field(default_factory=list)


@contextmanager
def watched(tree: str, *callbacks: type, **changed: Any) -> Iterator[Fit]:
    """Notes what the trainers of the body do.

    Args:
        tree: the copy of Lightning.
        callbacks: classes of more callbacks, which come first.
        changed: options of the trainers.
    """
    lightning, loggers, fit = importlib.import_module(tree), importlib.import_module(f"{tree}.loggers"), Fit()

    class Rows(loggers.logger.Logger):
        name, version = "rows", 0

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            epoch = int(metrics.get("epoch", -1))
            for key, value in metrics.items():
                fit.logged[epoch, key].append(float(value))

    class Watching(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            fit.trainer, fit.final = trainer, [rates_of(optimizer) for optimizer in trainer.optimizers]
            fit.evaluation = getattr(trainer.strategy, "last_evaluation", None)
            fit.weights = {k: v.clone() for k, v in pl_module.state_dict().items() if isinstance(v, torch.Tensor)}

    def __init__(trainer: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        initialise(trainer, *args, **{**options, **changed})
        trainer.callbacks[:0] = [callback() for callback in (Watching, *callbacks)]
        trainer.loggers = [*trainer.loggers, Rows()]

    initialise = lightning.Trainer.__init__
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: fit.rates.append(rates_of(optimizer)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lightning.Trainer, "__init__", __init__)
        try:
            yield fit
        finally:
            hook.remove()


def rates_of(optimizer: Any) -> list[float]:
    """The learning rates of an optimizer's groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]


class Few(fl.data.Partition):
    """At most a hundred clients, with two samples or more each: BatchNorm cannot train on one.

    The first of them has all evaluation data.
    """

    def split(self, labels: torch.Tensor, seed: int) -> list[torch.Tensor]:
        return fl.data.IID(min(100, len(labels) // 2)).split(labels, seed)

    def divide(self, samples: Any, seed: int) -> list[torch.Tensor]:
        return fl.data.IID(min(100, len(samples) // 2)).divide(samples, seed)

    def match(self, train: Any, parts: Any, samples: Any, seed: int) -> list[torch.Tensor]:
        return [torch.arange(len(samples)), *[torch.arange(0)] * (len(parts) - 1)]


def plain_fit(name: str, tree: str, folder: Path, epochs: int, **trainer: Any) -> Fit:
    """The project without a federation, with the order of samples and the random numbers of the only client.

    ``trainer`` are options of its trainers.
    """

    class AsOneClient(importlib.import_module(tree).Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            nonlocal running
            running = trainer

    running: Any = None
    seeds = ExitStack()

    def seeded(sampler: RandomSampler | SequentialSampler) -> Iterator[int]:
        size = len(sampler.data_source)
        if running is None or not running.training:
            yield from usual[type(sampler)](sampler)
            return
        parts = 0, "client", running.current_epoch, 0
        seed_all(derive_seed(*parts), torch.device("cpu"))
        seeds.enter_context(generators.seeded(generators.generators_in(sampler.data_source), *parts))
        order = torch.Generator().manual_seed(derive_seed(0, "shuffle", running.current_epoch, 0, 0))
        yield from (torch.randperm(size, generator=order).tolist() if type(sampler) is RandomSampler else range(size))

    def with_seeds_for_workers(loader: DataLoader) -> Any:
        if running is not None and running.training:
            seed = derive_seed(derive_seed(0, "shuffle", running.current_epoch, 0, 0), "workers")
            loader.generator = torch.Generator().manual_seed(seed)
        return usual[DataLoader](loader)

    usual = {kind: kind.__iter__ for kind in (RandomSampler, SequentialSampler, DataLoader)}
    with seeds, pytest.MonkeyPatch.context() as patch, watched(tree, AsOneClient, **trainer) as fit:
        for kind in usual:
            patch.setattr(kind, "__iter__", with_seeds_for_workers if kind is DataLoader else seeded)
        main_of(plain(source(name)), name)(folder, epochs=epochs)
    return fit


def federated_fit(
    name: str,
    tree: str,
    folder: Path,
    epochs: int,
    resume: Path | None = None,
    partition: fl.data.Partition | None = None,
    **options: Any,
) -> Fit:
    """The project as it stands in the folder.

    Args:
        name: the project.
        tree: the copy of Lightning.
        folder: where it writes.
        epochs: rounds.
        resume: the checkpoint to go on from.
        partition: divides the data in the place of the script's partition; then FedAvg, with all clients per round and
            optimizers that stay with their clients, takes the place of the script's method.
        options: options of :class:`FederatedStrategy` that count more than the script's.
    """

    def strategy(algorithm: Any = None, **others: Any) -> fl.FederatedStrategy:
        if partition is not None:
            algorithm = fl.algorithms.FedAvg()
            others |= {"clients_per_round": 1.0, "client_optimizer_state": "keep"}
            others |= {"partition": partition} if "partition" in others else {}
        return made[0](algorithm, **{**others, **options})

    def data(samples: Any, divided: Any, **others: Any) -> fl.FederatedDataModule:
        return made[1](samples, divided if partition is None else partition, **others)

    made = fl.FederatedStrategy, fl.FederatedDataModule
    with pytest.MonkeyPatch.context() as patch, watched(tree) as fit:
        patch.setattr(fl, "FederatedStrategy", strategy)
        patch.setattr(fl, "FederatedDataModule", data)
        importlib.import_module(name).main(folder, epochs=epochs, resume=resume)
    return fit


def checkpoint(folder: Path, epoch: int) -> Path:
    """What a script saved after this round."""
    (found,) = folder.glob(f"*epoch={epoch}-*.ckpt")
    return found


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of values that are not the same bits."""
    return sorted(
        key
        for key in {*a, *b}
        if key not in a or key not in b or not torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key]))
    )
