# SPDX-License-Identifier: Apache-2.0
"""The schedulers of a fit: every visit starts where the round began and leaves them as they were.

What visits set by hand in the options that schedulers set is told from that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.clients.client_optimizers import ClientOptimizers
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.module.values import is_equal
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.round_clock import MeanVisit, RoundClock

HandSet = Sequence[Sequence[Mapping[str, Any]]]
"""For each optimizer and parameter group the options that a visit has set beside its schedulers, by name."""


@dataclass(frozen=True)
class StepCounts:
    """What a visit counted."""

    steps: int = 0  # of all optimizers
    batches: int = 0  # local ones
    by_hand: tuple[int, ...] = ()  # per scheduler: how often the module stepped it
    odd: tuple[str, ...] = ()  # names of schedulers that the module stepped with an argument


class Schedules:
    """Puts schedulers on the clock of :class:`RoundClock`.

    Between visits they are where the round began. Closing a round moves them by what a round lasts, whoever took part.
    Schedulers that the module steps by hand move as in the round's visit with most batches: once if they did so there,
    else in proportion to the batches of a mean visit.
    """

    def __init__(self, trainer: Trainer, clock: RoundClock, optimizers: ClientOptimizers) -> None:
        self._trainer, self._clock, self._options = trainer, clock, HandSetOptions(optimizers)
        self._manual = not trainer.lightning_module.automatic_optimization
        clock.ends_epochs = is_overridden("on_train_batch_end", trainer.lightning_module)
        self._by_hand: list[int] = []
        self._odd: list[str] = []
        self._measured: StepCounts | None = None
        self._moves: list[int] = []  # by hand in the last round, per scheduler
        self._arrived: dict[int, StepCounts] = {}
        self.local_steps = 0  # of the fit so far, of all clients whose rounds counted

    @property
    def steps(self) -> int:
        """``K``, ticks of a round: the steps of its mean visit."""
        assert self._clock.mean_visit is not None
        return self._clock.mean_visit.steps

    # ---- a round

    def begin_round(self) -> None:
        """Puts the clock where visits begin."""
        configs = self._trainer.lr_scheduler_configs
        self._clock.scheduled = not self._manual and any(config.interval == "step" for config in configs)
        limit = self._of_a_round()
        self._clock.begin_round(self.steps if limit is None else limit, limit)
        self._arrived = {}

    def arrived(self, client_id: int, counted: StepCounts) -> None:
        """Hears how a client's visit went; refuses steps by hand that the end of a round cannot repeat."""
        self._arrived[client_id] = counted
        if counted.odd:
            raise ValueError(
                f"lr scheduler {counted.odd[0]} must be stepped by hand without an argument, found one: a round steps "
                "it again to get to where its visits would have ended"
            )

    def close_round(self, client_ids: Iterable[int], hand_set: HandSet = ()) -> int:
        """Moves schedulers, options and clock to the end of a round that counts for these clients.

        Others leave no trace. ``hand_set`` are the options that the visit has set whose attributes the module takes
        over. Returns :attr:`local_steps`, with theirs.
        """
        counts, configs = [self._arrived[client] for client in client_ids], self._trainer.lr_scheduler_configs
        if self._measured is None and counts and counts[0].batches:
            self._measured = counts[0]
        if counts:
            longest = max(counts, key=lambda counted: counted.batches)
            self._moves = [self._of_mean_visit(n, longest) if n > 1 else n for n in longest.by_hand]
        self._clock.close_round(self._of_a_round() or 0)
        for config, number in zip(configs, self._moves, strict=False):  # none before the first round that counts
            for _ in range(number):
                config.scheduler.step()  # type: ignore[call-arg]  # those that take a metric are refused
        if self._clock.ends_epochs:  # so did the visit, before what it set last
            self._clock.step_schedulers("epoch")
        self._options.put(hand_set)
        if not self._clock.ends_epochs:
            self._clock.step_schedulers("epoch")
        self._options.begin()
        self.local_steps += sum(counted.steps for counted in counts)
        return self.local_steps

    def set_by_hand(self) -> HandSet:
        """Options that were set by hand since the visit began, or since the round was closed."""
        return self._options.end()

    def _of_a_round(self) -> int | None:
        """Optimizer steps of a round; ``None`` before the first visit."""
        if not self._manual:
            return self.steps
        return None if self._measured is None else self._of_mean_visit(self._measured.steps, self._measured)

    def _of_mean_visit(self, number: int, counted: StepCounts) -> int:
        """A number of a visit in proportion to the batches of the mean visit."""
        assert self._clock.mean_visit is not None
        return ceil(number * self._clock.mean_visit.batches / counted.batches)

    # ---- a visit

    def begin_visit(self) -> bool:
        """A client is about to train; returns whether its learning rate may change meanwhile."""
        configs = self._trainer.lr_scheduler_configs
        self._odd, self._by_hand = [], [0] * len(configs)
        self._clock.begin_visit()
        self._options.begin()
        for place, config in enumerate(configs):
            step = config.scheduler.step  # in front of its class's until restore() puts the old attributes back
            vars(config.scheduler)["step"] = partial(self._step_by_hand, place, step)
        return self._clock.scheduled or (self._manual and bool(configs))

    def end_visit(self) -> StepCounts:
        """The client is trained; :meth:`restore` has to follow."""
        steps, batches = self._clock.counted()
        return StepCounts(steps, batches, tuple(self._by_hand), tuple(self._odd))

    def restore(self) -> None:
        """Ends a visit, however it went: the clock is where the round began; the snapshot sees to schedulers."""
        self._clock.end_visit()

    def _step_by_hand(self, place: int, step: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._clock.stepping:
            self._by_hand[place] += 1
            if args or kwargs:
                self._odd.append(type(self._trainer.lr_scheduler_configs[place].scheduler).__name__)
            if not self._clock.is_in_mean_visit:
                return
        self._options.note()
        step(*args, **kwargs)
        self._options.follow()

    # ---- checkpoints, copies

    def state_dict(self) -> dict[str, Any]:
        """What the fit has counted, and what it knows of hand-made steps."""
        measured = None if self._measured is None else asdict(self._measured)
        assert self._clock.mean_visit is not None
        return {
            "mean_visit": asdict(self._clock.mean_visit),
            "local_steps": self.local_steps,
            "measured": measured,
            "moves": list(self._moves),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._clock.mean_visit = MeanVisit(**state["mean_visit"])
        self.local_steps, measured = state["local_steps"], state["measured"]
        self._measured = None if measured is None else StepCounts(**measured)
        self._moves = list(state["moves"])


class HandSetOptions:
    """Tells what a visit sets in parameter groups from what its schedulers set there."""

    def __init__(self, optimizers: ClientOptimizers) -> None:
        self._optimizers = optimizers
        self._known: list[list[dict[str, Any]]] = []
        self._names: list[list[set[str]]] = []  # of options that were set by hand, as ``_known``

    def begin(self) -> None:
        """A visit begins: what is there was not set by hand."""
        self.follow()
        self._names = [[set() for _ in groups] for groups in self._known]

    def note(self) -> None:
        """Looks for what was set since the last call of :meth:`follow`, before a scheduler steps."""
        for optimizer, known, names in zip(self._optimizers.all, self._known, self._names, strict=True):
            for group, before, found in zip(optimizer.param_groups, known, names, strict=False):
                options = self._optimizers.settable(group)
                found.update(
                    n
                    for n in options
                    if n not in before or (group[n] is not before[n] and not _same(group[n], before[n]))
                )

    def follow(self) -> None:
        """A scheduler has stepped: what it set was not set by hand."""
        self._known = [[group_options(group) for group in each.param_groups] for each in self._optimizers.all]

    def end(self) -> HandSet:
        """What the visit leaves in options that were set by hand, if any was."""
        self.note()
        if not any(names for groups in self._names for names in groups):
            return ()
        both = zip(self._optimizers.all, self._names, strict=True)
        pairs = [zip(optimizer.param_groups, names, strict=False) for optimizer, names in both]
        return [[group_options({name: group[name] for name in chosen}) for group, chosen in each] for each in pairs]

    def put(self, options: HandSet) -> None:
        """Sets options as a visit has set them."""
        for optimizer, groups in zip(self._optimizers.all, options, strict=False):
            for group, chosen in zip(optimizer.param_groups, groups, strict=False):
                group.update(group_options(chosen))


def _same(one: Any, other: Any) -> bool:
    lists = isinstance(one, list) and isinstance(other, list)
    return one is other or (is_equal(tuple(one), tuple(other)) if lists else is_equal(one, other))


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group without its parameters."""
    return {name: _own(value) for name, value in group.items() if name != "params"}


def _own(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):  # copy.deepcopy takes many times as long
        return value
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def scheduled_state(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """An optimizer's part of a checkpoint in torch's layout, without the state, which belongs to clients."""
    start, packed = 0, []
    chosen = groups or [group_options(group) for group in optimizer.param_groups]
    for group, options in zip(optimizer.param_groups, chosen, strict=True):
        indices = list(range(start, start + len(group["params"])))
        start += len(indices)
        packed.append({**options, "params": indices})
    return {"state": {}, "param_groups": packed}


def load_scheduled_states(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]) -> None:
    """Restores the options (the learning rate among them) that :func:`scheduled_state` returned for every optimizer.

    Not through ``optimizer.load_state_dict``: it empties the state, which some optimizers fill when they are made.
    """
    if states and len(states) != len(optimizers):
        raise ValueError(f"the module must have the checkpoint's {len(states)} optimizers, found {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=False):
        saved = state["param_groups"]
        found, expected = [len(g["params"]) for g in optimizer.param_groups], [len(g["params"]) for g in saved]
        if found != expected:
            kind = type(optimizer).__name__
            raise ValueError(f"{kind} must have the checkpoint's parameter groups, sizes {expected}, found {found}")
        for group, options in zip(optimizer.param_groups, saved, strict=True):
            group.update(group_options(options))
