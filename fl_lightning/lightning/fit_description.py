# SPDX-License-Identifier: Apache-2.0
"""What two sides of a federated fit must agree on: a checkpoint and who goes on from it, a server and its clients."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fl_lightning.arguments import Bounds, checked, shown
from fl_lightning.core.layout import ParamLayout, layout_difference, layout_fingerprint
from fl_lightning.core.tensors import DIGEST, digest
from fl_lightning.lightning.names import rank_zero_warn
from fl_lightning.lightning.versions import package_versions

_LISTED = 16  # numbers; of longer lists and tensors a digest
_MUST_AGREE = ("method", "layout", "server_optimizer")


class _Rule(Protocol):
    def hyperparameters(self) -> dict[str, Any]: ...


@checked(clients=Bounds(1), steps_per_round=Bounds(1))
@dataclass(frozen=True)
class FitDescription:
    """A fit in plain values: strings, numbers, and lists and dicts of them.

    Entries that one side lacks are not compared.

    Attributes:
        method: names of the server rule and the client rule, ``"FedLF with ClientRule"``.
        called: the method in a user's words, ``"FedAvg with client=SCAFFOLD"``.
        layout: order, names and shapes of the parameters, and the layers.
        clients: registered clients.
        names: of the clients, by id, where they have names.
        server_optimizer: name of the server optimizer's class, ``"none"`` without.
        arguments: by the rule's name, the arguments of its constructor.
        data: what tells the clients' data from others, see :meth:`fl_lightning.data.ClientLoaders.fingerprint`.
        settings: options of the strategy that change results, the seed among them.
        versions: of the packages that computed.
        steps_per_round: steps that a round counts as, for ``global_step`` and learning-rate schedules.
    """

    method: str
    layout: Mapping[str, Sequence[str]] = field(default_factory=dict)
    clients: int | None = None
    names: Sequence[str] = ()
    called: str | None = None
    server_optimizer: str | None = None
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=package_versions)
    steps_per_round: int | None = None

    @classmethod
    @checked()
    def of(cls, server: _Rule, client: _Rule, layout: ParamLayout, **entries: Any) -> FitDescription:
        """The description of a method on a model.

        Args:
            server: the server rule.
            client: the client rule.
            layout: the flat order of the parameters.
            **entries: further attributes.
        """
        names = type(server).__name__, type(client).__name__
        arguments = {name: rule.hyperparameters() for name, rule in zip(names, (server, client), strict=True)}
        return cls(" with ".join(names), layout_fingerprint(layout), arguments=arguments, **entries)

    def differences(self, other: FitDescription) -> dict[str, str]:
        """In words, by entry, what ``other`` has instead of what this one has; agreeing entries are left out."""
        found = {"method": _became(self.method, other.method), "clients": _clients_became(self, other)}
        if found["method"] and self.called != other.called:
            found["method"] = _became(self.called or self.method, other.called or other.method)
        if self.layout and other.layout:
            found["layout"] = layout_difference(self.layout, other.layout)
        found["steps_per_round"] = _became(self.steps_per_round, other.steps_per_round)
        found["server_optimizer"] = _became(self.server_optimizer, other.server_optimizer)
        if not found["method"]:
            half, called = self.method.rpartition(" with ")[2], (self.called or "").rpartition("=")[2]
            found["arguments"] = _arguments_became(self.arguments, other.arguments, {half: called or half})
        for name in ("data", "settings", "versions"):
            found[name] = _entries_became(getattr(self, name), getattr(other, name))
        titles = {"arguments": "method: ", "settings": ""}
        return {name: titles.get(name, f"{name}: ") + words for name, words in found.items() if words}

    def difference(self, other: FitDescription) -> str:
        """In words, what ``other`` has instead of what this one has; empty if they agree."""
        return "; ".join(self.differences(other).values())

    def state_dict(self) -> dict[str, Any]:
        """The entries, as ``torch.load(weights_only=True)`` accepts them; settings stand beside the others."""
        entries = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "settings"}
        return {**entries, **self.settings}

    @classmethod
    @checked()
    def from_state_dict(cls, state: Mapping[str, Any]) -> FitDescription:
        """What :meth:`state_dict` returned."""
        own = {entry.name for entry in fields(cls)} - {"settings"}
        known = {"versions": {}, **{name: value for name, value in state.items() if name in own}}
        return cls(**known, settings={name: value for name, value in state.items() if name not in own})


def constructor_arguments(rule: object, without: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of an object's constructor that it keeps in attributes of the same names, as plain values."""
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    names = [name for name, given in signature(type(rule)).parameters.items() if given.kind not in variadic]
    return {name: plain(getattr(rule, name)) for name in names if name not in without and hasattr(rule, name)}


