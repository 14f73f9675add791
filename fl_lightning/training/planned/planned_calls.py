# SPDX-License-Identifier: Apache-2.0
"""What is computed of a batch, from plans with the same bits: when to plan, what to check, when to give up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from fl_lightning.core.lightning.fast_log import TrainingLog
from fl_lightning.core.lightning.names import LightningModule, rank_zero_info
from fl_lightning.core.modules import submodules
from fl_lightning.training.planned.capture import Captured, guarded
from fl_lightning.training.planned.direct import DirectCall, direct_call, tensors_of
from fl_lightning.training.planned.plan import Plan
from fl_lightning.training.planned.reasons import reason_of
from fl_lightning.training.planned.results import Results
from fl_lightning.training.planned.step_log import StepLog
from fl_lightning.training.planned.trace import CannotPlanError, failed

_SHAPES = 8
"""Shapes of batches with plans of their own. Where clients differ in size, so do last batches: most stay eager."""

_MOVES = 20
"""Programs that a plan may take: writing one down takes as long as some dozen small steps."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PlannedCalls:
    """Computes the loss of a batch from a plan where it can, and without where it cannot.

    A plan's first results, and its last ones of every round, are compared with PyTorch's bit for bit: loss, gradients,
    buffers, what is logged, and the state of the random generator.

    Args:
        what: is computed, in the plural, for messages.
        module: the module that computes it.
        function: gives the loss: a function of the batch, its index, a list for records, and ``given``.
        given: further arguments of the function, always the same.
        eager: computes what is not planned, and leaves its gradients in the parameters.
        parameters: gradients are wanted of; none: the loss alone is wanted.
        patience: batches of one shape before one is planned. Tracing takes as long as some hundred small steps.
        fresh_gradients: see :func:`~fl_lightning.training.planned.program.program_of`.

    Attributes:
        reason: why nothing is planned any more, to complete "eager, because ..."; ``None`` while there is none.
        planned: batches from plans so far.
        announce: told what is planned and what is not.
    """

    def __init__(
        self,
        what: str,
        module: LightningModule,
        function: Callable[..., Tensor | None],
        given: tuple[Any, ...],
        eager: Callable[[Any, int], Tensor | None],
        parameters: Sequence[nn.Parameter],
        patience: int,
        fresh_gradients: bool = False,
    ) -> None:
        self._what, self._module, self._eager, self._given = what, module, eager, given
        self._parameters, self._patience, self._fresh = parameters, patience, fresh_gradients
        self._seen: Counter[Any] = Counter()
        self._shapes: set[Any] = set()
        self._shape: Any = None
        self._last: dict[Any, tuple[Plan, Any, int]] = {}
        self._plan: Plan | None = None
        self._steady = False
        self._once: dict[Any, Plan] = {}
        self._direct: dict[Any, DirectCall] = {}
        self._checking = False
        self._wrong: str | None = None
        self._plans: list[Plan] = []
        self._log = StepLog(module)
        self._function = guarded(function, "batch", "records", self._build)
        self._hooked: str | None = None
        self.reason: str | None = None
        self.planned = 0
        self.announce: Callable[[str], None] = rank_zero_info

    def begin_visit(self, steady: bool = False) -> None:
        """A client's batches are about to come.

        Args:
            steady: between them, nothing runs but code of this library and of PyTorch, and all that it changes of what
                Python can read changes with every batch: counters. Guards compare for equality. Where they have held
                for two batches, what is computed reads none of it, and they hold for the others.
        """
        self._direct.clear()
        self._once.clear()
        self._steady = steady
        if self.reason is None:
            found = _hook_of(self._module, self._parameters)
            if found is not None and found != self._hooked:
                self.announce(f"{self._what}: eager, because {found}")
            self._hooked = found
            if found is None:
                self._log.install()

    def end_steady(self) -> None:
        """More is about to change than counters: guards are checked again."""
        self._direct.clear()
        self._steady = False

    def __call__(self, batch: Any, index: int) -> Tensor | None:
        """The loss of a batch, detached; ``None`` if there is none.

        Args:
            batch: on the module's device.
            index: its place.
        """
        if self.reason is None and self._hooked is None:
            shapes = self._shape = _shapes_of(batch)
            direct = self._direct.get(shapes)
            if direct is not None:
                return self._directly(direct, batch, index)
            if shapes in self._shapes or self._begins(shapes):
                return self._from_plan(batch, index)
        return self._eager(batch, index)

    def _begins(self, shapes: Any) -> bool:
        """Whether batches of these shapes are planned from now on."""
        self._seen[shapes] += 1
        begins = self._seen[shapes] > self._patience and len(self._shapes) < _SHAPES
        if begins:
            self._shapes.add(shapes)
        return begins

    def _from_plan(self, batch: Any, index: int) -> Tensor | None:
        loss: Tensor | None = None
        try:
            loss = self._called(batch, index)
        except Exception as error:
            if self._plan is not None and not isinstance(error, CannotPlanError):
                raise  # as it would without a plan
            self.give_up(reason_of(error))
        plan = self._plan
        if plan is None:
            self.give_up("TorchDynamo leaves it alone")
        if plan is None or loss is None:
            return self._eager(batch, index)
        if not plan.verified:
            return self._verified(plan, loss, batch, index)
        if plan.moves > _MOVES:
            self.give_up("tensors that it reads lie elsewhere again and again")
        if self._steady:
            self._pass_guards(plan, loss, batch)
        self._ended(plan, plan.gradients, batch, index)
        return loss

    def _pass_guards(self, plan: Plan, loss: Tensor, batch: Any) -> None:
        """Guards have held for a batch of a steady visit: if they did for one before, they are not checked again."""
        tensors, shape = tensors_of(batch), self._shape
        if self._once.get(shape) is not plan:
            self._once[shape] = plan
        elif tensors is not None:
            direct = direct_call(plan, tensors, loss, self._log.records)
            if direct is not None:
                self._direct[shape] = direct

    def _directly(self, direct: DirectCall, batch: Any, index: int) -> Tensor:
        """The loss without a look at the guards."""
        tensors, records = tensors_of(batch), self._log.records
        assert tensors is not None
        records.clear()
        loss, gradients = direct(tensors, records)
        self._ended(direct.plan, gradients, batch, index)
        return loss

    def _ended(self, plan: Plan, gradients: Sequence[Tensor | None], batch: Any, index: int) -> None:
        self.planned += 1
        self._last[self._shape] = plan, batch, index
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self._log.replay()

    def _called(self, batch: Any, index: int) -> Tensor | None:
        """Calls the function under its guards: says by ``_plan`` which plan ran, and by records what was logged."""
        log, self._plan = self._log, None
        log.begin(passes=False)
        try:
            loss: Tensor | None = self._function(batch, index, log.records, *self._given)
        finally:
            log.end()
        return loss

    def _build(self, captured: Captured) -> Plan:
        if self._checking:
            raise CannotPlanError("a check plans nothing new")
        try:
            return Plan(captured, self._parameters, self._fresh, self._ran)
        except CannotPlanError:
            raise
        except Exception as error:
            raise failed("its trace fails", error) from error

    def _ran(self, plan: Plan) -> None:
        self._plan = plan

    def give_up(self, reason: str) -> None:
        """Plans nothing any more.

        Args:
            reason: completes "eager, because ...".
        """
        if self.reason is None:
            self.reason = reason
            self.announce(f"{self._what}: eager from now on, because {reason}")

    # ---- checks

    def check(self) -> str | None:
        """Compares what plans and PyTorch give once more, on the last batches since the last check.

        The module must be as it was in the last visit. Its gradients are others afterwards.

        Returns:
            Why the steps since then cannot be trusted; ``None`` if all is well.
        """
        last, self._last = self._last, {}
        self._checking = True
        for plan in self._plans:
            plan.verified = False
        try:
            with self._log.installed(_unheard):
                for plan, batch, index in last.values() if self._wrong is None else ():
                    loss: Tensor | None = None
                    with suppress(Exception):
                        loss = self._called(batch, index)
                    ran = self._plan
                    # Where guards found something else than in the visit, the plan is compared when it is used again.
                    if ran is plan and loss is not None:
                        self._verified(plan, loss, batch, index)
                    if ran is not None:
                        ran.undo()  # tensors that are neither parameters nor buffers come back by nothing else
        finally:
            self._checking = False
        wrong, self._wrong = self._wrong, None
        return wrong

    @property
    def used(self) -> bool:
        """Whether plans have been used since the last check."""
        return bool(self._last)

    def _verified(self, plan: Plan, loss: Tensor, batch: Any, index: int) -> Tensor | None:
        """Computes once more without the plan, compares, and goes on with what PyTorch gives."""
        planned = Results.of(loss, plan.gradients, plan.held, self._log.records)
        plan.undo(again=self._checking)
        self._log.begin(passes=True)
        try:
            eager = self._eager(batch, index)
        finally:
            self._log.end()
        gradients = [parameter.grad for parameter in self._parameters]
        difference = planned.difference(Results.of(eager, gradients, plan.held, self._log.records))
        if difference is not None:
            self._wrong = f"{difference} from a plan would differ from PyTorch's"
            self.give_up(self._wrong)
            return eager
        if plan not in self._plans:
            self._plans.append(plan)
            self.announce(
                f"{self._what}: planned for batches of {_words(_shapes_of(batch))}, {plan.size} operations each"
            )
        plan.verified = True
        return eager


