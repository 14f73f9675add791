# SPDX-License-Identifier: Apache-2.0
"""The learning-rate schedulers of a fit: every visit starts where the round began and leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil
from typing import Any

from fl_lightning.clients.client_optimizers import HandSet, HandSetOptions
from fl_lightning.lightning.inspection import is_overridden
from fl_lightning.lightning.names import Trainer
from fl_lightning.lightning.round_clock import MeanVisit, RoundClock


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

    def __init__(self, trainer: Trainer, clock: RoundClock, options: HandSetOptions) -> None:
        self._trainer, self._clock, self._options = trainer, clock, options
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

    def set_since_round(self) -> HandSet:
        """Options that were set by hand since the round was closed."""
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
