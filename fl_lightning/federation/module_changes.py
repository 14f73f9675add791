# SPDX-License-Identifier: Apache-2.0
"""What was changed in a module beside parameters and buffers, on its way between a server and its clients.

Both sides have a module that was made alike. The server says what rounds have changed since, and a client what its
visit has changed, as plain values by path.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from fl_lightning.clients.module_isolation import ModuleIsolation
from fl_lightning.federation.message_checks import CHARACTERS, STATE_BYTES, STATE_ENTRIES, MessageError, printable
from fl_lightning.lightning.module.changes import Read, on_cpu, read
from fl_lightning.lightning.module.plain_values import Limits
from fl_lightning.lightning.module.snapshot import ModuleSnapshot
from fl_lightning.lightning.names import LightningModule, rank_zero_warn

LIMITS = Limits(STATE_ENTRIES, STATE_BYTES, CHARACTERS)


def received(plain: Mapping[str, Any], snapshot: ModuleSnapshot, device: torch.device) -> Read:
    """What somebody has changed, for the module of a snapshot, which is as it was; raises MessageError otherwise."""
    try:
        nbytes = sum(v.nbytes for node in plain.get("nodes", ()) for v in node if isinstance(v, Tensor))
        if nbytes > STATE_BYTES:
            raise ValueError(f"at most {STATE_BYTES} bytes, found {nbytes}")
        found = read(plain, snapshot, device)
        for one, form, values in found.changes:
            try:
                one.apply(form, values)
            finally:
                one.restore()
        return found
    except Exception as error:  # of values of any kind in the place of others
        raise MessageError(
            f"what it left in the module cannot be read ({type(error).__name__}: {printable(error)})"
        ) from error


class ModuleAtClient:
    """A client's module, while the client does what a message asks for.

    ``plain`` is what the server has sent of its own, ``warned`` the warnings of earlier visits, which do not come
    again.
    """

    def __init__(self, module: LightningModule, plain: Mapping[str, Any], warned: set[str]) -> None:
        self._module, self._plain, self.warned = module, plain, warned
        self._stays, self._gathered = dict[str, str](), dict[str, int]()
        self._outer = ModuleIsolation(module)

    def __enter__(self) -> ModuleAtClient:
        self._outer.begin()
        return self

    def __exit__(self, *error: object) -> None:
        """The module is as it was; warnings of what leaves the client come before anybody can send it."""
        self._outer.restore()
        kind = type(self._module).__name__
        self._warn_once(
            f"what a client leaves in {kind} stays at the client, and begins anew in every round, where no message can "
            "hold it", self._stays,
        )  # fmt: skip
        self._warn_once(
            f"what training gathers in {kind} goes to the server, and from there to other clients, unless "
            "on_train_epoch_end empties it", {name: f"{count} values" for name, count in self._gathered.items()},
        )  # fmt: skip

    def _warn_once(self, words: str, found: Mapping[str, str]) -> None:
        new = {name: why for name, why in found.items() if f"{name}: {words}" not in self.warned}
        self.warned |= {f"{name}: {words}" for name in new}
        if new:
            rank_zero_warn(f"{words}: {'; '.join(f'{name} ({why})' for name, why in new.items())}")

    def take(self) -> None:
        """The hooks before the first round have run: the module becomes what the server's is."""
        self._visit = copy(self._outer)  # has looked at the module already; looks again only if a hook has changed it
        if self._plain:
            snapshot = self._visit.take_snapshot()
            for found, form, values in received(self._plain, snapshot, self._module.device).changes:
                found.apply(form, values)
        self._visit.begin()

    def change(self, withholds: str | None = None) -> dict[str, Any]:
        """What was changed since; nothing if there is a reason to withhold it."""
        own, outer = self._visit.snapshot, self._outer.snapshot
        attributes = {found.name for found in outer.objects}  # the server's
        for path, form, values in self._plain.get("changes", ()):
            if form == "bound":
                owner = path.removeprefix("module ").partition("#")[0]
                attributes.add(f"{owner}.{values[0]}" if owner else values[0])
        change = self._visit.end(LIMITS, attributes)
        unfollowed = {name: f"a {kind}" for name, kind in own.unfollowed.items()}
        if change.plain and withholds is not None:
            self._stays = {"all of it": withholds}
            return {}
        self._stays, self._gathered = {**unfollowed, **change.lost}, dict(change.gathered)
        return on_cpu(change.plain)
