# SPDX-License-Identifier: Apache-2.0
"""The protocol between a fit and the two halves of a method: client rules and server rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs, Reads, State, StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import LayerSpec, ParamLayout
from fl_lightning.core.model_snapshot import ModelPart, Snapshot
from fl_lightning.lightning.fit_description import constructor_arguments


class ClientRule:
    """The client's half of a method. The base class is plain local training; override what the method changes.

    State that lasts from round to round belongs in the rule, keyed by client id. It changes in :meth:`commit` and
    :meth:`keep` only, so that a round either happened as a whole or not at all. In a real federation the server and
    every client have a rule object each, so a rule with state says where each piece of it lives:

    - :meth:`broadcast`: the server's, sent to every client of a round (SCAFFOLD's ``c``, class prototypes);
    - :meth:`state_for`: the server's about one client, sent to that client alone (SCAFFOLD's ``c_i``);
    - :attr:`ClientReport.kept` and :meth:`keep`: stays at the client (personal models, last local models).

    What a client sends up is its report.

    Attributes:
        needs: what local training must carry.
        reads: what :meth:`adjust_step` and :meth:`commit` read of the clients' rows for the sake of all. What a client
            keeps of its own row is its own and does not count. A class that overrides one of the two without saying
            what they read counts as ``"rows"``.
        placement: as in :class:`ServerRule`.
        column_state: as in :class:`ServerRule`, for what :meth:`adjust_step` and :meth:`commit` do; names of entries of
            :meth:`broadcast` and :meth:`state_for` belong here, too. A class that overrides one of these methods or
            :meth:`state_dict` without saying it counts as ``None``.
        undefined_extras: names of extras in which NaN stands for something undefined. A report with NaN in others, or
            with infinity, counts as one whose update is not finite.
        own_work: what the rule computes of losses by itself, without Lightning's hooks; the fit names those left out.
    """

    needs: Needs = Needs()
    reads: Reads = "sums"
    placement: tuple[str, ...] = ()
    column_state: tuple[str, ...] | None = ()
    undefined_extras: tuple[str, ...] = ()
    own_work: Literal["none", "gradients", "steps"] = "none"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).keys()  # what a class does not say is not known
        if {"adjust_step", "commit"} & own and "reads" not in own:
            cls.reads = "rows"
        if {"adjust_step", "commit", "broadcast", "state_for", "state_dict"} & own and "column_state" not in own:
            cls.column_state = None

    def hyperparameters(self) -> dict[str, Any]:
        """See :meth:`ServerRule.hyperparameters`."""
        return constructor_arguments(self, self.placement)

    def overrides(self, *names: str) -> bool:
        """Whether the rule replaces any of these methods of plain local training.

        Args:
            names: names of methods or attributes of :class:`ClientRule`; none stands for all of them, so that
                ``rule.overrides()`` tells whether the rule changes anything.
        """
        names = names or tuple(name for name in vars(ClientRule) if not name.startswith("_"))
        return any(getattr(type(self), name) is not getattr(ClientRule, name) for name in names)

    def obstacle(self) -> str | None:
        """Why clients cannot train in other processes or on other machines, as a sentence; ``None`` if they can.

        A class that defines ``commit`` or ``state_dict`` has state, perhaps more than its base class speaks of: it also
        defines one of ``broadcast``, ``state_for`` and ``keep``, if only to say that a visit needs nothing of it.
        """
        for kind in type(self).__mro__[: type(self).__mro__.index(ClientRule)]:
            if vars(kind).keys() & {"broadcast", "state_for", "keep"}:
                return None
            found = [name for name in ("commit", "state_dict") if name in vars(kind)]
            if found:
                return (
                    f"{kind.__name__} has a {found[0]} and does not say where its state lives: define broadcast, "
                    "state_for or keep"
                )
        return None

    def refusal(self, server: ServerRule) -> str | None:
        """Why this half makes no sense under a server rule, as a sentence that begins with a verb, or ``None``."""
        return None

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Raises ValueError, before the first round, if the module, trained as laid out, lacks what no need names."""

    def begin_fit(self, federation: Federation) -> None:
        """Called before the first round of a fit, after :meth:`load_state_dict` if the fit is resumed."""

    def begin_client(self, work: LocalWork) -> None:
        """Called with the parameters at the global model, before the first local step.

        Where clients upload full gradients there are no local steps; the module is in eval mode and logs nothing.
        """

    def begin_batch(self, work: LocalWork, batch: Any, batch_idx: int) -> None:
        """Called before the module sees a batch, with the client's present parameters.

        Args:
            work: the client's work.
            batch: the batch, on its device.
            batch_idx: its place in this pass over the client's data; every pass begins at 0.
        """

    def loss_weight(self, work: LocalWork) -> float:
        """Factor of the module's own loss; 1 unless the method weighs it against its term."""
        return 1.0

    def shape_loss(self, work: LocalWork, loss: Tensor) -> Tensor:
        """What takes the place of the module's loss of a batch, as a function of it; the loss itself unless changed.

        :meth:`loss_weight` and :meth:`loss_term` apply to what is returned.
        """
        return loss

    def loss_term(self, work: LocalWork, batch: Any, batch_idx: int) -> Tensor | None:
        """A differentiable scalar added to the loss of a batch, or ``None``."""
        return None

    def correct_gradients(self, work: LocalWork) -> None:
        """Changes ``parameter.grad`` in place before each optimizer step (and before gradient clipping)."""

    def end_client(self, work: LocalWork) -> ClientReport:
        """Called after the last local step, with the client's trained parameters.

        Where clients upload full gradients these are the global ones still.
        """
        return ClientReport()

    def adjust_step(self, cohort: Cohort, step: Tensor) -> Tensor:
        """The server's step ``[n]`` with what the method adds to a mean of updates; changes nothing else.

        Called after ``aggregate`` of whichever server rule it is paired with, before :meth:`commit`.
        """
        return step

    def commit(self, cohort: Cohort) -> None:
        """The round happened: update what the server keeps from the reports that arrived."""

    def scalars(self) -> Mapping[str, float]:
        """Numbers worth logging of the round that :meth:`commit` was called for."""
        return {}

    def keep(self, client_id: int, kept: State, when: int) -> None:
        """The client's report entered the step of round ``when``: what it kept of its visit replaces what it had.

        Called after :meth:`commit` in a simulation, and before the client's next visit in a real federation, where the
        client does not hear earlier whether its report counted. Not called for a report that kept nothing.
        """

    def broadcast(self) -> State:
        """What the server sends to every client of a round; not copied."""
        return {}

    def take_broadcast(self, state: State) -> None:
        """At a client: takes what :meth:`broadcast` returned at the server."""

    def state_for(self, client_id: int) -> State:
        """What the server keeps for one client and sends to that client alone; not copied."""
        return {}

    def take_state(self, client_id: int, state: State) -> None:
        """At a client: takes what :meth:`state_for` returned at the server."""

    def personal_model(self, client_id: int) -> Snapshot | ModelPart | None:
        """The client's own model, to be evaluated on its data beside the global one; ``None`` if it has none.

        What a part of a model lacks comes from the global one.
        """
        return None

    def personal_models(self, state: State) -> Callable[[int], Snapshot | ModelPart | None]:
        """:meth:`personal_model` as it was when :meth:`state_dict` returned this state; the rule stays as it is."""
        other = deepcopy(self)
        other.load_state_dict(state)
        return other.personal_model

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes that the rule will hold at most, by name, for the memory plan printed at the start."""
        return {}

    def reset(self) -> None:
        """Forgets everything; called at a fresh fit."""

    def state_dict(self) -> State:
        """State for the checkpoint."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""


