# SPDX-License-Identifier: Apache-2.0
"""What every algorithm must do, whatever it computes. Add a line to ``RULES`` and a new one is covered."""

import inspect
from dataclasses import replace

import pytest
import torch
from algorithm_cohorts import SIZES, make_cohort, random_rows, sampled_rounds
from cases import in_turn, pairwise
from resuming import differences
from sealed_rows import LEVELS, RefusedError, sealed
from support import reload

from fl_lightning import algorithms as fl
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state
from fl_lightning.core.updates import UpdateMatrix

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
    "FedISM": fl.FedISM,
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


def control_rows(cohort):
    return {"control": UpdateMatrix(torch.full_like(cohort.updates.rows, 0.1), cohort.updates.layout)}


@in_both_dtypes
def test_step_is_a_finite_vector_like_the_parameters(name, dtype):
    rule = RULES[name]()
    for cohort in sampled_rounds(5, 9, 4, seed=1, dtype=dtype):
        rows = cohort.updates.rows.clone()
        step = rule.aggregate(cohort)
        assert step.shape == cohort.params.shape
        assert step.dtype == dtype
        assert step.isfinite().all()
        assert step.norm() > 0
        assert torch.equal(rows, cohort.updates.rows), "rows must not change"
        assert not cohort.params.any(), "params must not change"


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


@pytest.mark.parametrize(("name", "scale"), pairwise(RULES, [1e-18, 1e9]))
def test_step_scales_with_the_rows(name, scale):
    if name == "QFedAvg":
        pytest.skip("q-FedAvg has a unit of its own: the Lipschitz constant 1 / client_lr")
    rows = random_rows(4, 5)
    step = RULES[name]().aggregate(make_cohort(rows, lr=1e-12 if scale < 1 else 1e9))
    scaled = RULES[name]().aggregate(make_cohort(scale * rows, lr=scale * (1e-12 if scale < 1 else 1e9)))
    torch.testing.assert_close(scaled, scale * step, rtol=1e-9, atol=0)


@every_rule
def test_order_of_clients_does_not_matter(name):
    rules = RULES[name](), RULES[name]()
    order = torch.tensor([2, 0, 3, 1])
    for when in range(3):
        rows, losses, sizes = random_rows(4, 60 + when), torch.tensor([0.4, 1.3, 0.9, 0.6]), torch.arange(1.0, 5)
        ids = torch.tensor([when, 7, 5 + 4 * when, 6])
        one = rules[0].aggregate(make_cohort(rows, losses, ids.tolist(), when, sizes=sizes))
        two = rules[1].aggregate(make_cohort(rows[order], losses[order], ids[order].tolist(), when, sizes=sizes[order]))
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@every_rule
def test_zero_rows_give_a_zero_step_and_change_no_state(name):
    rule = RULES[name]()
    cohorts = list(sampled_rounds(3, 9, 4, 7))
    for cohort in cohorts[:2]:
        rule.aggregate(cohort)
    before = reload(rule_state.state_dict(rule))
    silent = make_cohort(torch.zeros(4, sum(SIZES), dtype=torch.float64), when=2)
    assert not rule.aggregate(silent).any()
    assert_same_state(before, reload(rule_state.state_dict(rule)))


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


@pytest.mark.parametrize(("name", "value"), in_turn(RULES, [float("nan"), float("inf")]))
def test_a_rule_reads_no_more_than_it_says(name, value):
    """Equal cohorts give equal bits, and clients whose rows are not finite are named."""
    free, bound = RULES[name](), RULES[name]()
    for cohort in sampled_rounds(6, 9, 4, 19):
        step = bound.aggregate(sealed(cohort, bound.reads))
        assert torch.equal(step, free.aggregate(cohort))
        assert torch.equal(free.report.weights, bound.report.weights)
    bad = random_rows(4, 12)
    bad[2, 17] = value
    with pytest.raises(ValueError, match=r"\[22\]"):
        RULES[name]().aggregate(sealed(make_cohort(bad, ids=[20, 21, 22, 23]), bound.reads))
    bound.aggregate(sealed(make_cohort(torch.zeros(4, sum(SIZES), dtype=torch.float64)), bound.reads))


