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

from fl_lightning.clients.client_hooks import ClientHooks
from fl_lightning.clients.fast_sgd import FastSGD
from fl_lightning.clients.local_training import EagerGradients, LossGradients
from fl_lightning.clients.module_calls import ModuleCalls
from fl_lightning.clients.planned.plan import Plan
from fl_lightning.clients.planned.program import CannotPlanError
from fl_lightning.core.modules import submodules
from fl_lightning.lightning.fast_log import TrainingLog
from fl_lightning.lightning.module_steps import loss_of
from fl_lightning.lightning.names import LightningModule, rank_zero_info

_SHAPES = 8
"""Shapes of batches with plans. Where clients differ in size, so do last batches: most stay eager."""
_PLANS = 8
"""Plans of one shape: as many as TorchDynamo makes of a function before it refuses more. Then they start anew."""
_WORTH = 50
"""Steps of a shape for which it may have one more plan."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PlannedGradients(LossGradients):
    """Takes the place of :class:`EagerGradients`, and calls it where there is no plan.

    Attributes:
        reason: why nothing is planned any more, to complete "eager, because ..."; ``None`` while there is none.
        planned: steps from plans so far.
        announce: told what is planned and what is not.
    """

    def __init__(
        self, calls: ModuleCalls, hooks: ClientHooks, eager: EagerGradients, parameters: Sequence[nn.Parameter]
    ) -> None:
        # Autograd looks for devices before TorchDynamo makes it see some that the machine does not have. It would start
        # a thread for each, and a process with such threads cannot be copied into workers that train.
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        self._given, self._eager, self._parameters = (calls, hooks), eager, parameters
        self._module, self._log = calls.module, _StepLog(calls.module)
        self._shapes: dict[Any, _Guarded] = {}
        self._hooked: str | None = None
        self.reason: str | None = None
        self.planned = 0
        self.announce: Callable[[str], None] = rank_zero_info

    def take_optimizer(self, optimizer: FastSGD) -> None:
        """Gradients are for this optimizer from now on."""
        self._eager.take_optimizer(optimizer)

    def begin_visit(self) -> None:
        """A client is about to train."""
        if self.reason is not None:
            return
        if self._given[1].keeps_gradients or not self._eager.optimizer.lets_go:
            self.give_up("the optimizer or the client rule may keep gradients, whose memory plans use again")
            return
        hooked, self._hooked = self._hooked, _hook_of(self._module, self._parameters)
        if self._hooked is None:
            self._log.install()
        elif self._hooked != hooked:
            self.announce(f"Local steps: eager, because {self._hooked}")

    def __call__(self, batch: Any, index: int) -> Tensor | None:
        """See :class:`fl_lightning.clients.local_training.LossGradients`."""
        if self.reason is None and self._hooked is None:
            shapes = _shapes_of(batch)
            guarded = self._shapes.get(shapes)
            if guarded is None and len(self._shapes) < _SHAPES:
                guarded = self._shapes[shapes] = _Guarded(self._parameters)
            if guarded is not None and guarded.made <= _PLANS + guarded.steps // _WORTH:
                return self._planned(guarded, shapes, batch, index)
            if guarded is not None and guarded.plans:
                guarded.plans = []
                self.announce(f"Local steps: eager for {_words(shapes)}, because what they read changes too often")
        return self._eager(batch, index)

    def _planned(self, guarded: _Guarded, shapes: Any, batch: Any, index: int) -> Tensor | None:
        log, made = self._log, guarded.made
        log.records.clear()
        log.notes = True
        try:
            loss: Tensor | None = guarded(batch, index, log.records, *self._given)
        except Exception as error:
            if guarded.ran is not None:
                raise  # as it would without a plan
            self.give_up(_reason_of(error))
            return self._eager(batch, index)
        finally:
            log.notes = False
        plan = guarded.ran
        if plan is None:  # the step computes nothing, or TorchDynamo is switched off
            loss = self._eager.differentiate(loss)
        else:
            for parameter, gradient in zip(self._parameters, plan.gradients, strict=True):
                if parameter.grad is not gradient:
                    parameter.grad = gradient
            if plan.wrong is not None:
                self.give_up(plan.wrong)
            elif guarded.made > made:
                self.announce(f"Local steps: planned for {_words(shapes)}, {plan.size} operations each")
            self.planned += guarded.made == made
        for name, value, args, kwargs in log.records:
            log.to(name, value, *args, **kwargs)
        return loss

    def give_up(self, reason: str) -> None:
        """Plans nothing any more."""
        self.reason = reason
        self.announce(f"Local steps: eager from now on, because {reason}")

    @property
    def used(self) -> list[Plan]:
        """The plans that have been used since the last check."""
        return [plan for guarded in self._shapes.values() for plan in guarded.plans if plan.last is not None]

    def check(self) -> None:
        """Compares them with PyTorch, on their last batches; changes nothing.

        Raises:
            ValueError: the steps since then cannot be trusted.
        """
        for plan in self.used:
            last, plan.last = plan.last or (), None
            plan.compare(last, keep=False)
            if plan.wrong is not None:
                raise ValueError(f"planned_steps must be left out of this fit, because {plan.wrong}")


class _StepLog:
    """Shadows a module's ``log`` for a whole visit: notes calls, to pass them on later, or passes them on at once.

    TorchDynamo checks a module whose attributes change in every step much more slowly.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module, self._shadow = module, _noting(self)
        self.records: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.notes = False
        self.to: Callable[..., None] = module.log

    def install(self) -> None:
        attributes = vars(self._module)
        present = attributes.get("log", self._module.log)
        if present is not self._shadow:
            self.to, attributes["log"] = present, self._shadow


