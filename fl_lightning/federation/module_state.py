# SPDX-License-Identifier: Apache-2.0
"""What a module keeps beside parameters and buffers, on its way between a server and its clients.

Both sides have a module that was made alike. The server says what rounds have changed since, and a client what its
visit has changed: by the names of attributes, as :class:`fl_lightning.clients.module_visits.Left` has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fl_lightning.clients.module_visits import Left, ModuleVisits
from fl_lightning.clients.update_rows import Upload
from fl_lightning.federation.module_changes import Places, read_left, written
from fl_lightning.fit.uploads import merge_left
from fl_lightning.lightning.metric_state import MetricShare, joins_clients
from fl_lightning.lightning.module.object_state import ObjectState
from fl_lightning.lightning.names import LightningModule, rank_zero_warn

_SAID = 32


class AwayModule:
    """A client's module, while the client does what a message asks for.

    ``plain`` is what the server has sent of its own, ``said`` what was said of earlier visits and is not said again.
    """

    def __init__(self, module: LightningModule, plain: Mapping[str, Any], said: set[str]) -> None:
        self._module, self._plain, self._said = module, plain, said
        self._stays, self._gathered = dict[str, str](), dict[str, int]()
        self._outer, self._visit = ModuleVisits(module), ModuleVisits(module)

    def __enter__(self) -> AwayModule:
        self._outer.begin()
        return self

    def __exit__(self, *error: object) -> None:
        """The module is as it was; what leaves the client is said before anybody can send it."""
        self._outer.put_back()
        kind = type(self._module).__name__
        self._say(
            f"what a client leaves in {kind} stays at the client, and begins anew in every round, where no message can "
            "hold it", self._stays,
        )  # fmt: skip
        self._say(
            f"what training gathers in {kind} goes to the server, and from there to other clients, unless "
            "on_train_epoch_end empties it", {name: f"{count} values" for name, count in self._gathered.items()},
        )  # fmt: skip

    def _say(self, words: str, found: Mapping[str, str]) -> None:
        new = {name: why for name, why in found.items() if f"{name}: {words}" not in self._said}
        self._said |= {f"{name}: {words}" for name in new}
        if new:
            rank_zero_warn(f"{words}: {'; '.join(f'{name} ({why})' for name, why in new.items())}")

    def take(self) -> None:
        """The hooks before the first round have run: the module becomes what the server's is."""
        if self._plain:
            module = self._module
            left, _ = read_left(self._plain, Places(module, self._visit.look()), module.device)
            for kept, change in left.changes:
                kept.apply(change)
        self._visit.begin()

    def left(self, withholds: str | None = None) -> dict[str, Any]:
        """What was changed since; nothing if there is a reason to withhold it."""
        left, state = self._visit.end(), self._visit.looked
        alone = {name: f"a {kind}" for name, kind in state.alone.items()}
        alone |= dict.fromkeys(left.ran_on, "a metric whose states cannot be joined")
        if not (left.changes or left.metrics):
            self._stays = alone
            return {}
        before = Places(self._module, self._outer.looked)
        attributes = set(before.attributes)
        for name, form, *parts in self._plain.get("changes", ()):
            if form == "names":
                owner = name.partition("#")[0]
                attributes |= {f"{owner}.{key}" if owner else key for key in parts[0][::2]}
        plain, stays, gathered = written(left, Places(self._module, state), before.classes, attributes)
        if plain and withholds is not None:
            self._stays = {"all of it": withholds}
            return {}
        self._stays, self._gathered = alone | stays, gathered
        return plain


class HomeModule:
    """A server's module, which rounds change as they do in a fit."""

    def __init__(self, module: LightningModule, device: torch.device) -> None:
        self._module, self._device, self._said = module, device, set[str]()
        self._visits, self._first = ModuleVisits(module), Places(module, ObjectState(module))
        self._now: Places | None = None

    def plain(self, metrics: bool = False) -> dict[str, Any]:
        """What rounds have changed since the module was made.

        ``metrics`` adds what metrics have gathered, which no client needs: its visits begin with empty ones.
        """
        state = self._first.state
        left = Left([(kept, kept.change()) for kept in state.changed()])
        found = state.metrics.values() if metrics else ()
        left.metrics.extend((metric, MetricShare.of(metric)) for metric in found if joins_clients(metric))
        plain, stays, _ = written(left, self._first, self._first.classes)
        for name, why in stays.items():
            self._forget(name)
            self._say(name, f"{name!r} begins anew at every client: {why}")
        return plain

    def _forget(self, name: str) -> None:
        if name in self._first.state.metrics:
            self._first.state.metrics[name].reset()
        for kept in self._first.state.changed():
            if name in kept.changed_names():
                kept.put(kept.content)

    def _say(self, name: str, words: str) -> None:
        if name not in self._said and len(self._said) < _SAID:
            self._said.add(name)
            rank_zero_warn(f"of what clients leave in {type(self._module).__name__}, {words}")

    def read(self, plain: Mapping[str, Any]) -> Left:
        """What a client has left; raises MisfitError if it is none, or does not fit the module."""
        state = self._visits.look()
        if self._now is None or self._now.state is not state:
            self._now = Places(self._module, state)
        left, lacking = read_left(plain, self._now, self._device)
        for name in sorted(lacking):
            self._say(name, f"{name!r} is not among what the server's module has: it stays with them")
        return left

    def merge(self, uploads: Sequence[Upload], counted: Collection[int]) -> None:
        """Joins what visits have left, as a fit does."""
        merge_left(self._visits, uploads, counted)

    def load(self, plain: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`plain` gave with metrics."""
        self._first.state.put_back()
        left, _ = read_left(plain, self._first, self._device)
        for kept, change in left.changes:
            kept.apply(change)
        for metric, share in left.metrics:
            metric.reset()
            share.add_to(metric)
