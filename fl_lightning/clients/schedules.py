# SPDX-License-Identifier: Apache-2.0
"""The learning-rate schedulers of a fit: every visit starts where the round began and leaves them as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
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
    own: tuple[int, ...] = ()  # with manual optimization, per scheduler: steps of its optimizer
    by_hand: tuple[int, ...] = ()  # per scheduler: how often the module stepped it
    odd: tuple[str, ...] = ()  # names of schedulers that the module stepped with an argument


class Schedules:
    """Puts schedulers on the clock of :class:`RoundClock`.

    Between visits they are where the round began. Closing a round moves them by what a round lasts, whoever took part.
    Schedulers that the module steps by hand move as they did in the round's visits: by the steps of their optimizer
    that a round has, which the first visit tells, or once.
    """

    def __init__(self, trainer: Trainer, clock: RoundClock, options: HandSetOptions) -> None:
        self._trainer, self._clock, self._options = trainer, clock, options
        self._manual = not trainer.lightning_module.automatic_optimization
        clock.ends_epochs = is_overridden("on_train_batch_end", trainer.lightning_module)
        self._watch = ExitStack()
        self._own: list[int] = []
        self._by_hand: list[int] = []
        self._odd: list[str] = []
        self._measured: StepCounts | None = None
        self._patterns: dict[int, str] = {}  # per scheduler that is stepped by hand: "step" or "visit"
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
        """Hears how a client's visit went; refuses steps by hand that a round cannot repeat."""
        self._arrived[client_id] = counted
        for place, calls in enumerate(counted.by_hand):
            steps, name = counted.own[place], self._name(place)
            if name in counted.odd or calls not in (0, 1, steps):
                how = "with an argument" if name in counted.odd else f"{calls} times in a visit of {steps} steps"
                self._refuse(name, how)

    def close_round(self, client_ids: Iterable[int], hand_set: HandSet = ()) -> int:
        """Moves schedulers, options and clock to the end of a round that counts for these clients.

        Others leave no trace. ``hand_set`` are the options that the visit has set whose attributes the module takes
        over. Refuses steps by hand in different ways before anything moves. Returns :attr:`local_steps`, with theirs.
        """
        counts, configs = [self._arrived[client] for client in client_ids], self._trainer.lr_scheduler_configs
        if self._measured is None and counts and counts[0].batches:
            self._measured = counts[0]
        moves = [self._steps_by_hand(place, counts) for place in range(len(configs))]
        self._clock.close_round(self._of_a_round() or 0)
        for config, number in zip(configs, moves, strict=True):
            for _ in range(number):
                config.scheduler.step()  # type: ignore[call-arg]  # those that take a metric are refused
        if self._clock.ends_epochs:  # so did the visit, before what it set last
            self._clock.end_epoch()
        self._options.put(hand_set)
        if not self._clock.ends_epochs:
            self._clock.end_epoch()
        self._options.begin()
        self.local_steps += sum(counted.steps for counted in counts)
        return self.local_steps

    def set_since_round(self) -> HandSet:
        """Options that were set by hand since the round was closed."""
        return self._options.end()

    def _steps_by_hand(self, place: int, counts: Sequence[StepCounts]) -> int:
        """How far a scheduler moves in this round because visits stepped it by hand; as before if none counts."""
        visits = [(counted.by_hand[place], counted.own[place]) for counted in counts]
        calls = {number for number, _ in visits}
        if calls == {0}:
            return 0
        patterns = {"step" if number == steps else "visit" for number, steps in visits if steps != 1}
        if 0 in calls or len(patterns) > 1:
            found = " or ".join(f"{number} times in {steps} steps" for number, steps in sorted(set(visits)))
            self._refuse(self._name(place), f"{found} in the visits of one round")
        if visits:
            self._patterns[place] = patterns.pop() if patterns else self._patterns.get(place, "step")
        if self._patterns.get(place) == "step":
            return self._of_a_round(place) or 0
        return int(place in self._patterns)

    def _of_a_round(self, place: int | None = None) -> int | None:
        """Optimizer steps of a round: all, or those of a scheduler's optimizer; ``None`` before the first visit."""
        if not self._manual:
            return self.steps
        measured, mean_visit = self._measured, self._clock.mean_visit
        if measured is None or mean_visit is None:
            return None
        steps = measured.steps if place is None else measured.own[place]
        return ceil(steps * mean_visit.batches / measured.batches)

    def _name(self, place: int) -> str:
        return type(self._trainer.lr_scheduler_configs[place].scheduler).__name__

    def _refuse(self, name: str, how: str) -> None:
        raise ValueError(
            f"lr scheduler {name} must be stepped by hand once per step of its optimizer, or once per visit (if "
            f"trainer.is_last_batch), found {how}: a round must be able to go on where its visits would have ended"
        )

    # ---- a visit

    def begin_visit(self) -> bool:
        """A client is about to train; returns whether its learning rate may change meanwhile."""
        configs = self._trainer.lr_scheduler_configs
        self._odd = []
        self._own, self._by_hand = [0] * len(configs), [0] * len(configs)
        self._clock.begin_visit()
        self._options.begin()
        for place, config in enumerate(configs):
            if self._manual:
                handle = config.scheduler.optimizer.register_step_post_hook(partial(self._note_step, place))
                self._watch.callback(handle.remove)
            step = config.scheduler.step  # in front of its class's until restore() puts the old attributes back
            vars(config.scheduler)["step"] = partial(self._step_by_hand, place, step)
        return self._clock.scheduled or (self._manual and bool(configs))

    def end_visit(self) -> StepCounts:
        """The client is trained; :meth:`restore` has to follow."""
        steps, batches = self._clock.counted()
        own = self._own if self._manual else [steps] * len(self._by_hand)
        return StepCounts(steps, batches, tuple(own), tuple(self._by_hand), tuple(self._odd))

    def restore(self) -> None:
        """Ends a visit, however it went: the clock is where the round began; the snapshot sees to schedulers."""
        self._watch.close()
        self._clock.end_visit()

    def _note_step(self, place: int, *_: Any) -> None:
        self._own[place] += 1

    def _step_by_hand(self, place: int, step: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if not self._clock.stepping:
            self._by_hand[place] += 1
            if args or kwargs:
                self._odd.append(self._name(place))
            if not self._clock.allows(self._by_hand[place], self._of_a_round(place)):
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
            "patterns": dict(self._patterns),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self._clock.mean_visit = MeanVisit(**state["mean_visit"])
        self.local_steps, measured = state["local_steps"], state["measured"]
        self._measured = None if measured is None else StepCounts(**measured)
        self._patterns = dict(state["patterns"])