def plain(value: Any) -> Any:
    """A value as numbers, strings and lists; what is neither becomes a text that is the same in every process."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (Integral, np.bool_)):  # numpy's
        return int(value)
    if isinstance(value, Real):  # numpy's, and fractions
        return float(value)
    if isinstance(value, (Tensor, np.ndarray)):
        small = int(np.prod(value.shape)) <= _LISTED
        return value.tolist() if small else f"{value.dtype} {list(value.shape)} {digest(value)}"
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        listed = [plain(entry) for entry in value]
        return listed if len(listed) <= _LISTED else f"{len(listed)} values {digest(repr(listed))}"
    name = getattr(value, "__qualname__", None)
    if name is not None:  # a function or a class
        return f"{value.__module__}.{name}"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _became(old: Any, new: Any) -> str:
    return "" if old is None or new is None or old == new else f"{_shown(old)} became {_shown(new)}"


def _clients_became(old: FitDescription, new: FitDescription) -> str:
    if not (old.names and new.names):
        return _became(old.clients, new.clients)
    joined, left = sorted({*new.names} - {*old.names}), sorted({*old.names} - {*new.names})
    return ", ".join(f"{shown(who)[1:-1]} {what}" for who, what in ((joined, "joined"), (left, "left")) if who)


def _entries_became(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    changed = {name: (old[name], new[name]) for name in old if name in new and old[name] != new[name]}
    return ", ".join(
        f"other {name}" if str(a).startswith(DIGEST) else f"{name}: {_shown(a)} became {_shown(b)}"
        for name, (a, b) in changed.items()
    )


def _arguments_became(
    old: Mapping[str, Mapping[str, Any]], new: Mapping[str, Mapping[str, Any]], called: Mapping[str, str]
) -> str:
    words, told = [], list[tuple[str, Any, Any]]()
    for rule, before in old.items():
        after = new.get(rule, {})
        changes = [
            (name, before[name], after[name]) for name in before if name in after and before[name] != after[name]
        ]
        changes = [change for change in changes if change not in told]  # a client half has its method's arguments
        told += changes
        if changes:
            texts = [", ".join(f"{change[0]}={change[place]!r}" for change in changes) for place in (1, 2)]
            name = called.get(rule, rule)
            words.append(f"{name}({texts[0]}) became {name}({texts[1]})")
    return ", ".join(words)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def remembers(states: Mapping[str, Any]) -> list[str]:
    """Which parts of a checkpoint's state hold something, as a message names them."""
    names = {"algorithm": "the method", "client_rule": "its client half", "client_optimizers": "client optimizers"}
    return [words for name, words in names.items() if _holds_something(states[name])]


def check_resume(states: Mapping[str, Any], expected: FitDescription, source: str, strict: bool) -> bool:
    """Compares the fit that wrote a checkpoint with the one that goes on from it; warns of what may differ.

    ``source`` is what the states come from, as a message names it. ``strict`` refuses other arguments where something
    is remembered. Where the states mean nothing to this fit, it always raises ValueError: another method, server
    optimizer or layout, or another number of steps of a round without other clients or data. Returns whether clients
    have joined, left, or other data.
    """
    differences = FitDescription.from_state_dict(states["fit"]).differences(expected)
    changed = bool({"clients", "data"} & differences.keys())
    refused = [differences[name] for name in _MUST_AGREE if name in differences]
    if not changed and "steps_per_round" in differences:
        refused.append(differences["steps_per_round"])
    if refused:
        raise ValueError(
            f"{source} was written by another fit, {refused[0]}: use the same, or start from the weights alone "
            "(load_from_checkpoint)"
        )
    memories = " and ".join(remembers(states))
    if "arguments" in differences and memories and strict:
        raise ValueError(
            f"{source} was written by another fit, {differences['arguments']}: the memory of {memories} belongs to "
            "that one. Use the same, start from the weights alone (load_from_checkpoint), or go on all the same with "
            "strict_resume=False"
        )
    if changed:
        differences.pop("steps_per_round", None)  # rounds count as many as before
    if differences:
        words = "; ".join(differences.values())
        note = f". What {memories} remembers of clients stays theirs" * bool(changed and memories)
        rank_zero_warn(f"the fit goes on with other settings than {source} was written with: {words}{note}")
    return changed


def _holds_something(state: Any) -> bool:
    if isinstance(state, Tensor):
        return state.numel() > 0
    if isinstance(state, Mapping):
        return any(map(_holds_something, state.values()))
    if isinstance(state, (list, tuple)):
        return any(map(_holds_something, state))
    return bool(state)
