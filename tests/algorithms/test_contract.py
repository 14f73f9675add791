# SPDX-License-Identifier: Apache-2.0
"""What every algorithm must do, whatever it computes. Add a line to ``RULES`` and a new one is covered."""

from dataclasses import replace

import pytest
import torch
from algorithm_cohorts import SIZES, make_cohort, random_rows, sampled_rounds
from cases import in_turn
from resuming import differences
from support import reload

from fl_lightning import algorithms as fl
from fl_lightning import testing
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.updates import UpdateMatrix
from fl_lightning.testing.sealed_rows import RefusedError, sealed
from fl_lightning.testing.server_rules import large_tensors

RULES = {
    "FedAvg": fl.FedAvg,
    "FedAvg-uniform": lambda: fl.FedAvg("uniform"),
    "FedProx": fl.FedProx,
    "SCAFFOLD": fl.SCAFFOLD,
    "FedDyn": fl.FedDyn,
    "Ditto": fl.Ditto,
    "FedBN": fl.FedBN,
    "FedPer": fl.FedPer,
    "FedRep": fl.FedRep,
    "FedCKA": fl.FedCKA,
    "MOON": fl.MOON,
    "FedProc": lambda: fl.FedProc(num_classes=3),
    "FedProto": lambda: fl.FedProto(num_classes=3),
    "FedHEAL": fl.FedHEAL,
    "FedPW": fl.FedPW,
    "FedMGDAPlus": fl.FedMGDAPlus,
    "FedMGDAPlus-full": lambda: fl.FedMGDAPlus(epsilon=1.0),
    "FedFV": fl.FedFV,
    "FedFV-code": lambda: fl.FedFV(0.5, 3, reading="code"),
    "FedFV-few": lambda: fl.FedFV(0.0, 4, max_history=3),
    "QFedAvg": fl.QFedAvg,
    "AFL": lambda: fl.AFL(lambda_lr=0.1),
    "TERM": fl.TERM,
    "TERM-paper": lambda: fl.TERM(5.0, "paper"),
    "DRFL": fl.DRFL,
    "FedFa": fl.FedFa,
    "FedGini": fl.FedGini,
    "FCFL": fl.FCFL,
    "FCFL-free": lambda: fl.FCFL(budget=None, stage1_rounds=1),
    "FCFL-pareto": lambda: fl.FCFL(stage1_rounds=0, reading="paper"),
    "FairReg": fl.FairReg,
    "MMPF": fl.MMPF,
    "FA": lambda: fl.FA([[0.0], [1.0]]),
    "FedMDFG": fl.FedMDFG,
    "FedMDFG-fair": lambda: fl.FedMDFG(theta=0.01, gradient_source="update"),
    "FedLF": fl.FedLF,
    "FedLF-paper": lambda: fl.FedLF(reading="paper", history_window="all"),
    "FedLF-code": lambda: fl.FedLF(reading="code", history_window="last"),
    "FedLF-few": lambda: fl.FedLF(max_history=3),
    "FedLF-needed": lambda: fl.FedLF(fair_row="needed"),
    "FedLF-none": lambda: fl.FedLF(history_window="none"),
    "FedFV-none": lambda: fl.FedFV(tau=0),
    "UPGrad": fl.UPGrad,
    "AdaFed": fl.AdaFed,
    "PropFair": fl.PropFair,
    "FairFed": fl.FairFed,
    "FedFB": fl.FedFB,
    "FedISM": fl.FedISM,
    "EAGLE": fl.EAGLE,
    "EAGLE-known": lambda: fl.EAGLE(best_losses=[0.1 * client for client in range(30)]),
    "AAggFF": fl.AAggFF,
    "AAggFF-silo": lambda: fl.AAggFF("silo", "normal"),
    "AAggFF-newton": lambda: fl.AAggFF("newton"),
}
# The report has one weight per client, and the step is no combination of the rows with these.
STEPS_BY_LAYER = (fl.FedLF, fl.UPGrad, fl.FedHEAL, fl.FedFa, fl.FedPW)
every_rule = pytest.mark.parametrize("name", RULES)
in_both_dtypes = pytest.mark.parametrize(("name", "dtype"), in_turn(RULES, [torch.float32, torch.float64]))


def test_every_method_is_here():
    public = [value for value in vars(fl).values() if isinstance(value, type) and issubclass(value, fl.ServerRule)]
    assert {type(make()) for make in RULES.values()} == {*public} - {fl.ServerRule}


def reported(cohort):
    """The cohort with all that client halves report."""
    losses = False if cohort.losses is None else cohort.losses
    return make_cohort(
        cohort.updates.rows, losses, cohort.client_ids, cohort.round, lr=cohort.client_lr, sizes=cohort.sizes,
        losses_at=cohort.losses_at, num_clients=cohort.num_clients,
    )  # fmt: skip


# q-FedAvg has a unit of its own, the Lipschitz constant 1 / client_lr; of equally old rows FedLF keeps the first ones.
# The checks have federations of two sizes, and EAGLE has losses for one.
SKIPPED = {("QFedAvg", "scaling"), ("FedLF-few", "order"), ("EAGLE-known", "memory")}


