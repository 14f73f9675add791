# SPDX-License-Identifier: Apache-2.0
"""Collects every client's metric values while one evaluation runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from math import isnan, nan
from typing import Any

import torch

from fl_lightning.arguments import trusted
from fl_lightning.core.processes import balanced_split
from fl_lightning.core.records import EvaluationRecord, named
from fl_lightning.core.seeding import derive_seed, isolated
from fl_lightning.fit.evaluation.client_parts import ClientPart, ClientParts
from fl_lightning.fit.evaluation.one_client import Alone
from fl_lightning.fit.evaluation.personal import PREFIX, PersonalEvaluation
from fl_lightning.fit.loaders import EvaluationLoader, counts_of
from fl_lightning.lightning.batches import ClientBatch, Numbers, num_loaders, untagged_batches
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.logged_values import ClientValues, active_results
from fl_lightning.lightning.module.snapshot import shadowed
from fl_lightning.lightning.module.undefined_metrics import LogNotes
from fl_lightning.lightning.names import LightningModule, Trainer, rank_zero_info, rank_zero_warn
from fl_lightning.lightning.ranks import Ranks
from fl_lightning.metrics.functional import Mode

_NAMED = 10  # clients in a warning
_NOBODY = -1  # whose batches of undivided data are


class Notices:
    """Notices of all evaluations of a strategy, each once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def say(self, text: str, how: Callable[[str], None] = rank_zero_warn) -> None:
        """Shows it once."""
        if text not in self._shown:
            self._shown.add(text)
            how(text)


