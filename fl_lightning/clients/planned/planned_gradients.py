# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of local steps, from plans with the same bits where they can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from fl_lightning.clients.local_training import EagerGradients, LossGradients
from fl_lightning.clients.planned.plan import CannotPlanError, Plan
from fl_lightning.core.modules import submodules
from fl_lightning.lightning.fast_log import TrainingLog
from fl_lightning.lightning.names import LightningModule, rank_zero_info

_MOST = 8
"""Shapes of batches with plans: where clients differ in size, so do last batches, and most of these stay eager. And
plans of a shape: as many as TorchDynamo makes of a function before it refuses more. Then they start anew."""
_WORTH = 50
"""Steps of a shape for which it may have one more plan."""


class PlannedGradients(LossGradients):
    """Takes the place of :class:`EagerGradients`, and calls it where there is no plan."""

    def __init__(self, eager: EagerGradients, parameters: Sequence[nn.Parameter]) -> None:
        # Autograd looks for devices before TorchDynamo makes it see some that the machine does not have. It would start
        # a thread for each, and a process with such threads cannot be copied into workers that train.
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        self._eager, self._parameters, self.optimizer = eager, parameters, eager.optimizer
        self._log, self._shapes = _StepLog(eager.calls.module), dict[Any, _Guarded]()
        self.reason: str | None = None  # why nothing is planned any more, to complete "eager, because ..."
        self.planned = 0  # steps from plans so far
        self.announce: Callable[[str], None] = rank_zero_info

    def begin_visit(self) -> None:
        """A client is about to train."""
        if self.reason is None and (reason := _reason_against(self._eager, self._parameters)):
            self.give_up(reason)
        elif self.reason is None:
            self._log.install()

    def __call__(self, batch: Any, index: int) -> Tensor | None:
        """See :class:`LossGradients`."""
        guarded = self._guarded(_shapes_of(batch)) if self.reason is None else None
        if guarded is None:
            return self._eager(batch, index)
        log, made = self._log, guarded.made
        log.records, log.notes = [], True
        try:
            loss: Tensor | None = guarded(self._eager, batch, index)
        except Exception as error:
            if guarded.ran is not None:
                raise  # as it would without a plan
            self.give_up(_reason_of(error))
        finally:
            log.notes = False
        if self.reason is not None:
            return self._eager(batch, index)
        if (plan := guarded.ran) is None:  # the step computes nothing, or TorchDynamo is switched off
            loss = self._eager.differentiate(loss)
        else:
            for parameter, gradient in zip(self._parameters, plan.gradients, strict=True):
                parameter.grad = gradient
            self.planned += guarded.made == made
            if guarded.made > made:
                self.announce(f"Local steps: planned for {_words(_shapes_of(batch))}")
        for name, value, args, kwargs in log.records:
            log.to(name, value, *args, **kwargs)
        return loss

    def _guarded(self, shapes: Any) -> _Guarded | None:
        """What computes steps on batches of some shapes; ``None`` if they are eager."""
        found = self._shapes.get(shapes)
        if found is None and len(self._shapes) < _MOST:
            found = self._shapes[shapes] = _Guarded(self._parameters)
        if found is None or found.made <= _MOST + found.steps // _WORTH:
            return found
        if found.plans:
            found.plans = []
            self.announce(f"Local steps: eager for {_words(shapes)}, because what they read changes too often")
        return None

    def give_up(self, reason: str) -> None:
        """Plans nothing any more."""
        self.reason = reason
        self.announce(f"Local steps: eager from now on, because {reason}")

    @property
    def used(self) -> list[Plan]:
        """The plans that have been used since the last check."""
        return [plan for guarded in self._shapes.values() for plan in guarded.plans if plan.last is not None]

    def check(self) -> None:
        """Compares them with PyTorch, on their last batches; changes nothing. A ValueError says if they were wrong."""
        try:
            for plan in self.used:
                plan.compare()
        except CannotPlanError as wrong:
            raise ValueError(f"planned_steps must be left out of this fit, because {wrong}") from None


class _StepLog:
    """Shadows a module's ``log`` for a whole visit: notes calls, to pass them on later, or passes them on at once.

    TorchDynamo checks a module whose attributes change in every step much more slowly.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self.notes = module, False
        self.records: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.to: Callable[..., None] = module.log

    def install(self) -> None:
        attributes = vars(self._module)
        if attributes.get("log") is not self:
            self.to, attributes["log"] = self._module.log, self

    def __call__(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self.notes:
            # A copy, as Lightning makes one: the rest of the step may write into what was logged.
            self.records.append((name, value.detach().clone() if isinstance(value, Tensor) else value, args, kwargs))
        else:
            self.to(name, value, *args, **kwargs)


class _Guarded:
    """Calls ``training_step`` through TorchDynamo, with plans in the place of its graphs."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._compiled: Any = None
        self.plans: list[Plan] = []  # in use
        self.ran: Plan | None = None  # in the last call
        self.made = self.steps = 0  # plans and calls so far

    def __call__(self, *args: Any) -> Any:
        self.ran, self.steps = None, self.steps + 1
        if self._compiled is None or len(self.plans) >= _MOST:
            # TorchDynamo keeps what it compiles by code object, and for ever: a copy for each use, which holds no plan.
            owner: Any = ref(self)
            own = FunctionType(EagerGradients.loss.__code__.replace(), EagerGradients.loss.__globals__)
            backend = lambda *found: owner()._plan(*found)  # noqa: E731 (a method would keep its object)
            self._compiled, self.plans = torch.compile(own, backend=backend, fullgraph=True, dynamic=False), []
        return self._compiled(*args)

    def _plan(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.made += 1
        self.plans.append(Plan(graph, inputs, self._parameters))
        owner: Any = ref(self)
        kept: Any = ref(self.plans[-1])

        def run(*given: Tensor) -> Any:
            plan = owner().ran = kept()
            return plan(*given)

        return run


def _shapes_of(batch: Any) -> Any:
    """The shapes of a batch's tensors, as a key; whatever else is in a batch is left to the guards."""
    if isinstance(batch, Tensor):
        return batch.shape
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return tuple(map(_shapes_of, parts))


def _words(shapes: Any) -> str:
    return f"batches of {shapes}".replace("torch.Size(", "").replace(")", "").replace("(", "")


def _reason_against(eager: EagerGradients, parameters: Sequence[nn.Parameter]) -> str | None:
    """Code, in words, that reads what plans write over, or runs in a step without being seen by TorchDynamo."""
    module = eager.calls.module
    if eager.hooks.keeps_gradients or not eager.optimizer.lets_go:
        return "the optimizer or the client rule may keep gradients, whose memory plans use again"
    if any(value for name, value in vars(torch_modules).items() if name.startswith("_global") and "_hooks" in name):
        return "hooks are registered for all modules"
    log = vars(module).get("log")
    if isinstance(log, TrainingLog) and not log.is_lightnings:
        return "self.log is the module's own, and might change what the rest of a step reads"
    for name, part in submodules(module):
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return f"{name or type(module).__name__} has hooks"
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    return "parameters have hooks" if hooked else None


def _reason_of(error: BaseException) -> str:
    """Completes "eager, because ...", from what a call through TorchDynamo raised; its causes are looked through."""
    found = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(found).splitlines() if line.strip()] or [type(found).__name__]
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, CannotPlanError):
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return str(cause or f"TorchDynamo cannot follow training_step: {lines[0].rstrip('.')}")
