# SPDX-License-Identifier: Apache-2.0
"""What people and libraries read of a strategy: its arguments, and what its fits and evaluations have left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

from fl_lightning.core.records import EvaluationRecord, RoundRecord
from fl_lightning.data.datamodule import FederatedDataModule
from fl_lightning.fit.fit_lifecycle import FitLifecycle
from fl_lightning.fit.loaders import AttachedData
from fl_lightning.fit.state_callback import FederatedState
from fl_lightning.lightning.fit_description import FitDescription
from fl_lightning.lightning.single_device import OneDevice

_Init = TypeVar("_Init", bound=Callable[..., None])
_Strategy = TypeVar("_Strategy", bound="ReadableStrategy")


def remembered(init: _Init) -> _Init:
    """A constructor that keeps its arguments; those of a subclass count, if it has a constructor of its own."""

    @wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault("_arguments", (args, kwargs))
        init(self, *args, **kwargs)

    return cast("_Init", wrapper)


class ReadableStrategy(OneDevice):
    """A strategy that knows the arguments it was made with; copies have these alone."""

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _fits: FitLifecycle
    _state: FederatedState
    _data: AttachedData

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            setattr(cls, "__init__", remembered(vars(cls)["__init__"]))  # noqa: B010

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies have the arguments, not the fits.

        Libraries save the arguments of their Trainer as hyperparameters, so that every checkpoint holds the strategy.
        """
        return made, (type(self), *self._arguments)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the constructor was called with, by name."""
        args, kwargs = self._arguments
        return {**dict(zip(signature(type(self)).parameters, args, strict=False)), **kwargs}

    def with_arguments(self: _Strategy, **changes: Any) -> _Strategy:
        """A new strategy of this class with the same arguments but those named here.

        Nothing is shared: the method and other objects among the arguments are copied.

        Args:
            **changes: arguments of the constructor.

        Raises:
            TypeError: the constructor does not take such an argument, or not such a value.
            ValueError: an argument is out of range.
        """
        return type(self)(**{**deepcopy(dict(self.arguments)), **changes})

    @property
    def last_round(self) -> RoundRecord | None:
        """What the last finished round did."""
        return self._fits.last_round

    @property
    def last_evaluation(self) -> EvaluationRecord | None:
        """Per-client values of the last validation or test; None if it ran on data that is not divided."""
        return self._state.record

    @property
    def fit_description(self) -> FitDescription | None:
        """The running or last fit as checkpoints describe it, to be compared with another one."""
        return self._fits.description

    @property
    def memory_plan(self) -> Mapping[str, int]:
        """What the running or last fit allocates beside the module, in bytes by name; empty before the first."""
        return self._fits.memory

    @property
    def executor_fallback(self) -> str | None:
        """Why the running or last fit could not use ``executor`` and trains clients sequentially, or ``None``."""
        return self._fits.executor_fallback

    @property
    def federated_data(self) -> FederatedDataModule | None:
        """The data as ``partition`` divided it; ``None`` before that, and for data that is wrapped."""
        return self._data.data


def made(kind: type[ReadableStrategy], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReadableStrategy:
    """The strategy of a pickle: a function with a name, because YAML writes calls of these only."""
    return kind(*args, **kwargs)