@pytest.mark.parametrize("check", testing.SERVER_RULE_CHECKS)
@every_rule
def test_every_rule_passes_the_public_checks(name, check):
    if (name, check) not in SKIPPED:
        testing.check_server_rule(
            RULES[name], prepare=reported, skip=[one for one in testing.SERVER_RULE_CHECKS if one != check]
        )


def control_rows(cohort):
    return {"control": UpdateMatrix(torch.full_like(cohort.updates.rows, 0.1), cohort.updates.layout)}


@in_both_dtypes
def test_one_client_gets_its_own_update(name, dtype):
    rows = random_rows(1, 3, dtype)
    step = RULES[name]().aggregate(make_cohort(rows, lr=1.0))
    cosine = torch.nn.functional.cosine_similarity(step.double(), rows[0].double(), dim=0)
    assert cosine == pytest.approx(1, abs=1e-6)
    # FedMDFG's line search and q-FedAvg's denominators choose the length, and FedMGDA+ ignores that of the updates.
    if not name.startswith(("FedMDFG", "FedMGDAPlus", "QFedAvg")):
        torch.testing.assert_close(step, rows[0])


@every_rule
def test_identical_clients_get_their_common_update(name):
    rows = random_rows(1, 4).expand(5, -1).clone()
    rule = RULES[name]()
    step = rule.aggregate(make_cohort(rows, lr=1.0))  # unequal losses: the fair row would cancel everything
    assert torch.nn.functional.cosine_similarity(step, rows[0], dim=0) == pytest.approx(1, abs=1e-9)
    assert step.norm() > 0.01 * rows[0].norm()


def holds_nan(state):
    if isinstance(state, (dict, list, tuple)):
        return any(map(holds_nan, state.values() if isinstance(state, dict) else state))
    return isinstance(state, (float, torch.Tensor)) and bool(torch.as_tensor(state).isnan().any())


def with_nan(cohort, where):
    """The same cohort with NaN from client 1."""
    kind, name = where
    extras, companions, rows = dict(cohort.extras), dict(cohort.companions), cohort.updates.rows.clone()
    if kind == "rows":
        rows[1, 17] = torch.nan
    elif kind == "extras":
        for each in [name] if name else extras:
            extras[each] = extras[each].clone()
            extras[each][1] = torch.nan
    else:
        matrix = companions[name]
        companions[name] = matrix.beside(matrix.rows.clone())
        companions[name].rows[1, 17] = torch.nan
    return replace(cohort, updates=cohort.updates.beside(rows), extras=extras, companions=companions)


@every_rule
def test_what_is_not_finite_enters_no_state(name):
    def played(server, client, cohort):
        step = client.adjust_step(cohort, server.aggregate(cohort))
        client.commit(cohort)
        return step

    cohorts = sampled_rounds(5, 4, 4, seed=5, num_clients=9)
    good = [replace(cohort, companions={**cohort.companions, **control_rows(cohort)}) for cohort in cohorts]
    faults = [("rows", ""), ("extras", "")]
    faults += [("extras", each) for each in good[0].extras] + [("companions", each) for each in good[0].companions]
    for fault in faults:
        server = RULES[name]()
        client = server.client_rule()
        for cohort in good[:2]:
            played(server, client, cohort)
        before = reload([rule_state.state_dict(server), rule_state.state_dict(client)])
        try:
            played(server, client, with_nan(good[2], fault))
        except ValueError:
            assert_same_state(before, reload([rule_state.state_dict(server), rule_state.state_dict(client)]))
            continue
        assert fault[0] != "rows"
        for cohort in good[3:]:
            assert played(server, client, cohort).isfinite().all(), fault
        assert not holds_nan([rule_state.state_dict(server), rule_state.state_dict(client)]), fault


@every_rule
def test_one_zero_row_does_not_stop_the_others(name):
    rows = random_rows(4, 8)
    rows[1] = 0
    step = RULES[name]().aggregate(make_cohort(rows, lr=1.0))
    assert step.isfinite().all()
    assert step.norm() > 0.01 * rows.norm(dim=1).mean()


LOSSES = {
    "equal": [1.0] * 4,
    "almost equal": [0.1 + 0.2, 0.3, 0.3, 0.3],
    "zero": [0.0] * 4,
    "some zero": [0.0, 0.0, 1.0, 2.0],
    "tiny": [1e-30, 2e-30, 1e-30, 0.0],
    "huge": [1e30, 1, 1, 1],
}


@every_rule
def test_any_losses_give_a_common_or_mean_direction(name):
    rows, rule = random_rows(4, 9), RULES[name]()
    # Somebody may lose in a mean of the updates, and FedFV looks at the conflicts of some. AdaFed keeps losses of 0.
    some = ("FedPW", "FCFL", "FCFL-free", "AdaFed")
    for_all = rule.reads != "sums" and name.split("-")[0] != "FedFV" and name not in some
    for kind, losses in LOSSES.items():
        step = RULES[name]().aggregate(make_cohort(rows, losses))
        assert step.isfinite().all(), kind
        assert step.norm() > 0, kind
        assert step.norm() <= 2**5 * rows.norm(dim=1).max(), kind
        assert not for_all or (rows @ step > 0).all(), kind


