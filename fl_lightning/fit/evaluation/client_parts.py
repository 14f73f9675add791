# SPDX-License-Identifier: Apache-2.0
"""What each client's batches add to an evaluation, apart from what the others add, and joined in the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.lightning.logged_values import ClientValues, LoggedRow, LoggedShare
from fl_lightning.lightning.metric_state import MetricShare, in_forward, last_value, parts_of, updates_of
from fl_lightning.lightning.module.kept_objects import Added, Items, means_the_same
from fl_lightning.lightning.module.object_state import WholeState, shadowed
from fl_lightning.lightning.module.undefined_metrics import Noticed
from fl_lightning.lightning.names import LightningModule


@dataclass
class ClientPart:
    """What one client adds."""

    logged: LoggedShare  # to what self.log collects
    metrics: list[MetricShare | None]  # None for those that it leaves alone
    size: int  # its samples
    row: LoggedRow  # its values
    own: LoggedRow | None = None  # those of its own model, where the method has them


class ClientParts:
    """Lets every client begin with empty metrics and with nothing logged, and joins what clients add in their order.

    That is all that is to be done where a module gathers in metrics whose states can be joined, and in lists that only
    grow. Anything else that its steps leave behind passes from client to client (``passed_on`` names it): then nothing
    is put aside any more, and the evaluation goes on as it would be without clients. So it does from the start unless
    ``apart`` says that clients' batches come in one piece each. The module is taken as it is before its first batch.
    """

    def __init__(
        self, module: LightningModule, values: ClientValues, noticed: Noticed, several: bool, apart: bool = True
    ) -> None:
        self._module, self._values, self._noticed, self._several = module, values, noticed, several
        self.start = WholeState(module)
        self.passed_on: list[str] = [] if apart else ["several loaders"]
        self._states = self.start.states
        # In which steps may gather.
        self.lists = [kept for kept in self.start.attributes if isinstance(kept, Items) and _grows(kept.value)]
        self._lengths = self._own_starts = self._now()
        self.gathers = False  # in a list; the hook at the end may have emptied it
        self._others = values.share()  # of loaders before this one
        self._parts: list[ClientPart] = []
        self._apart = apart
        self._made_up: list[Any] = []  # values of batches that are 0/0

    @property
    def separable(self) -> bool:
        """Whether the values of the clients' batches are their own."""
        return not (self.passed_on and self._several)

    @property
    def grown(self) -> list[Items]:
        """Lists in which steps gather."""
        return [kept for kept in self.lists if len(kept.value) > len(kept.content)]

    @property
    def adds_to_older_metrics(self) -> bool:
        """Whether steps have updated a metric that was not empty."""
        added = [
            (state, share) for part in self._parts for state, share in zip(self._states, part.metrics, strict=True)
        ]
        return any(share is not None and state.updates for state, share in added)

    def _now(self) -> list[int]:
        return [len(kept.value) for kept in self.lists]

    # ---- a client

    def begin(self) -> None:
        """A client's first batch is next."""
        if self._apart:
            self._values.clear()
            for state in self._states:
                state.metric.reset()
        self._own_starts, self._made_up = self._now(), []

    @contextmanager
    def in_steps(self) -> Iterator[None]:
        """Around a client's batches: a metric that a step computes gives the value of all clients so far."""
        with ExitStack() as stack:
            parts = [part for state in self._states for part in parts_of(state.metric)] if self._apart else []
            for at, metric in parts:
                stack.enter_context(shadowed(metric, compute=partial(self._computed, metric, bool(at), metric.compute)))
            if parts:
                stack.enter_context(shadowed(self._module, log=partial(self._log, self._module.log)))
            yield

    def _computed(self, metric: Metric, inside: bool, compute: Callable[[], Any]) -> Any:
        if not in_forward(metric):
            self.pass_on(f"{type(metric).__name__}.compute() in a step")
            return compute()
        heard = len(self._noticed.reasons)  # forward computes the value of the batch
        value = compute()
        reason = self._noticed.computed(metric, lambda: value, of_batch=True)[1]
        is_undefined = reason is not None or len(self._noticed.reasons) > heard
        del self._noticed.reasons[heard:]
        if is_undefined:  # which matters if it is logged, or if a wrapper makes another value of it
            self._made_up.append(value)
            self._noticed.reasons.extend([f"{type(metric).__name__} of a batch"] * inside)
        return value

    def _log(self, log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if any(value is one for one in self._made_up):
            self._noticed.reasons.append(f"{name} of a batch")
        log(name, value, *args, **kwargs)

    def after_batch(self) -> None:
        """A list that became shorter has been used and emptied on the way."""
        lengths = self._now()
        self.gathers |= any(now > before for now, before in zip(lengths, self._lengths, strict=True))
        if any(now < before for now, before in zip(lengths, self._lengths, strict=True)):
            self.pass_on("a list that it empties on the way")
        self._lengths = lengths

    def end(self, size: int, row: LoggedRow) -> ClientPart:
        """The client's last batch is over."""
        part = self._part(size, row)
        lists = {id(kept) for kept in self.lists}
        for kept in self.start.changed() if self._apart else ():
            if not (isinstance(kept.change(), Added) if id(kept) in lists else means_the_same(kept)):
                for name in kept.changed_names():
                    self.pass_on(name)
        if self._apart:
            self._parts.append(part)
        return part

    def _part(self, size: int = 0, row: LoggedRow | None = None) -> ClientPart:
        metrics = [state.metric for state in self._states]
        used = [updates_of(metric) or last_value(metric) is not None for metric in metrics]
        shares = [MetricShare.of(m) if is_used else None for m, is_used in zip(metrics, used, strict=True)]
        return ClientPart(self._values.share(), shares, size, LoggedRow() if row is None else row)

    def pass_on(self, name: str) -> None:
        """Something passes from client to client."""
        if name not in self.passed_on:
            self.passed_on.append(name)
        if self._apart and self._several:
            self.join([*self._parts, self._part()])

    def join(self, parts: Sequence[ClientPart] | None = None) -> None:
        """Lets results and metrics hold what clients have added: these in their order, or those that were here."""
        if parts is None and not self._apart:
            return
        self._apart, parts = False, self._parts if parts is None else parts
        self._values.join([self._others, *(part.logged for part in parts)])
        self._hold(parts)

    def _hold(self, parts: Iterable[ClientPart]) -> None:
        for state in self._states:
            state.put_back()
        for part in parts:
            for state, share in zip(self._states, part.metrics, strict=True):
                if share is not None:
                    share.add_to(state.metric)

    # ---- once more for a client

    @contextmanager
    def only(self, part: ClientPart, before: bool) -> Iterator[None]:
        """Metrics and lists hold what one client has added; metrics, if asked for, also what they held before."""
        state = WholeState(self._module) if self.passed_on else self.start
        with state.apart():
            if before:
                self._hold([part])
            for kept, start in zip(self.lists, self._own_starts, strict=True):
                if len(kept.value) > len(kept.content):
                    kept.put([*kept.content, *_copied(list(kept.value)[start:])])
            yield


def _grows(value: object) -> bool:
    return isinstance(value, list) or (isinstance(value, deque) and value.maxlen is None)


def _copied(items: list[Any]) -> Any:
    """Items that a hook may change."""
    return apply_to_collection(items, (Tensor, np.ndarray), lambda v: v.clone() if isinstance(v, Tensor) else v.copy())
