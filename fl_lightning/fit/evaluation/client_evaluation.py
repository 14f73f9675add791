# SPDX-License-Identifier: Apache-2.0
"""Where the module is in each client's evaluation, what each logs, and what all have added in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isnan
from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from fl_lightning.core.errors import ModuleError
from fl_lightning.core.modules import shadowed, submodules
from fl_lightning.core.processes import balanced_split
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.fit.evaluation.one_client import Alone, PersonalEvaluation
from fl_lightning.fit.loaders import EvaluationLoader, counts_of
from fl_lightning.lightning.batches import ClientBatch, Numbers, num_loaders, untagged_batches
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.logged_values import ClientLogs, ClientValues, LoggedRow, active_results
from fl_lightning.lightning.metric_state import MetricDelta, last_value, updates_of
from fl_lightning.lightning.module.changes import read, written
from fl_lightning.lightning.module.objects import Object
from fl_lightning.lightning.module.snapshot import ModuleSnapshot
from fl_lightning.lightning.names import LightningModule, Trainer
from fl_lightning.lightning.ranks import Ranks
from fl_lightning.lightning.undefined_metrics import LogNotes

_NOBODY = -1  # whose batches of undivided data are


@dataclass
class ClientPart:
    """What one client's evaluation finds, and what its batches leave."""

    size: int = 0  # its samples
    row: LoggedRow = field(default_factory=LoggedRow)
    own: LoggedRow | None = None  # values of its own model, where the method has them
    logged: ClientLogs = field(default_factory=dict)  # by its batches of the present loader
    metrics: list[MetricDelta | None] = field(default_factory=list)  # None for those that it leaves alone
    changes: Mapping[str, Any] | Sequence[tuple[Object, str, list[Any]]] = ()  # of all else, plain if possible
    changed: tuple[str, ...] = ()  # attributes that nothing can join


class ClientParts:
    """Lets every client's evaluation begin with the module as it is now and with empty metrics.

    ``travels``: what clients leave goes to other processes, which have copies of the module.
    """

    def __init__(self, module: LightningModule, travels: bool) -> None:
        self._module, self._travels = module, travels
        self._found = self._begun = ModuleSnapshot(module, whole=True)
        self._found.empty_metrics()
        if len(self._found.states) < len(self._found.metrics) and self._found.changed():  # those that nothing joins
            self._begun = ModuleSnapshot(module, whole=True)
        self._joined = [state.metric for state in self._found.states]
        self._collections = [part for _, part in submodules(module) if isinstance(part, MetricCollection)]
        inside = {id(part): (part, bool(at)) for one in self._found.metrics.values() for at, part in submodules(one)}
        self.metrics = [(part, is_inside) for part, is_inside in inside.values() if isinstance(part, Metric)]
        self._is_as_begun = True

    def enter(self, part: ClientPart) -> None:
        """The module is as a client has left it; new ones begin."""
        if not self._is_as_begun:
            self._begun.restore()
        for metric, delta in zip(self._joined, part.metrics or [None] * len(self._joined), strict=True):
            metric.reset() if delta is None else delta.put_in(metric)
        for tracked, form, values in self._changes_of(part):
            tracked.apply(form, values)
        self._is_as_begun = False

    def leave(self, part: ClientPart) -> None:
        """Some batches of a client are over."""
        for collection in self._collections:  # metrics in it may have one state for several
            collection.values(copy_state=False)
        part.metrics = [MetricDelta.of(m) if updates_of(m) or last_value(m) is not None else None for m in self._joined]
        part.changes, part.changed, changed = (), (), self._begun.changed()
        self._is_as_begun = not changed
        if not changed:
            return
        changes = [(tracked, *edit) for tracked in changed for edit in tracked.edits()]
        otherwise = [tracked for tracked, form, _ in changes if not _only_grew(tracked, form)]
        part.changed = tuple(dict.fromkeys(name for tracked in otherwise for name in tracked.changed_names()))
        found = written(self._begun, changed, {})
        if found.lost and self._travels:
            raise ModuleError(
                f"what {type(self._module).__name__} leaves in attributes must be plain values where several processes "
                f"evaluate clients, found {'; '.join(f'{name} ({why})' for name, why in found.lost.items())}"
            )
        part.changes = changes if found.lost else found.plain

    def _changes_of(self, part: ClientPart) -> Iterable[tuple[Object, str, list[Any]]]:
        if isinstance(part.changes, Mapping):
            return read(part.changes, self._begun, self._module.device).changes
        return part.changes

    def join(self, parts: Sequence[ClientPart], chosen: Iterable[ClientPart]) -> None:
        """The module is as it was found, with what clients have added to metrics and lists, in their order.

        Whatever else they have changed is as those who are chosen have left it.
        """
        self._found.put()
        for part in parts:
            for metric, delta in zip(self._joined, part.metrics, strict=True):
                if delta is not None:
                    delta.add_to(metric)
        changes = [(part, *change) for part in parts for change in self._changes_of(part)]
        otherwise = {id(tracked) for _, tracked, form, _ in changes if not _only_grew(tracked, form)}
        for part, tracked, form, values in changes:
            if id(tracked) not in otherwise or any(part is one for one in chosen):
                tracked.apply(form, values)


