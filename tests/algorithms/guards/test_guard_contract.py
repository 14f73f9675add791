# SPDX-License-Identifier: Apache-2.0
"""What every guard promises: ``GUARDS`` is where a new one is entered."""

import pytest
import torch
from algorithm_cohorts import SIZES, make_cohort, random_rows
from column_shards import in_shards, joined, same, shared
from guard_cohorts import crowd
from resuming import differences
from support import reload

from fl_lightning import guards
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage import rule_state

GUARDS = {
    "NormClipping": lambda: guards.NormClipping(5.0),
    "AdaptiveNormClipping": guards.AdaptiveNormClipping,
    "MultiKrum": lambda: guards.MultiKrum(0.2),
    "Krum": lambda: guards.Krum(2),
    "CoordinateMedian": guards.CoordinateMedian,
    "TrimmedMean": lambda: guards.TrimmedMean(0.2),
    "TrimmedMean with own rows": lambda: guards.TrimmedMean(3, rows="own"),
    "Bulyan": lambda: guards.Bulyan(2),
    "Bulyan with own rows": lambda: guards.Bulyan(0.1, rows="own"),
    "GeometricMedian": guards.GeometricMedian,
    "GeometricMedian with own rows": lambda: guards.GeometricMedian(rows="own"),
    "CentredClipping": lambda: guards.CentredClipping(2.0),
    "CentredClipping, three times": lambda: guards.CentredClipping(2.0, iterations=3),
    "CosineTrust": lambda: guards.CosineTrust(0),
    "CosineTrust with own rows": lambda: guards.CosineTrust(2, rows="own"),
}
STATEFUL = {"AdaptiveNormClipping", "CentredClipping", "CentredClipping, three times"}
LAYOUT = ParamLayout.from_sizes((20_000, 13, 30_001, 1, 15_985))
every_guard = pytest.mark.parametrize("name", GUARDS)


def rounds(dtype=torch.float64, layout=None, count=3, m=11):
    n = (layout or ParamLayout.from_sizes(SIZES)).numel
    return [crowd(m, seed, dtype, n, layout) for seed in range(count)]


def walk(guard, cohorts):
    """What the method sees round by round."""
    return [guard.guarded(cohort) for cohort in cohorts]


def test_every_guard_is_here():
    public = {name for name in guards.__all__ if isinstance(getattr(guards, name), type)}
    assert public - {"Guard", "Verdict", "CannotGuardError"} == {type(make()).__name__ for make in GUARDS.values()}


@every_guard
def test_how_many_reports_it_needs_and_how_many_it_leaves(name):
    for m in range(1, 13):
        guard = GUARDS[name]()
        ids = [getattr(guard, "client", 0), *range(20, 19 + m)]
        cohort = make_cohort(random_rows(m, 0) + 3, ids=ids)  # alike enough for cosines above 0
        if m < guard.needed(m):
            with pytest.raises(guards.CannotGuardError):
                guard.judge(cohort)
        else:
            assert len(guard.judge(cohort).remaining(m)) == guard.max_remaining(m)


@every_guard
def test_a_cohort_is_not_written_to(name):
    for cohort in rounds():
        before = cohort.updates.rows.clone()
        guard = GUARDS[name]()
        guard.guarded(cohort)
        guard.judge(cohort)
        assert torch.equal(cohort.updates.rows, before)


@every_guard
def test_the_order_of_clients_does_not_matter(name):
    rows = random_rows(11, 3)
    rows[4] *= 30
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    ids = order.tolist()
    straight = GUARDS[name]().guarded(make_cohort(rows, sizes=torch.arange(1.0, 12)))
    mixed = GUARDS[name]().guarded(make_cohort(rows[order], ids=ids, sizes=torch.arange(1.0, 12)[order]))
    assert set(mixed.client_ids) == set(straight.client_ids)
    places = [mixed.client_ids.index(client) for client in straight.client_ids]
    torch.testing.assert_close(mixed.updates.rows[places], straight.updates.rows)


@every_guard
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_keep_their_dtype(name, dtype):
    found = GUARDS[name]().guarded(crowd(11, dtype=dtype))
    assert found.updates.rows.dtype == dtype
    assert found.updates.rows.isfinite().all()


@every_guard
def test_a_row_far_away_does_not_come_through(name):
    cohort = crowd(11)
    found = GUARDS[name]().guarded(cohort)
    longest = cohort.updates.rows.norm(dim=1).sort(descending=True).values
    assert float(found.updates.rows.mean(0).norm()) < float(longest[1]) < float(cohort.updates.rows.mean(0).norm())


@every_guard
def test_rows_of_zeros_pass(name):
    cohort = make_cohort(torch.zeros(11, 92, dtype=torch.float64))
    if name.startswith("CosineTrust"):  # an update of zeros points nowhere
        with pytest.raises(guards.CannotGuardError, match="an update of zeros"):
            GUARDS[name]().guarded(cohort)
        return
    found = GUARDS[name]().guarded(cohort)
    assert not found.updates.rows.any()


@every_guard
def test_state_survives_a_checkpoint_and_a_fresh_fit_forgets_it(name):
    guard, cohorts = GUARDS[name](), rounds()
    assert not rule_state.state_dict(guard) or name in STATEFUL
    first = GUARDS[name]().judge(cohorts[2])
    walk(guard, cohorts[:2])
    other = GUARDS[name]()
    rule_state.load_state_dict(other, rule_state.state_dict(guard))
    assert torch.equal(other.guarded(cohorts[2]).updates.rows, guard.guarded(cohorts[2]).updates.rows)
    rule_state.reset(guard)
    assert str(guard.judge(cohorts[2])) == str(first)


@every_guard
def test_a_round_that_does_not_happen_changes_no_state(name):
    guard = GUARDS[name]()
    for cohort in rounds():
        before, commit_or_undo = reload(rule_state.state_dict(guard)), rule_state.transaction(guard)
        guard.judge(cohort)
        assert (differences(before, reload(rule_state.state_dict(guard))) != []) == (name in STATEFUL)
        commit_or_undo(False)
        assert not differences(before, reload(rule_state.state_dict(guard)))
        guard.judge(cohort)


@every_guard
def test_shares_of_the_columns_give_the_same_bits(name):
    guard = GUARDS[name]()
    cohorts = rounds((torch.float32, torch.float64)[list(GUARDS).index(name) % 2], LAYOUT, count=2)
    assert guard.columnwise
    whole = walk(guard, cohorts)

    def work(columns):
        own = GUARDS[name]()
        found = walk(own, [shared(cohort, columns) for cohort in cohorts])
        return found, rule_state.state_dict(own, columns)

    parts = in_shards(LAYOUT.numel, 3, work)
    for when, expected in enumerate(whole):
        assert all(found[when].client_ids == expected.client_ids for found, _ in parts)
        assert same(torch.cat([found[when].updates.rows for found, _ in parts], 1), expected.updates.rows)
    assert same(joined([state for _, state in parts]), rule_state.state_dict(guard))


@every_guard
def test_a_guard_says_what_it_is(name):
    guard = GUARDS[name]()
    assert repr(guard).startswith(name.split()[0].rstrip(",") + "(")
    assert guard.reads in ("sums", "gram", "rows")


def test_what_a_guard_does_not_say_is_not_known():
    class Own(guards.NormClipping):
        def judge(self, cohort):
            return super().judge(cohort)

    class Renamed(guards.NormClipping):
        pass

    assert (Own.columnwise, Own.reads) == (False, "rows")
    assert (Renamed.columnwise, Renamed.reads) == (True, "sums")