class ClientEvaluation:
    """Collects per-client values while an evaluation runs.

    Lightning walks over all clients' batches, ``loaders`` one after the other; ``None`` stands for data that is not
    divided among clients. Every client's batches find the module as it was before the first batch, with empty metrics
    and with nothing logged, or as the client's batches of the loader before have left it. The module's epoch-end hook
    then runs for each client alone, and last, as Lightning calls it, for all. Clients of ``trained`` have a row in any
    case.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaders: Sequence[EvaluationLoader | None],
        stage: str,
        round: int,  # noqa: A002
        notices: Notices,
        personal: PersonalEvaluation | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
        trained: Sequence[int] = (),
    ) -> None:
        self._trainer, self._stage, self._round = trainer, stage, round
        self._in_turn = num_loaders(trainer) == len(loaders)  # not side by side
        self._loaders, self._divided = loaders, [one for one in loaders if one is not None]
        self._notices, self._personal, self._seed, self._trained = notices, personal, seed, trained
        self._module: LightningModule = trainer.lightning_module
        self._word = {"val": "validation", "test": "test"}[stage]
        self._notes = LogNotes(self._module)
        self._values = ClientValues(active_results(trainer))
        self._hook = f"on_{self._word}_epoch_end"
        self._has_hook = is_overridden(self._hook, self._module)
        self._ranks = ranks if self._is_divisible(ranks) else None
        if self._ranks is not None:
            self._divided[0].own_clients = balanced_split(self._divided[0].counts, self._ranks.size)[self._ranks.rank]
        self._states: ClientParts | None = None
        self._parts: dict[int, ClientPart] = {}
        self._means: dict[str, float] = {}
        self._present: int | None = None  # whose batches are running
        self._counts: Sequence[int] = ()  # of the client's batches
        self._walked = 0  # loaders
        self._steps = ExitStack()

    def _is_divisible(self, ranks: Ranks | None) -> bool:
        """Whether each process evaluates some of the clients; of several loaders, some might have nothing for it."""
        alone = self._in_turn and len(self._loaders) == 1 and not self._trainer.sanity_checking
        return ranks is not None and alone and self._divided[0].num_evaluated >= ranks.size

    # ---- around batches

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around the whole evaluation."""
        end = partial(self._end_for_all, getattr(self._module, self._hook))
        with (
            self._notes.metric_warnings.installed(), self._steps, shadowed(self._module, **{self._hook: end}),
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
        own = next((one for one in batches if any(one.source is divided for divided in self._divided)), None)
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

    # ---- once all batches are over

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
            known = self._personal is not None and client < self._divided[-1].loaders.num_trained
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
            where = ", ".join(means_logged) or f"what {self._hook} logs"
            self._notices.say(
                f"{type(self._module).__name__}.{self._word}_step changes {', '.join(changed)}, which nothing can add "
                f"up over clients: {where} is the mean of the clients' values, weighted by their samples",
                rank_zero_info,
            )

    def _end_for_all(self, hook: Any) -> None:
        """The module's epoch-end hook, which logs means of the clients' values where it cannot know better."""
        log = partial(self._log_mean, self._module.log)
        with shadowed(self._module, log=log) if self._means else ExitStack():
            hook()

    def _log_mean(self, log: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        log(name, self._means.get(name, value), *args, **kwargs)

    def record(self) -> EvaluationRecord:
        """What was collected; a metric that a client did not log is NaN for it."""
        if self._states is not None and len(self._loaders) > 1:
            self._end_for_each(self._states)
            self._join(self._states)
        parts = {client: part for client, part in self._parts.items() if client != _NOBODY}
        self._explain_failures(parts)
        called = max((one.loaders.names for one in self._divided), key=len)
        parts = self._with_those_without_data(parts, called)
        rows = {client: part.row for client, part in parts.items()}
        for client, part in parts.items():
            if part.own is not None:
                rows[client].update(part.own, PREFIX)
        names = list(dict.fromkeys(name for row in rows.values() for name in row.values))
        values = {n: torch.tensor([r.values.get(n, nan) for r in rows.values()], dtype=torch.float64) for n in names}
        undefined = {n: {c: r.undefined[n] for c, r in rows.items() if n in r.undefined} for n in names}
        one_class = {n: some for n in names if (some := tuple(c for c, r in rows.items() if n in r.one_class))}
        modes: dict[str, Mode] = {
            name: "max" if better else "min" for row in rows.values() for name, better in row.larger_is_better.items()
        }
        return trusted(EvaluationRecord)(
            self._round, self._stage, tuple(rows),
            torch.tensor([part.size for part in parts.values()], dtype=torch.int64), values,
            undefined={name: found for name, found in undefined.items() if found}, modes=modes,
            client_names=tuple(called[c] for c in rows), one_class=one_class,
        )  # fmt: skip

    def _with_those_without_data(self, parts: dict[int, ClientPart], called: Sequence[str]) -> dict[int, ClientPart]:
        """Empty rows, too, of clients that train and have no batch here, if others have one."""
        registered = self._divided[-1].loaders.num_trained
        missing = [client for client in self._trained if client < registered and client not in parts]
        if not (missing and parts):
            return parts
        some = ", ".join(named(client, called[client]) for client in missing[:_NAMED])
        rest = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        self._notices.say(
            f"clients that train and have nothing to be evaluated on in {self._word}: {some}{rest}. Their rows in "
            "tables are empty, and they count in no mean, worst or angle"
        )
        return dict(sorted({**parts, **{client: ClientPart() for client in missing}}.items()))

    def _explain_failures(self, parts: dict[int, ClientPart]) -> None:
        """Where the hook fails for some clients, what the others log is undefined for them."""
        failed = [part.row for part in parts.values() if part.row.error is not None]
        if failed and len(failed) == len(parts):
            self._notices.say(
                f"{type(self._module).__name__}.{self._hook} does not run for a client alone "
                f"({failed[0].error}): no client has values of what it logs after that"
            )
            return
        names = {name: None for part in parts.values() for name in part.row.values}
        for row in failed:
            for name in names:
                if name not in row.values:
                    row.add(name, nan, row.error)


def _means(clients: Sequence[ClientPart]) -> dict[str, float]:
    """Of the clients' values, weighted by their samples; those who have none do not count."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for part in clients for name in part.row.values):
        known = [(part.row.values.get(name, nan), part.size) for part in clients]
        known = [(value, size) for value, size in known if not isnan(value)]
        if total := sum(size for _, size in known):
            found[name] = sum(value * size for value, size in known) / total
    return found