def _only_grew(tracked: Object, form: str) -> bool:
    """Whether steps have added to the end of a list; one that keeps some items alone is no such list."""
    return form == "added" and getattr(tracked.value, "maxlen", None) is None


class ClientEvaluation:
    """Collects per-client values while an evaluation runs.

    Lightning walks over all clients' batches, ``loaders`` one after the other; ``None`` stands for data that is not
    divided among clients. Every client's batches find the module as it was before the first batch, with empty metrics
    and with nothing logged, or as the client's batches of the loader before have left it. The module's epoch-end hook
    then runs for each client alone, and last, as Lightning calls it, for all. ``say`` tells users something once.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Sequence[EvaluationLoader | None],
        stage: str,
        say: Callable[[str], None],
        personal: PersonalEvaluation | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self._trainer, self.stage, self._say, self._personal, self._seed = trainer, stage, say, personal, seed
        self._in_turn = num_loaders(trainer) == len(loaders)  # not side by side
        self._loaders, self.divided = loaders, [one for one in loaders if one is not None]
        self._module: LightningModule = trainer.lightning_module
        self._word = {"val": "validation", "test": "test"}[stage]
        self._notes = LogNotes(self._module)
        self._values = ClientValues(active_results(trainer))
        self.hook = f"on_{self._word}_epoch_end"
        self._has_hook = is_overridden(self.hook, self._module)
        # Of several loaders, some might have nothing for a process.
        alone = self._in_turn and len(loaders) == 1 and not trainer.sanity_checking
        self._ranks = ranks if ranks and alone and self.divided[0].num_evaluated >= ranks.size else None
        if self._ranks is not None:
            self.divided[0].own_clients = balanced_split(self.divided[0].counts, self._ranks.size)[self._ranks.rank]
        self._states: ClientParts | None = None
        self._parts: dict[int, ClientPart] = {}
        self._means: dict[str, float] = {}
        self._present: int | None = None  # whose batches are running
        self._counts: Sequence[int] = ()  # of the client's batches
        self._walked = 0  # loaders
        self._steps = ExitStack()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the whole evaluation."""
        end = partial(self._end_for_all, getattr(self._module, self.hook))
        with (
            self._notes.metric_warnings.installed(), self._steps, shadowed(self._module, **{self.hook: end}),
            untagged_batches(self._trainer, self._word, self._begin, self._batch, self._loader_over),
        ):  # fmt: skip
            yield

    def _begin(self) -> None:
        """The first batch is next, which may be of data that is not divided."""
        if not self._trainer.sanity_checking:
            self._states = ClientParts(self._module, travels=self._ranks is not None)
            self._notes.metrics = self._states.metrics

    @contextmanager
    def _batch(self, batches: Sequence[ClientBatch]) -> Iterator[Numbers]:
        """Around everything that Lightning does with a batch, or with several side by side; its hooks included."""
        if self._states is None:
            yield None
            return
        own = next((one for one in batches if any(one.source is divided for divided in self.divided)), None)
        client = _NOBODY if own is None else own.client_id
        if client != self._present:
            self._leave(self._states)
            self._enter(self._states, client)
        if own is not None:
            self._parts[client].size += own.num_samples
        self._notes.next_batch()
        yield (own.index, self._counts) if own is not None and self._in_turn else None

    def _loader_over(self) -> None:
        """All batches of a loader are over, and Lightning reads what they have logged."""
        if self._states is None:
            return
        self._leave(self._states)
        if len(self._loaders) == 1:
            self._end_for_each(self._states)
        self._join(self._states)
        self._walked += 1

    def _enter(self, states: ClientParts, client: int) -> None:
        part, self._present = self._parts.setdefault(client, ClientPart()), client
        states.enter(part)
        self._counts = counts_of(self._loaders, client)
        self._values.join([part.logged], {})
        seed = derive_seed(self._seed, client, *([self._walked] if self._walked else []))
        self._steps.enter_context(isolated(seed, self._trainer.strategy.root_device))
        self._steps.enter_context(self._notes.listening(judges=False, quietly=False))

    def _leave(self, states: ClientParts) -> None:
        self._steps.close()
        if self._present is None:
            return
        part = self._parts[self._present]
        part.logged, self._present = self._values.take(self._notes, part.row), None
        states.leave(part)

    @cached_property
    def _alone(self) -> Alone:
        return Alone(self._trainer, self._word, self._notes, self._loaders)

    def _end_for_each(self, states: ClientParts) -> None:
        """Runs what follows each client's batches."""
        for client in [client for client in self._parts if client != _NOBODY]:
            part = self._parts[client]
            if self._has_hook:
                states.enter(part)
                part.row = self._alone.end(client, part.row)
            # A client that is not in training has no model of its own, whoever's number it has elsewhere.
            known = self._personal is not None and client < self.divided[-1].loaders.num_trained
            own = self._personal.standing_in(client) if self._personal is not None and known else None
            if own is not None:
                states.enter(ClientPart())
                seed = derive_seed(torch.initial_seed(), "personal", client)
                with isolated(seed, self._trainer.strategy.root_device), own:
                    part.own = self._alone.end(client, self._alone.steps(client))
        if self._ranks is not None:
            self._parts = {client: part for some in self._ranks.gather(self._parts) for client, part in some.items()}

    def _join(self, states: ClientParts) -> None:
        """Lets the module and Lightning's results hold what all clients have added."""
        self._parts = dict(sorted(self._parts.items()))
        parts = list(self._parts.values())
        clients = [part for client, part in self._parts.items() if client != _NOBODY]
        largest = max(clients, key=lambda part: part.size, default=None)
        states.join(parts, [part for part in parts if part is largest or part is self._parts.get(_NOBODY)])
        changed = sorted({name for part in clients for name in part.changed})
        self._means = _means(clients) if changed and len(clients) > 1 else {}
        means_logged = self._values.join([part.logged for part in parts], self._means)
        for part in parts:
            part.logged = {}
        if self._means and (means_logged or self._has_hook):
            where = ", ".join(means_logged) or f"what {self.hook} logs"
            self._say(
                f"{type(self._module).__name__}.{self._word}_step changes {', '.join(changed)}, which nothing can add "
                f"up over clients: {where} is the mean of the clients' values, weighted by their samples"
            )

    def _end_for_all(self, hook: Any) -> None:
        """The module's epoch-end hook, which logs means of the clients' values where it cannot know better."""
        own = self._module.log

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            own(name, self._means.get(name, value), *args, **kwargs)

        with shadowed(self._module, log=log) if self._means else ExitStack():
            hook()

    def parts(self) -> dict[int, ClientPart]:
        """What each client's batches have left, with the values that they and the hook have logged."""
        if self._states is not None and len(self._loaders) > 1:
            self._end_for_each(self._states)
            self._join(self._states)
        return {client: part for client, part in self._parts.items() if client != _NOBODY}


def _means(clients: Sequence[ClientPart]) -> dict[str, float]:
    """Of the clients' values, weighted by their samples; those who have none do not count."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in clients for name in part.row.values):
        known = [(part.row.values[name], part.size) for part in clients if name in part.row.values]
        known = [(value, size) for value, size in known if not isnan(value)]
        if total := sum(size for _, size in known):
            found[name] = sum(value * size for value, size in known) / total
    return found