def _noting(log: _StepLog) -> Callable[..., None]:
    def note(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if log.notes:
            # A copy, as Lightning makes one: the rest of the step may write into what was logged.
            log.records.append((name, value.detach().clone() if isinstance(value, Tensor) else value, args, kwargs))
        else:
            log.to(name, value, *args, **kwargs)

    return note


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
        if self._compiled is None or len(self.plans) >= _PLANS:
            # TorchDynamo keeps what it compiles by code object, and for ever: a copy for each use, which holds no plan.
            owner: Any = ref(self)
            own = FunctionType(_loss_of_batch.__code__.replace(), _loss_of_batch.__globals__)
            backend = lambda *found: owner()._plan(*found)  # noqa: E731 (a method would keep its object)
            self._compiled, self.plans = torch.compile(own, backend=backend, fullgraph=True, dynamic=False), []
        return self._compiled(*args)

    def _plan(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Sequence[Tensor]]:
        self.made += 1
        try:
            plan = Plan(graph, inputs, self._parameters)
        except CannotPlanError:
            raise
        except Exception as error:
            raise CannotPlanError(f"it cannot be recorded: {type(error).__name__}: {_first_line(error)}") from error
        self.plans.append(plan)
        owner: Any = ref(self)
        kept: Any = ref(plan)

        def run(*given: Tensor) -> Sequence[Tensor]:
            owner().ran = kept()
            returned: Sequence[Tensor] = kept()(*given)
            return returned

        return run


def _loss_of_batch(batch: Any, index: int, records: list[Any], calls: ModuleCalls, hooks: ClientHooks) -> Tensor | None:
    loss = loss_of(calls.training_output(batch, index))
    return loss if loss is None else hooks.add_loss_term(loss, batch)


def _shapes_of(batch: Any) -> Any:
    """The shapes of a batch's tensors, as a key; whatever else is in a batch is left to the guards."""
    if isinstance(batch, (list, tuple)):
        return tuple([part.shape if isinstance(part, Tensor) else _shapes_of(part) for part in batch])
    if isinstance(batch, Tensor):
        return batch.shape
    return _shapes_of(list(batch.values())) if isinstance(batch, Mapping) else None


def _words(shapes: Any) -> str:
    return f"batches of {shapes}".replace("torch.Size(", "").replace(")", "").replace("(", "")


def _hook_of(module: LightningModule, parameters: Sequence[nn.Parameter]) -> str | None:
    """The first code in words that would run in a step without being seen by TorchDynamo; a plan runs none."""
    if any(getattr(torch_modules, f"_global{name}") for name in _HOOKS):
        return "hooks are registered for all modules"
    log = vars(module).get("log")
    if isinstance(log, TrainingLog) and not log.is_lightnings:
        return "self.log is the module's own, and might change what the rest of a step reads"
    for name, part in submodules(module):
        if any(vars(part).get(kind) for kind in _HOOKS):
            return f"{name or type(module).__name__} has hooks"
    hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
    return "parameters have hooks" if hooked else None


def _reason_of(error: BaseException) -> str:
    """Completes "eager, because ...", from what a call through TorchDynamo raised; its causes are looked through."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CannotPlanError):
            return str(cause)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return f"TorchDynamo cannot follow training_step: {_first_line(error) or type(error).__name__}"


def _first_line(error: BaseException) -> str:
    return next((line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()), "")
