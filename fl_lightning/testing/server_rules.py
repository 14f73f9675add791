# SPDX-License-Identifier: Apache-2.0
"""What every server rule must do, whatever it computes."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning.algorithms import ServerRule
from fl_lightning.algorithms.records import Federation
from fl_lightning.arguments import checked
from fl_lightning.core.cohort import Cohort
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.testing.requiring import DECLARE, refuse_other, require, watched_generators
from fl_lightning.testing.sealed_rows import LEVELS, RefusedError, sealed

_SIZES = (30, 12, 50)
_CLIENTS, _PER_ROUND = 9, 4
Make = Callable[[], ServerRule]
Prepare = Callable[[Cohort], Cohort]


@dataclass(frozen=True)
class Subject:
    """A rule to check: how it is made, and what its client half adds to a cohort."""

    make: Make
    prepare: Prepare

    @property
    def name(self) -> str:
        """Of its class."""
        return type(self.make()).__name__

    def rounds(self, count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Iterator[Cohort]:
        """Rounds of a federation with partial participation; every row is new and random."""
        dice = torch.Generator().manual_seed(seed)
        draw = partial(torch.rand, generator=dice, dtype=torch.float64)
        for when in range(count):
            common = torch.randn(sum(_SIZES), generator=dice, dtype=torch.float64)
            rows = torch.randn(_PER_ROUND, sum(_SIZES), generator=dice, dtype=torch.float64) + 0.3 * common
            ids = torch.randperm(_CLIENTS, generator=dice)[:_PER_ROUND]
            yield self.cohort(rows.to(dtype), draw(_PER_ROUND) + 0.2, ids, when)

    def cohort(self, rows: Tensor, losses: Tensor | None, ids: Tensor, when: int = 0, **entries: Any) -> Cohort:
        """A round with these rows."""
        known = {"client_lr": 0.1, "num_clients": _CLIENTS, "sizes": 1.0 + ids % 4}
        if losses is not None:
            known["losses_at"] = lambda params: 0.5 * losses
        layout, params = ParamLayout.from_sizes(_SIZES), torch.zeros(rows.shape[1], dtype=rows.dtype)
        made = Cohort(params, UpdateMatrix(rows, layout), losses, client_ids=tuple(ids.tolist()), round=when, **known)  # type: ignore[arg-type]
        return replace(self.prepare(made), **entries)

    def must(self, holds: bool, problem: str) -> None:
        """:func:`require` of a sentence that begins with the rule's name."""
        require(holds, f"{self.name} {problem}")


@checked()
def check_server_rule(
    make: Callable[[], ServerRule],
    *,
    prepare: Callable[[Cohort], Cohort] | None = None,
    skip: Sequence[str] = (),
) -> None:
    """Checks what every server rule must do, whatever it computes.

    Args:
        make: makes the rule, such as its class; it is called often.
        prepare: adds to a cohort what the rule's client half reports, such as ``extras``; without it, cohorts have
            rows, losses, sizes and a learning rate.
        skip: names of checks to leave out, of :data:`SERVER_RULE_CHECKS`.

    Raises:
        AssertionError: the rule breaks one; the message says how, and what to write instead.
        TypeError: ``make`` makes something else.
        ValueError: a name in ``skip`` is unknown.

    Example::

        def test_my_rule():
            fl.testing.check_server_rule(MyRule)
    """
    refuse_other(make, (ServerRule,), "server rules")
    unknown = sorted({*skip} - {*SERVER_RULE_CHECKS})
    if unknown:
        raise ValueError(f"skip must name checks of {', '.join(SERVER_RULE_CHECKS)}, found {', '.join(unknown)}")
    subject = Subject(make, prepare or (lambda cohort: cohort))
    for name, check in SERVER_RULE_CHECKS.items():
        if name not in skip:
            check(subject)


