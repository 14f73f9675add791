# SPDX-License-Identifier: Apache-2.0
"""The protocol between a fit and the two halves of a method: client rules and server rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.algorithms.records import ClientReport, Federation, LocalWork, Needs, Reads, StepReport
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import LayerSpec, ParamLayout
from fl_lightning.core.model_snapshot import ModelPart, Snapshot
from fl_lightning.core.storage import rule_state
from fl_lightning.core.storage.declared import Declared
from fl_lightning.core.taken_names import refuse_taken_names
from fl_lightning.lightning.fit_description import constructor_arguments


class ClientRule:
    """The client's half of a method. The base class is plain local training; override what the method changes.

    What lasts from round to round is declared on the class, see :mod:`fl_lightning.core.storage.declared`. It changes
    in :meth:`commit`, or by a report's :attr:`ClientReport.local_state`, so that a round either happened as a whole or
    not. In a real federation the server and every client have a rule object each, and the declarations say what goes
    from one to the other: ``server_state(sent="all")`` to every client of a round (SCAFFOLD's ``c``, class prototypes),
    ``per_client(sent="owner")`` to that client alone (SCAFFOLD's ``c_i``). What clients keep to themselves is declared
    with ``at_clients`` (personal models, last local models). What a client sends up is its report.

    Attributes:
        needs: what local training must carry.
        reads: what :meth:`adjust_step` and :meth:`commit` read of the clients' rows for the sake of all. What a client
            keeps of its own row is its own and does not count. A class that overrides one of the two without saying
            what they read counts as ``"rows"``.
        columnwise: as in :class:`ServerRule`, for what :meth:`adjust_step` and :meth:`commit` do.
        scalars: numbers worth logging of the round that :meth:`commit` was called for.
        undefined_extras: names of extras in which NaN stands for something undefined. A report with NaN in others, or
            with infinity, counts as one whose update is not finite.
        own_work: what the rule computes of losses by itself, without Lightning's hooks; the fit names those left out.
        withholds: why a client of a real federation sends nothing of what its visit leaves in attributes and metrics of
            the module; ``None``: it does.
        fewest_epochs: passes over its data without which a visit makes no sense.
    """

    needs: Needs = Needs()
    reads: Reads = "sums"
    columnwise: bool = True
    scalars: Mapping[str, float] = {}
    undefined_extras: tuple[str, ...] = ()
    own_work: Literal["none", "gradients", "steps"] = "none"
    withholds: str | None = None
    fewest_epochs: int = 1

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).keys()  # what a class does not say is not known
        if {"adjust_step", "commit"} & own:
            cls.reads = cls.reads if "reads" in own else "rows"
        rule_state.set_columnwise(cls, "adjust_step", "commit")
        refuse_taken_names(cls, ClientRule)

    def hyperparameters(self) -> dict[str, Any]:
        """See :meth:`ServerRule.hyperparameters`."""
        return constructor_arguments(self, rule_state.placement(self))

    def refusal(self, server: ServerRule) -> str | None:
        """Why this half makes no sense under a server rule, as a sentence that begins with a verb, or ``None``."""
        return None

    def check_module(self, module: nn.Module, layout: ParamLayout) -> None:
        """Raises ValueError, before the first round, if the module, trained as laid out, lacks what no need names."""

    def clients_changed(self, federation: Federation, sizes: Tensor) -> None:
        """Called before :meth:`begin_fit` of a resumed fit whose clients have joined, left, or other data.

        What the rule keeps of clients is theirs still; those that are gone are not seen. What it keeps of all together
        changes here, where it must. ``sizes [N]`` are training samples, 0 where nobody knows.
        """

    def begin_fit(self, federation: Federation) -> None:
        """Called before the first round of a fit, after what it keeps was restored if the fit is resumed."""

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

    def shape_loss(self, work: LocalWork, loss: Tensor) -> Tensor:
        """What takes the place of the module's loss of a batch, as a function of it; the loss itself unless changed.

        :meth:`loss_term` is added to what is returned.
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

    def personal_model(self, client_id: int) -> Snapshot | ModelPart | None:
        """The client's own model, to be evaluated on its data beside the global one; ``None`` if it has none.

        What a part of a model lacks comes from the global one.
        """
        return None

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes that the rule will hold at most, by name, for the memory plan: what it keeps, unless it says more."""
        return rule_state.max_nbytes(self, federation.extent(cohort_size))


def overrides(rule: ClientRule, *names: str) -> bool:
    """Whether a rule replaces any of these methods of plain local training; without names, whether anything."""
    names = names or tuple(name for name in vars(ClientRule) if not name.startswith("_"))
    return any(getattr(type(rule), name) is not getattr(ClientRule, name) for name in names)


def obstacle(rule: ClientRule) -> str | None:
    """Why clients cannot train in other processes or on other machines, as a sentence; ``None`` if they can.

    A class that defines ``commit`` keeps something, perhaps more than its base class speaks of: it declares that.
    """
    for kind in type(rule).__mro__[: type(rule).__mro__.index(ClientRule)]:
        if any(isinstance(entry, Declared) for entry in vars(kind).values()):
            return None
        if "commit" in vars(kind):
            how = "say it with server_state or per_client"
            return f"{kind.__name__} has a commit and declares nothing that it keeps: {how}"
    return None


class ServerRule(ABC):
    """The server's half of a method: a cohort goes in, a step comes out.

    Attributes:
        needs: what the cohort must carry.
        reads: what :meth:`aggregate` reads of the clients' rows. A class that overrides an ``aggregate`` without saying
            what its own reads counts as ``"rows"``.
        columnwise: the rule works on any run of the columns: it takes sums over columns from the cohort's
            :class:`UpdateMatrix`, and everything else that it does to parameters, rows and steps treats each column
            alike. Several processes can then share the columns. ``False``: every process needs whole rows. So does a
            class outside this package that overrides :meth:`aggregate` or :meth:`evaluation_params` and does not say.
        layers: the layers that the rule works on; the strategy lays out the parameters accordingly.
        averages: the step is a mean of the rows, whatever its weights, so that client halves may add to it.
        report: how the last step came about.
    """

    needs: Needs = Needs()
    reads: Reads = "rows"
    columnwise: bool = True
    layers: LayerSpec = "module"
    averages: bool = False
    report: StepReport = StepReport()
    _client: ClientRule | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        inherited = getattr(cls.__mro__[1], "aggregate", None)
        first = getattr(inherited, "__isabstractmethod__", False)  # what the base class says is then meant for it
        own = vars(cls).keys()
        if "aggregate" in own and "reads" not in own and not first:
            cls.reads = "rows"
        if "aggregate" in own and "known_weights" not in own and cls.known_weights is not ServerRule.known_weights:
            cls.known_weights = ServerRule.known_weights  # type: ignore[method-assign]
        rule_state.set_columnwise(cls, "aggregate", "evaluation_params")
        refuse_taken_names(cls, ServerRule)

    def hyperparameters(self) -> dict[str, Any]:
        """The constructor's arguments that shape results, by name, as numbers, strings and lists of them.

        A rule keeps each of its arguments in a public attribute of the same name; arguments that it does not keep are
        left out, and so are those that say where things are kept.
        """
        return constructor_arguments(self, rule_state.placement(self, self.client_rule()))

    @abstractmethod
    def aggregate(self, cohort: Cohort) -> Tensor:
        """Turns the cohort into a step ``[n]``; the new parameters are ``params - step``.

        May change what the rule keeps: the strategy applies the step right after, or takes that back. Sets
        :attr:`report`.

        Raises:
            ValueError: the cohort lacks what :attr:`needs` or the client half promises, or that is out of its range, or
                a row is not finite.
        """

    def known_weights(self, sizes: Tensor) -> Tensor | None:
        """``[m]`` weights of the updates in the step, float64; ``None`` unless training samples ``sizes [m]`` say all.

        Updates whose weights are known before they arrive can be added up as they do: nobody has to hold all of them.
        """
        return None

    def client_rule(self) -> ClientRule:
        """The method's client half, the same object on every call; plain local training unless the method has one."""
        return ClientRule() if self._client is None else self._client

    def clients_changed(self, federation: Federation, sizes: Tensor) -> None:
        """See :meth:`ClientRule.clients_changed`."""

    def begin_fit(self, federation: Federation) -> None:
        """Called before the first round of a fit, after what it keeps was restored if the fit is resumed."""

    def end_fit(self) -> str | None:
        """Called when all rounds of a fit are over; returns a line to print, if there is something to say."""
        return None

    def evaluation_params(self, params: Tensor) -> Tensor:
        """The parameters to evaluate, ``[n]``; the global ones unless the method averages iterates."""
        return params

    def memory(self, federation: Federation, cohort_size: int) -> Mapping[str, int]:
        """Bytes that the rule will hold at most, by name, for the memory plan: what it keeps, unless it says more."""
        return rule_state.max_nbytes(self, federation.extent(cohort_size))
