# SPDX-License-Identifier: Apache-2.0
"""What takes the place of a captured loss: a program for the memory that its parameters and buffers lie in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from fl_lightning.training.planned.capture import Captured
from fl_lightning.training.planned.program import program_of
from fl_lightning.training.planned.results import same_bits
from fl_lightning.training.planned.run import function_of
from fl_lightning.training.planned.trace import CannotPlanError, Trace, failed, trace

_PROGRAMS = 4
"""Places in memory that a plan remembers: parameters are in one place in training, buffers may move."""


class Plan:
    """Computes a loss and its gradients from a trace; called with the inputs of what was captured.

    Args:
        captured: tensor operations of a loss and of what is logged with it.
        parameters: of the module, which gradients are wanted of; none: the loss alone is wanted.
        fresh_gradients: see :func:`~fl_lightning.training.planned.program.program_of`.
        ran: a method, told of every run.

    Attributes:
        verified: its results were compared with PyTorch's.
        gradients: of the last run, one per parameter.
        held: what the last run that was to be compared may have changed.
        program: of the last run: takes what is ``given``.
        given: what the last run took of the batch.
        returned: what the last run gave, without its gradients.
        places: of the gradients among those of a program, one per parameter; ``None`` where there is none.
        size: operations per run.
        moves: how often inputs lay where no program was for.

    Raises:
        CannotPlanError: the loss cannot be repeated from a trace.
    """

    def __init__(
        self,
        captured: Captured,
        parameters: Sequence[Tensor],
        fresh_gradients: bool,
        ran: Callable[[Plan], None],
    ) -> None:
        # TorchDynamo keeps a plan as long as the code that calls it, and whoever is told of runs keeps that code.
        self._ran = WeakMethod(ran)
        self._trace, self._fresh = _traced(captured, bool(parameters)), fresh_gradients
        inputs = captured.inputs
        self._from_batch = captured.from_batch
        self._given = sorted(captured.from_batch)
        self._held = [place for place in range(len(inputs)) if place not in captured.from_batch]
        written, own = self._trace.changed_inputs, {id(parameter) for parameter in parameters}
        # Of parameters, schemas tell whether calls write into them; of statistics they do not always.
        self._compared = [place for place in self._held if id(inputs[place]) not in own or place in written]
        if captured.from_batch.intersection(self._trace.changed_inputs):
            raise CannotPlanError("it changes its batch")
        trained = [inputs[place] for place in self._trace.trained]
        for tensor in (*trained, *(inputs[place] for place in self._trace.untouched)):
            if not any(tensor is parameter for parameter in parameters):
                raise CannotPlanError("it needs the gradient of a tensor that no optimizer holds")
        places = {id(tensor): place for place, tensor in enumerate(trained)}
        self.places = tuple([places.get(id(parameter)) for parameter in parameters])
        self._programs: dict[tuple[int, ...], Callable[..., Any]] = {}
        self.verified = False
        self.gradients: list[Tensor | None] = []
        self.held: list[Tensor] = []
        self.program: Callable[..., Any]
        self.given: list[Tensor] = []
        self.returned: Sequence[Tensor] = ()
        self._before: tuple[list[Tensor], Tensor] | None = None
        self.size = self.moves = 0

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Runs it."""
        addresses = tuple([inputs[place].data_ptr() for place in self._held])
        program = self._programs.get(addresses)
        if program is None:
            program = self._program(addresses, inputs)
        if not self.verified:
            self.held = [inputs[place] for place in self._compared]  # whatever memory they are given meanwhile
            self._before = [tensor.detach().clone() for tensor in self.held], torch.get_rng_state()
        self.program, self.given = program, [inputs[place] for place in self._given]
        told = self._ran()
        if told is not None:
            told(self)
        self.returned, found = program(*self.given)
        self.gradients = [None if place is None else found[place] for place in self.places]
        return self.returned

    def undo(self, again: bool = False) -> None:
        """Puts back what the last run has changed that was to be compared: :attr:`held`, and the random generator.

        Args:
            again: what is put back now is going to be changed and put back once more.
        """
        assert self._before is not None
        tensors, state = self._before
        for tensor, before in zip(self.held, tensors, strict=True):
            if not same_bits(tensor, before):  # what is read alone must not look as if it had been written
                tensor.detach().copy_(before)
        torch.set_rng_state(state)
        if not again:
            self._before = None

    def _program(self, addresses: tuple[int, ...], inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.moves += 1
        while len(self._programs) >= _PROGRAMS:
            del self._programs[next(iter(self._programs))]
        try:
            program = program_of(self._trace, inputs, self._from_batch, self._fresh)
            self._programs[addresses] = function_of(program)
        except CannotPlanError:
            raise
        except Exception as error:
            raise failed("what is recorded cannot be written down", error) from error
        self.size = len(program.calls)
        return self._programs[addresses]


def _traced(captured: Captured, differentiate: bool) -> Trace:
    state = torch.get_rng_state()
    try:
        return trace(captured.function, captured.inputs, differentiate)
    finally:
        torch.set_rng_state(state)