class ServerRule(ABC):
    """The server's half of a method: a cohort goes in, a step comes out.

    Attributes:
        needs: what the cohort must carry.
        reads: what :meth:`aggregate` reads of the clients' rows. A class that overrides an ``aggregate`` without saying
            what its own reads counts as ``"rows"``.
        placement: names of constructor arguments that say where things are kept and change no result.
        column_state: the rule works on any run of the columns: it takes sums over columns from the cohort's
            :class:`UpdateMatrix`, and everything else that it does to parameters, rows and steps treats each column
            alike. Several processes can then share the columns. The tuple names the entries of :meth:`state_dict` that
            hold tensors with one number per column in their last dimension (``"momentum"``, ``"history.rows"`` for an
            entry of an entry), or lists or dicts of such tensors. ``None``: every process needs whole rows. A class
            that overrides :meth:`aggregate`, :meth:`evaluation_params` or :meth:`state_dict` without saying it counts
            as ``None``.
        layers: the layers that the rule works on; the strategy lays out the parameters accordingly.
        averages: the step is a mean of the rows, whatever its weights, so that client halves may add to it.
        report: how the last step came about.
    """

    needs: Needs = Needs()
    reads: Reads = "rows"
    placement: tuple[str, ...] = ()
    column_state: tuple[str, ...] | None = None
    layers: LayerSpec = "module"
    averages: bool = False
    report: StepReport = StepReport()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited = getattr(cls.__mro__[1], "aggregate", None)
        first = getattr(inherited, "__isabstractmethod__", False)  # what the base class says is then meant for it
        own = vars(cls).keys()
        if "aggregate" in own and "reads" not in own and not first:
            cls.reads = "rows"
        if {"aggregate", "evaluation_params", "state_dict"} & own and "column_state" not in own:
            cls.column_state = None

    def hyperparameters(self) -> dict[str, Any]:
        """The constructor's arguments that shape results, by name, as numbers, strings and lists of them.

        A rule keeps each of its arguments in a public attribute of the same name; arguments that it does not keep are
        left out, and so are those of :attr:`placement`.
        """
        return constructor_arguments(self, self.placement)

    @abstractmethod
    def aggregate(self, cohort: Cohort) -> Tensor:
        """Turns the cohort into a step ``[n]``; the new parameters are ``params - step``.

        May update the rule's state: the strategy applies the step right after, or takes the rule back
        (:meth:`tentatively`). Sets :attr:`report`.
        """

    def tentatively(self) -> Callable[[bool], None]:
        """Called before :meth:`aggregate`; what is returned is called after it, with whether the step was applied.

        If it was not, the rule must become what it was. Here that is a copy of :meth:`state_dict`: a rule with large
        state that :meth:`aggregate` does not change in place can do it for less.
        """
        before = deepcopy(self.state_dict())

        def settle(happened: bool) -> None:
            if not happened:
                self.load_state_dict(before)

        return settle

    def client_rule(self) -> ClientRule:
        """The method's client half; plain local training unless the method says otherwise."""
        return ClientRule()

    def begin_fit(self, federation: Federation) -> None:
        """Called before the first round of a fit, after :meth:`load_state_dict` if the fit is resumed."""

    def end_fit(self) -> str | None:
        """Called when all rounds of a fit are over; returns a line to print, if there is something to say."""
        return None

    def evaluation_params(self, params: Tensor) -> Tensor:
        """The parameters to evaluate, ``[n]``; the global ones unless the method averages iterates."""
        return params

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes that the rule will hold at most, by name, for the memory plan printed at the start."""
        return {}

    def reset(self) -> None:
        """Forgets everything; called at a fresh fit."""

    def state_dict(self) -> State:
        """State for the checkpoint."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores what :meth:`state_dict` returned."""