@every_rule
def test_a_rule_says_no_more_than_it_reads(name):
    reads = RULES[name]().reads
    for less in LEVELS[: LEVELS.index(reads)]:
        rule = RULES[name]()
        with pytest.raises(RefusedError):
            [rule.aggregate(sealed(cohort, less)) for cohort in sampled_rounds(6, 9, 4, 19)]


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


@every_rule
def test_arguments_are_kept_under_their_names(name):
    """So that checkpoints and handshakes can name the ones that changed."""
    rule = RULES[name]()
    for half in (rule, rule.client_rule()):
        given = inspect.signature(type(half)).parameters
        places = rule_state.placement(half, rule.client_rule())
        assert places <= set(given)
        assert set(half.hyperparameters()) == set(given) - places
        assert reload(half.hyperparameters()) == half.hyperparameters()
    arguments = {argument: getattr(rule, argument) for argument in inspect.signature(type(rule)).parameters}
    if name.startswith("FedCKA"):
        arguments["layers"] = None  # the attribute says how parameters divide
    assert type(rule)(**arguments).hyperparameters() == rule.hyperparameters()


@every_rule
def test_missing_needs_are_named(name):
    rule = RULES[name]()
    rows = random_rows(3, 11)
    if rule.needs.losses:
        with pytest.raises(ValueError, match="losses"):
            rule.aggregate(make_cohort(rows, losses=False))
    if rule.needs.requery:
        with pytest.raises(ValueError, match="losses_at"):
            rule.aggregate(make_cohort(rows, losses_at=None))
    if rule.needs.client_lr:
        with pytest.raises(ValueError, match="client_lr"):
            rule.aggregate(make_cohort(rows, lr=None))
    if rule.needs.accuracies:
        with pytest.raises(ValueError, match="accuracy"):
            rule.aggregate(make_cohort(rows, extras={}))
    if rule.needs == fl.Needs():
        assert rule.aggregate(make_cohort(rows, losses=False, lr=None)).isfinite().all()


@in_both_dtypes
def test_state_survives_a_checkpoint_bit_for_bit(name, dtype):
    rule = RULES[name]()
    cohorts = list(sampled_rounds(9, 11, 4, 13, dtype))
    for cohort in cohorts[:5]:
        rule.aggregate(cohort)
        rule_state.reset(rule.client_rule())
    resumed = RULES[name]()
    rule_state.load_state_dict(resumed, reload(rule_state.state_dict(rule)))
    for cohort in cohorts[5:]:
        assert torch.equal(rule.aggregate(cohort), resumed.aggregate(cohort))
        assert rule.report.scalars == resumed.report.scalars
    assert_same_state(rule_state.state_dict(rule), rule_state.state_dict(resumed))


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
def test_reset_forgets(name):
    rule = RULES[name]()
    first = next(iter(sampled_rounds(1, 9, 4, 15)))
    step = rule.aggregate(first)
    fresh = reload(rule_state.state_dict(RULES[name]()))
    for cohort in sampled_rounds(3, 9, 4, 16):
        rule.aggregate(cohort)
    rule_state.reset(rule)
    assert_same_state(fresh, reload(rule_state.state_dict(rule)))
    assert torch.equal(step, rule.aggregate(first))


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
def test_memory_plan_covers_what_is_held(name):
    layout = ParamLayout.from_sizes(SIZES)
    federation = fl.Federation(9, layout, torch.device("cpu"), torch.float64)
    rule = RULES[name]()
    for half in (rule, rule.client_rule()):
        half.begin_fit(federation)
    for cohort in sampled_rounds(8, 9, 4, 18):
        rule.aggregate(cohort)
        companions = {"companions": control_rows(cohort)}
        rule.client_rule().commit(make_cohort(cohort.updates.rows, ids=cohort.client_ids, num_clients=9, **companions))
    for half in (rule, rule.client_rule()):
        held = sum(
            t.numel() * t.element_size()
            for t in tensors(rule_state.state_dict(half))
            if t.is_floating_point() and t.numel() > 9
        )
        assert held <= sum(half.memory(federation, 4).values())


def tensors(state):
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for value in values for tensor in tensors(value)]


def assert_same_state(one, two):
    assert not differences(one, two)
