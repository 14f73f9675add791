# SPDX-License-Identifier: Apache-2.0
"""``fl.compare``: methods, learning rates and seeds on one project."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from fl_lightning.algorithms import ServerRule
from fl_lightning.arguments import ANY, Bounds, checked, shown
from fl_lightning.comparison.comparison import Comparison
from fl_lightning.comparison.plan import MOST
from fl_lightning.comparison.project import ObjectProject, rate_name
from fl_lightning.comparison.session import Session
from fl_lightning.core.records import NAME
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.report.conclusion import LOCAL, POOLED


@checked(
    model=ANY, data=ANY, strategies=ANY, trainer=ANY, learning_rates=Bounds(above=0, filled=True), seeds=Bounds(0),
    tuning_seeds=Bounds(1), divisions=Bounds(1, MOST), jobs=Bounds(1, MOST), save_seconds=Bounds(0),
)  # fmt: skip
def compare(
    model: Callable[..., LightningModule],
    data: FederatedDataModule | Callable[[], FederatedDataModule],
    strategies: Mapping[str, FederatedStrategy | ServerRule],
    *,
    trainer: Callable[..., Trainer],
    folder: str | Path,
    learning_rates: Sequence[float] | None = None,
    seeds: int | Sequence[int] = 3,
    metric: str | None = None,
    select: Literal["mean", "worst_10"] = "mean",
    bounds: Literal["both", "local", "pooled", "none"] = "both",
    jobs: int = 1,
    save_seconds: float = 60.0,
    tuning_seeds: int | None = None,
    divisions: int = 1,
) -> Comparison:
    """Trains every method with every learning rate and seed, and compares how the clients fare.

    Each run is a fit of its own. A finished run is a file in ``folder``, and an interrupted one has a checkpoint there:
    the same call goes on where an earlier one was stopped or killed. Each finished run prints a line to standard error.

    Two bounds train beside the methods. For ``"local only"``, each client trains a model of its own on its own data.
    For ``"pooled"``, one model trains on the data of all clients together. Both have as many rounds, and as many passes
    over the data in each round, as a client that takes part in every round of the first method.

    Args:
        model: makes the LightningModule: a class, or a function. Where there are ``learning_rates``, it gets one as its
            argument ``lr`` or ``learning_rate``.
        data: the federated data, or a function that makes them.
        strategies: the methods by name, as strategies or as bare server rules (then all clients take part in every
            round). The first is the reference that others are compared with. Their seeds are replaced.
        trainer: makes the Trainer, such as ``functools.partial(Trainer, max_epochs=50, accelerator="cpu")``. It is
            called with ``strategy`` and ``default_root_dir``. Progress bars and ModelCheckpoints are taken out.
        folder: where runs, tables and the report are kept.
        learning_rates: to pick from, separately for each method; by default the model is made without one.
        seeds: how many seeds, counted from 0, or which; at most 1,000. A seed decides the first weights and everything
            random in a fit, but not how the data are divided: see ``divisions``.
        metric: the validation metric to compare, by default the first where large values are good, or else the first.
            On test data, the one whose name has ``test`` for ``val`` is reported, or else the one of the same name.
        select: a method's learning rate is the one with the best mean over the seeds of this number, on validation data
            at the end of the fit: ``"mean"``, the mean over the clients, or ``"worst_10"``, that of their worst tenth.
        bounds: which bounds to train besides: ``"local"`` only, ``"pooled"`` only, ``"both"`` or ``"none"``.
        jobs: how many runs at a time, each in a process with one thread, on several CUDA devices in turn. With one,
            runs stay in this process.
        save_seconds: least time between two checkpoints of a run. So much work is lost if it is killed.
        tuning_seeds: pick learning rates with the first so many seeds, on the data's own division. Everything else runs
            with the picked learning rate alone. ``None``: all runs are made with every learning rate.
        divisions: how often the data are divided anew, by the seed of the data and the numbers that follow it. Every
            division runs with every seed. Deviations and marks then tell what another division would change, too.

    Returns:
        What was found; ``print`` shows the table.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, there is no data or metric to compare on, or ``folder`` holds runs of
            another configuration.
        RuntimeError: all runs failed, or ``folder`` is in use.

    Example::

        found = fl.compare(
            model=MyLitModule,
            data=fl.FederatedDataModule(MyDataModule(), fl.data.Dirichlet(num_clients=10, alpha=0.3)),
            strategies={"FedAvg": fl.algorithms.FedAvg(), "FedLF": fl.algorithms.FedLF()},
            trainer=functools.partial(L.Trainer, max_epochs=50),
            learning_rates=(0.01, 0.1),
            folder="comparison",
        )
        print(found)
    """
    if not _makes(model, LightningModule) or isinstance(model, LightningModule):
        raise TypeError(
            "model must be a function that makes a LightningModule, such as its class, or one that wraps a network in "
            f"fl.ClientModule, found {shown(model)}: "
            "every run starts with a module of its own"
        )
    if not _makes(trainer, Trainer):
        raise TypeError(
            "trainer must be a function that makes a Trainer, such as functools.partial(Trainer, max_epochs=50), found "
            f"{shown(trainer)}: every run has a trainer of its own"
        )
    if learning_rates is not None:
        rate_name(model)
    methods = as_strategies(strategies)
    if not isinstance(data, FederatedDataModule) and not _makes(data, FederatedDataModule):
        raise TypeError(f"data must be a FederatedDataModule, or a function that makes one, found {shown(data)}")
    session = Session(
        ObjectProject(model, data, trainer), methods, next(iter(methods.values())),
        folder=Path(folder), learning_rates=(None,) if learning_rates is None else learning_rates, seeds=seeds,
        bounds=bounds, metric=metric, select=select, jobs=jobs, save_seconds=save_seconds,
        tuning_seeds=tuning_seeds, divisions=divisions,
    )  # fmt: skip
    return session.carry_out()


def _makes(function: object, kind: type) -> bool:
    """Whether this can be called, and is not a class of other objects."""
    return callable(function) and not (isinstance(function, type) and not issubclass(function, kind))


def as_strategies(methods: Mapping[str, FederatedStrategy | ServerRule]) -> dict[str, FederatedStrategy]:
    """Methods as strategies."""
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(f"strategies must be a mapping with one method or more, found {shown(methods)}")
    made: dict[str, FederatedStrategy] = {}
    for name, method in methods.items():
        if not isinstance(name, str) or not NAME.admits(name) or name in (LOCAL, POOLED):
            words = f"strategies must have names other than {LOCAL!r} and {POOLED!r}, of {NAME.wanted}"
            raise ValueError(f"{words}, found {shown(name)}")
        if not isinstance(method, (FederatedStrategy, ServerRule)):
            raise TypeError(
                f"strategies[{name!r}] must be a FederatedStrategy, or a server rule such as fl.algorithms.FedLF(), "
                f"found {shown(method)}"
            )
        made[name] = FederatedStrategy(method) if isinstance(method, ServerRule) else method
    return made