@every_rule
def test_reports_what_it_did(name):
    rule = RULES[name]()
    for cohort in sampled_rounds(4, 9, 4, 10):
        step = rule.aggregate(cohort)
        report = rule.report
        assert report.weights.shape == (len(cohort),)
        assert report.weights.isfinite().all()
        assert all(isinstance(value, float) for value in report.scalars.values())
        assert not report.flagged
        if isinstance(rule, fl.FedLF) and rule.blocks is not None:
            layers = [layer for block in rule.blocks for layer in block]
            assert layers == list(range(cohort.updates.layout.num_layers))
        if rule.report.scalars.get("history_rows", 0) == 0 and not isinstance(rule, STEPS_BY_LAYER):
            torch.testing.assert_close(report.weights @ cohort.updates.rows, step)


@every_rule
def test_a_client_half_reads_no_more_than_it_says(name):
    free, bound = RULES[name]().client_rule(), RULES[name]().client_rule()
    for cohort in sampled_rounds(4, 9, 4, 20):
        cohort = make_cohort(cohort.updates.rows, ids=cohort.client_ids, num_clients=9, companions=control_rows(cohort))
        seen, step = sealed(cohort, bound.reads, own=True), torch.ones(sum(SIZES), dtype=torch.float64)
        assert torch.equal(free.adjust_step(cohort, step), bound.adjust_step(seen, step))
        free.commit(cohort)
        bound.commit(seen)
    assert_same_state(rule_state.state_dict(free), rule_state.state_dict(bound))


def test_a_class_that_does_not_say_what_it_reads_counts_as_reading_rows():
    class Mine(fl.FedAvg):
        def aggregate(self, cohort):
            return cohort.updates.rows.median(0).values

    class Kept(fl.ClientRule):
        def commit(self, cohort):
            self.kept = cohort.updates.rows

    class Paired(fl.FedAvg):
        def client_rule(self):
            return Kept()

    cohort = make_cohort(random_rows(3, 1))
    with pytest.raises(RefusedError):
        Mine().aggregate(sealed(cohort, "gram"))
    assert (Mine.reads, Kept.reads, Paired.reads, fl.ServerRule.reads) == ("rows", "rows", "sums", "rows")
    assert fl.FedLF(history_window="none").reads == fl.FedFV(tau=0).reads == "gram"


def happens(client, cohort):
    """A round as a client rule hears of it; models stand for what clients keep, if they keep anything."""
    client.commit(cohort)
    names = [name for name, entry in rule_state.declared(client).items() if entry.at_client]
    for place, row in zip(cohort.client_ids, cohort.updates.rows, strict=True):
        model = {"params": row, "buffers": torch.full((3,), place, dtype=torch.uint8)}
        rule_state.set_local_state(client, place, dict.fromkeys(names, model), cohort.round)


@every_rule
def test_client_state_survives_a_checkpoint_bit_for_bit(name):
    client, resumed = RULES[name]().client_rule(), RULES[name]().client_rule()
    cohorts = list(sampled_rounds(6, 9, 4, 14))
    for when, cohort in enumerate(cohorts):
        cohort = make_cohort(
            cohort.updates.rows, ids=cohort.client_ids, when=when, num_clients=9, companions=control_rows(cohort)
        )
        happens(client, cohort)
        if when == 2:
            rule_state.load_state_dict(resumed, reload(rule_state.state_dict(client)))
        if when > 2:
            happens(resumed, cohort)
    assert_same_state(rule_state.state_dict(client), rule_state.state_dict(resumed))


@every_rule
def test_memory_of_past_clients_matters(name):
    """Guards the state tests above: they would pass on a rule that remembers nothing."""
    rule, differs = RULES[name](), False
    for cohort in sampled_rounds(6, 9, 4, 17):
        differs |= not torch.allclose(rule.aggregate(cohort), RULES[name]().aggregate(cohort))
    # The memory of these says what comes next or is evaluated, and changes no step of these rounds.
    quiet = ("FCFL", "FCFL-pareto", "MMPF", "FedLF-none", "FedFV-none")
    assert differs == (bool(rule_state.state_dict(rule)) and name not in quiet)


@every_rule
def test_memory_plan_of_client_halves_covers_what_is_held(name):
    layout = ParamLayout.from_sizes(SIZES)
    federation = fl.Federation(9, layout, torch.device("cpu"), torch.float64)
    half = RULES[name]().client_rule()
    half.begin_fit(federation)
    for cohort in sampled_rounds(8, 9, 4, 18):
        companions = control_rows(cohort)
        half.commit(make_cohort(cohort.updates.rows, ids=cohort.client_ids, num_clients=9, companions=companions))
    held = sum(tensor.numel() * tensor.element_size() for tensor in large_tensors(rule_state.state_dict(half)))
    assert held <= sum(half.memory(federation, 4).values())


def assert_same_state(one, two):
    assert not differences(one, two)