def _unheard(*args: Any, **kwargs: Any) -> None:
    """Takes the place of ``self.log`` in checks."""


def _shapes_of(batch: Any) -> Any:
    """The shapes of a batch's tensors, as a key; whatever else is in a batch is left to the guards."""
    if isinstance(batch, (list, tuple)):
        return tuple([part.shape if isinstance(part, Tensor) else _shapes_of(part) for part in batch])
    if isinstance(batch, Tensor):
        return batch.shape
    return _shapes_of(list(batch.values())) if isinstance(batch, Mapping) else None


def _words(shapes: Any) -> str:
    if isinstance(shapes, torch.Size):
        return str(list(shapes))
    return ", ".join(_words(part) for part in shapes or ())


def _hook_of(module: nn.Module, parameters: Sequence[nn.Parameter]) -> str | None:
    """The first code that would run in a step without being seen by TorchDynamo, in words; a plan runs none."""
    if any(getattr(torch_modules, f"_global{name}") for name in _HOOKS):
        return "hooks are registered for all modules"
    log = vars(module).get("log")
    if isinstance(log, TrainingLog) and not log.is_lightnings:
        return "self.log is the module's own, and might change what the rest of a step reads"
    for name, part in submodules(module):
        attributes = vars(part)
        if any(attributes.get(kind) for kind in _HOOKS):
            return f"{name or type(module).__name__} has hooks"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
        return "parameters have hooks"
    return None