def _step(rule: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        made, other = rule.make(), rule.make()
        rule.must(made.reads in LEVELS, f"must say reads = one of {', '.join(LEVELS)}, found {made.reads!r}")
        for cohort, same in zip(rule.rounds(5, dtype), rule.rounds(5, dtype), strict=True):
            given = (cohort.updates.rows, cohort.params, cohort.known_losses, cohort.sizes)
            before = [value.clone() for value in given]
            with watched_generators(f"{rule.name} draws from a generator that others share, or seeds it"):
                step = made.aggregate(cohort)
            form = isinstance(step, Tensor) and step.shape == before[1].shape and step.dtype == dtype
            rule.must(form, f"must return a step like params, {list(before[1].shape)} of {dtype}, found {_form(step)}")
            rule.must(bool(step.isfinite().all()), "returns a step that is not finite for ordinary rows")
            untouched = all(map(torch.equal, before, given))
            rule.must(untouched, "changes the rows, params, losses or sizes of its cohort: copy them before writing")
            step = step.clone()
            cohort.updates.rows.zero_()  # as in a fit, where the next round's take their place
            problem = f"gives other steps once earlier rows are overwritten: keep copies, row.clone(), and {DECLARE}"
            rule.must(torch.equal(step, other.aggregate(same)), problem)


def _form(step: object) -> str:
    return f"{list(step.shape)} of {step.dtype}" if isinstance(step, Tensor) else type(step).__name__


def _order(rule: Subject) -> None:
    one, two, turned = rule.make(), rule.make(), torch.tensor([2, 0, 3, 1])
    for when, cohort in enumerate(rule.rounds(3)):
        assert cohort.losses is not None
        ids = torch.tensor(cohort.client_ids)
        other = rule.cohort(cohort.updates.rows[turned], cohort.losses[turned], ids[turned], when)
        same = torch.allclose(one.aggregate(cohort), two.aggregate(other), rtol=1e-9, atol=1e-12)
        rule.must(same, "gives another step when the clients come in another order: keep things by cohort.client_ids")


def _scaling(rule: Subject) -> None:
    for scale in (2.0**-40, 2.0**20):
        one, two = rule.make(), rule.make()
        for when, cohort in enumerate(rule.rounds(2)):
            assert cohort.client_lr is not None
            larger = rule.cohort(
                scale * cohort.updates.rows, cohort.losses, torch.tensor(cohort.client_ids), when,
                client_lr=scale * cohort.client_lr,
            )  # fmt: skip
            step, scaled = one.aggregate(cohort), two.aggregate(larger)
            rule.must(
                torch.allclose(scaled, scale * step, rtol=1e-6, atol=0.0),
                f"does not scale: rows and learning rate times {scale:g} must give the step times {scale:g}. Compare "
                "numbers with numbers of the round, not with constants; where a method has a unit of its own, "
                "skip=['scaling']",
            )


def _zero_rows(rule: Subject) -> None:
    made = rule.make()
    for cohort in rule.rounds(2):
        made.aggregate(cohort)
    before = _saved(made)
    silent = next(rule.rounds(1, seed=1))
    zeros = torch.zeros_like(silent.updates.rows)
    step = made.aggregate(rule.cohort(zeros, silent.losses, torch.tensor(silent.client_ids), 2))
    rule.must(not step.any(), "takes a step though all rows are zero")
    rule.must(_saved(made) == before, "changes its state in a round of zero rows: return a zero step first")


def _not_finite(rule: Subject) -> None:
    for value in (torch.nan, torch.inf):
        made, cohort = rule.make(), next(rule.rounds(1))
        rows = cohort.updates.rows.clone()
        rows[2, 17] = value
        ids = torch.tensor([20, 21, 22, 23])
        words = f"must raise a ValueError that names client 22, whose row holds {value}"
        how = "use fl.algorithms.weighted_mean, or look at cohort.updates.norms()"
        found = _error(made, sealed(rule.cohort(rows, cohort.losses, ids, num_clients=30), made.reads))
        rule.must("22" in found, f"{words}: {how}; found {found or 'a step'}")


def _needs(rule: Subject) -> None:
    needs, cohort = rule.make().needs, next(rule.rounds(1))
    without = {
        "losses": (needs.losses, {"losses": None}), "losses_at": (needs.requery, {"losses_at": None}),
        "client_lr": (needs.client_lr, {"client_lr": None}),
        **({"accuracy": (True, {"extras": {}})} if needs.accuracies else {}),
    }  # fmt: skip
    for name, (needed, missing) in without.items():
        found = _error(rule.make(), replace(cohort, **missing))  # type: ignore[arg-type]
        rule.must(needed or not found, f"asks for {name} and does not say so in needs: {found}")
        words = f"must raise a ValueError that names {name} where it is missing, since its needs say so, found"
        rule.must(not needed or name in found, f"{words} {found or 'a step'}")


def _error(rule: ServerRule, cohort: Cohort) -> str:
    """The words of the ValueError of a round; empty if there is none."""
    try:
        rule.aggregate(cohort)
    except ValueError as error:
        return str(error) or "no words"
    return ""


def _report(rule: Subject) -> None:
    made = rule.make()
    for cohort in rule.rounds(3):
        made.aggregate(cohort)
        weights, scalars = made.report.weights, made.report.scalars
        shape = None if weights is None else list(weights.shape)
        rule.must(shape == [len(cohort)], f"must report a weight per client, StepReport(weights=[m]), found {shape}")
        assert weights is not None
        rule.must(bool(weights.isfinite().all()), "reports weights that are not finite")
        numbers = all(isinstance(value, float) for value in scalars.values())
        rule.must(numbers, f"must report scalars that are floats, found {dict(scalars)}")


def _reads(rule: Subject) -> None:
    free, bound = rule.make(), rule.make()
    says = bound.reads
    for cohort in rule.rounds(6):
        try:
            step = bound.aggregate(sealed(cohort, says))
        except RefusedError as error:
            raise AssertionError(f"{rule.name} says reads = {says!r} and takes {error}: say more") from None
        rule.must(torch.equal(step, free.aggregate(cohort)), f"gives another step where it may read {says} alone")
    for less in LEVELS[: LEVELS.index(says)]:
        made = rule.make()
        try:
            for cohort in rule.rounds(6):
                made.aggregate(sealed(cohort, less))
        except RefusedError:
            continue
        rule.must(False, f"reads {less} alone: say reads = {less!r}, so that a server need not see more")


def _arguments(rule: Subject) -> None:
    made = rule.make()
    for half in (made, made.client_rule()):
        given = set(inspect.signature(type(half)).parameters) - rule_state.placement(half, made.client_rule())
        lost = sorted(given - set(half.hyperparameters()))
        owner = "" if half is made else f"'s half {type(half).__name__}"
        rule.must(not lost, f"{owner} must keep {lost} in attributes of the same names, which checkpoints compare")


def _checkpoint(rule: Subject) -> None:
    for dtype in (torch.float32, torch.float64):
        made, resumed = rule.make(), rule.make()
        for place, cohort in enumerate(rule.rounds(8, dtype)):
            step = made.aggregate(cohort)
            if place == 4:
                rule_state.load_state_dict(resumed, torch.load(io.BytesIO(_saved(made)), weights_only=True))
            if place > 4:
                same = torch.equal(step, resumed.aggregate(cohort)) and made.report.scalars == resumed.report.scalars
                rule.must(same, f"goes on from a checkpoint with other steps or scalars: {DECLARE}")


def _second_fit(rule: Subject) -> None:
    made, cohorts = rule.make(), list(rule.rounds(4))
    first = made.aggregate(cohorts[0])
    for cohort in cohorts[1:]:
        made.aggregate(cohort)
    rule_state.reset(made)
    same = torch.equal(first, made.aggregate(cohorts[0]))
    rule.must(same, f"remembers an earlier fit: {DECLARE}")


def _memory(rule: Subject) -> None:
    federation = Federation(_CLIENTS, ParamLayout.from_sizes(_SIZES), torch.device("cpu"), torch.float64)
    made = rule.make()
    made.begin_fit(federation)
    for cohort in rule.rounds(8):
        made.aggregate(cohort)
    held = sum(t.numel() * t.element_size() for t in large_tensors(rule_state.state_dict(made)))
    planned = sum(made.memory(federation, _PER_ROUND).values())
    rule.must(held <= planned, f"holds {held} bytes and plans for {planned}: say more in memory()")


def large_tensors(state: Any) -> list[Tensor]:
    """Tensors of numbers in a state that are longer than the list of clients."""
    if isinstance(state, Tensor):
        return [state] if state.numel() > _CLIENTS and state.is_floating_point() else []
    values = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else []
    return [tensor for value in values for tensor in large_tensors(value)]


def _saved(rule: ServerRule) -> bytes:
    file = io.BytesIO()
    torch.save(rule_state.state_dict(rule), file)
    return file.getvalue()


SERVER_RULE_CHECKS: Mapping[str, Callable[[Subject], None]] = {
    "step": _step, "order": _order, "scaling": _scaling, "zero rows": _zero_rows, "not finite": _not_finite,
    "needs": _needs, "report": _report, "reads": _reads, "arguments": _arguments, "checkpoint": _checkpoint,
    "second fit": _second_fit, "memory": _memory,
}  # fmt: skip
"""By name, what :func:`check_server_rule` looks at."""
