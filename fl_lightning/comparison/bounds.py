# SPDX-License-Identifier: Apache-2.0
"""The two bounds of a comparison: each client alone, and all clients' data together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from fl_lightning.algorithms import FedAvg
from fl_lightning.core.records import EvaluationRecord
from fl_lightning.data.client_indices import ClientIndices
from fl_lightning.data.client_loaders import ClientLoaders
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.fit.strategy import FederatedStrategy
from fl_lightning.lightning.inspection import TRANSFER_HOOKS, is_overridden
from fl_lightning.lightning.names import LightningDataModule
from fl_lightning.report import ClientValues, FitRecord, RoundSeries
from fl_lightning.report.record_builder import RecordBuilder
from fl_lightning.report.runs_of_a_method import count_infinite


def bound_strategy(strategy: FederatedStrategy, clients: int) -> FederatedStrategy:
    """How one learner trains in as many rounds, and with as many passes over its data in each, as a client does.

    The learner is the only client of its fit and keeps its optimizer from round to round, so that the rounds are plain
    training. A number of local steps counts for each client whose data it has.
    """
    steps = strategy.arguments.get("local_steps")
    return strategy.with_arguments(
        algorithm=FedAvg(), client=None, clients_per_round=1.0, local_steps=None if steps is None else steps * clients,
        full_gradients=False, server_optimizer=None, sampler=None, client_optimizer_state="keep", guard=None,
        attack=None, executor=None, min_clients=1,
    )  # fmt: skip


class OneLearner(LightningDataModule):
    """Federated data with the training data of some clients in the hands of one, set up once for several fits."""

    def __init__(self, data: LightningDataModule) -> None:
        super().__init__()
        assert isinstance(data, FederatedDataModule)
        self.federated = data
        self._set_up: set[str] = set()
        self._learning: Sequence[int] = ()
        self._evaluated: Sequence[int] | None = None
        data.prepare_data()
        self.setup("fit")
        self.names, self.sizes = data.client_names, tuple(data.client_sizes.tolist())
        self.clients = [client for client, size in enumerate(self.sizes) if size]
        for hook in TRANSFER_HOOKS:
            if is_overridden(hook, data):
                setattr(self, hook, getattr(data, hook))
        for stage in ("val_dataloader", "test_dataloader"):
            if is_overridden(stage, data):
                setattr(self, stage, partial(self._of_evaluated, stage))

    def choose(self, learning: Sequence[int], evaluated: Sequence[int] | None) -> None:
        """Says whose training data the next fit's learner has, and who is evaluated; ``None``: everybody."""
        self._learning, self._evaluated = learning, evaluated

    def renamed(self, record: FitRecord) -> FitRecord:
        """A record of a fit on all clients' data, with the clients in the place of the learner."""
        names = (*self.names, *record.client_names[len(self.names) :])  # those that are only evaluated come last
        sizes = (*self.sizes, *(0 for _ in names[len(self.names) :]))
        return replace(record, client_names=names, client_sizes=sizes)

    def __getattr__(self, name: str) -> Any:
        # Modules read `self.trainer.datamodule.num_classes` and the like.
        if name.startswith("_") or "federated" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.federated, name)

    def __repr__(self) -> str:
        return f"{self.federated!r} The data of {len(self._learning)} clients are those of one learner."

    __str__ = __repr__

    def setup(self, stage: str) -> None:
        """Sets the federated data up, the first time."""
        if stage not in self._set_up:
            self._set_up.add(stage)
            self.federated.setup(stage)

    def train_dataloader(self) -> ClientLoaders:
        """The chosen clients' training data, as those of one client."""
        loaders = self.federated.train_dataloader()
        together = torch.cat([loaders.indices(client) for client in self._learning]).sort().values
        parts = ClientIndices([together], len(loaders.dataset))  # type: ignore[arg-type]
        return ClientLoaders(loaders.dataset, parts, "train", loaders.settings)

    def _of_evaluated(self, hook: str) -> ClientLoaders | list[Any]:
        loaders: ClientLoaders | list[Any] = getattr(self.federated, hook)()
        if self._evaluated is None:
            return loaders
        found = []
        for one in loaders if isinstance(loaders, list) else [loaders]:
            vectors = [one.indices(client) for client in self._evaluated]
            names = tuple(one.names[client] for client in self._evaluated)
            parts = ClientIndices(vectors, len(one.dataset), names)  # type: ignore[arg-type]
            found.append(ClientLoaders(one.dataset, parts, one.stage, one.settings))
        if not any(one.sizes.any() for one in found):
            return []
        return found if isinstance(loaders, list) else found[0]


def merged(fits: Mapping[int, FitRecord], names: tuple[str, ...], sizes: tuple[int, ...]) -> FitRecord:
    """One record of fits in which a client each was alone. A client that stopped early keeps its last values.

    Its rounds have the seconds of all clients, one after the other.
    """
    base = replace(
        max(fits.values(), key=lambda fit: len(fit.rounds)), client_names=names, client_sizes=sizes, metrics=(),
        evaluations=(), absences=(), rounds=_one_after_the_other(fits.values()),
    )  # fmt: skip
    builder = RecordBuilder(base)
    for stage in ("val", "test"):
        found = {client: [v for v in fit.evaluations if v.stage == stage] for client, fit in fits.items()}
        for number in sorted({values.round for several in found.values() for values in several}):
            now = {client: [v for v in several if v.round <= number] for client, several in found.items()}
            last = {client: several[-1] for client, several in now.items() if several}
            modes = {name: mode for values in last.values() for name, mode in values.modes.items()}
            values = {name: [_value(fits[client], v, name) for client, v in last.items()] for name in modes}
            builder.add_evaluation(EvaluationRecord(
                round=number, stage=stage, client_ids=tuple(last),
                sizes=torch.tensor([values.sizes[0] for values in last.values()]), modes=modes,
                values={name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()},
                client_names=tuple(names[client] for client in last),
            ))  # fmt: skip
    return builder.record()


def _one_after_the_other(fits: Iterable[FitRecord]) -> RoundSeries:
    """The rounds of the longest fit, with the seconds of all."""
    rounds = [fit.rounds for fit in fits]
    longest = max(rounds, key=len)
    seconds: dict[str, Any] = {
        name: tuple(map(sum, zip_longest(*(getattr(series, name) for series in rounds), fillvalue=0.0)))
        for name in ("training_seconds", "server_seconds", "evaluation_seconds")
    }
    return replace(longest, train_loss=(None,) * len(longest), conflicts=(0,) * len(longest), **seconds)


def _value(fit: FitRecord, values: ClientValues, metric: str) -> float:
    """A client's value; one that is infinite has no number in a record, as one that is missing has none."""
    value = values.values.get(metric, (None,))[0]
    if value is not None:
        return value
    infinite = count_infinite(fit, values, metric) > 0
    return float("nan" if not infinite else "-inf" if values.modes[metric] == "max" else "inf")
