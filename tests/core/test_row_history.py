# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest
import torch
from support import reload

from fl_lightning import ops
from fl_lightning.core.layout import ParamLayout
from fl_lightning.core.storage.row_history import RowHistory
from fl_lightning.core.updates import UpdateMatrix

LAYOUT = ParamLayout.from_sizes([5, 0, 7, 3])


def rows_of(m, seed, dtype=torch.float64, layout=LAYOUT):
    generator = torch.Generator().manual_seed(seed)
    return UpdateMatrix(torch.randn(m, layout.numel, generator=generator, dtype=torch.float64).to(dtype), layout)


def remember(history, updates, ids, when, scales=1.0):
    history.remember(updates, dict(enumerate(ids)), when, scales)


def direct_gram(rows, layout=LAYOUT):
    rows, starts = rows.double(), layout.layer_starts
    return torch.stack([rows[:, a:b] @ rows[:, a:b].T for a, b in pairwise(starts)])


class Plain:
    """The same memory as a dictionary of vectors."""

    def __init__(self, capacity=None):
        self.capacity, self.rows = capacity, {}

    def remember(self, updates, ids, when, scales):
        for i, row, scale in list(zip(ids, updates.rows.clone(), scales.tolist(), strict=True))[: self.capacity]:
            self.rows[i] = (when, row.double() * scale)
        if self.capacity is not None:
            newest = sorted(self.rows, key=lambda i: (-self.rows[i][0], i))
            self.rows = {i: self.rows[i] for i in newest[: self.capacity]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("capacity", [None, 1, 6, 11])
def test_agrees_with_a_dictionary_of_vectors(capacity, dtype):
    """Random cohorts, windows and scales: products must be right, computed for the step or when rows are remembered."""
    history, plain = RowHistory(capacity), Plain(capacity)
    generator = torch.Generator().manual_seed(1)
    for when in range(40):
        m = int(torch.randint(1, 6, (), generator=generator))
        ids = torch.randperm(25, generator=generator)[:m].tolist()
        updates = rows_of(m, when, dtype)
        since = when - int(torch.randint(0, 12, (), generator=generator))
        absent = history.select(exclude=ids, since=since)
        assert absent == sorted(
            (i for i, (t, _) in plain.rows.items() if i not in ids and t >= since), key=lambda i: (-plain.rows[i][0], i)
        )
        assert history.rounds(absent) == [plain.rows[i][0] for i in absent]
        joint = torch.cat([updates.rows.double(), *(plain.rows[i][1][None] for i in absent)])
        gram = history.joint_gram(updates, absent)
        assert gram.dtype == torch.float64
        torch.testing.assert_close(gram, direct_gram(joint), rtol=1e-12, atol=1e-12)
        assert torch.equal(gram, gram.mT)
        coeff = torch.randn(4, len(joint), generator=generator, dtype=torch.float64)
        wide = torch.repeat_interleave(coeff, torch.tensor(LAYOUT.sizes), dim=0)
        step = history.combine(updates, coeff, absent)
        assert step.dtype == dtype
        torch.testing.assert_close(step, (wide * joint.T).sum(1).to(dtype))
        if when % 5 != 4:  # not every round is remembered
            scales = torch.rand(m, generator=generator, dtype=torch.float64) + 0.5
            remember(history, updates, ids, when, scales)
            plain.remember(updates, ids, when, scales)
        assert len(history) == len(plain.rows)
        updates.rows.zero_()  # the strategy reuses its buffer


def test_a_round_computes_products_of_new_rows_only(monkeypatch):
    calls, sizes, real_gram = [], [], ops.layer_gram
    monkeypatch.setattr(ops, "layer_gram", lambda *args, **how: sizes.append(len(args[0])) or real_gram(*args, **how))
    monkeypatch.setattr(
        ops, "layer_cross_gram", lambda *args, **how: calls.append((len(args[0]), len(args[3]))) or real(*args, **how)
    )
    history = RowHistory()
    for when in range(12):
        ids = [(5 * when + k) % 20 for k in range(5)]
        updates = rows_of(5, when)
        absent = history.select(exclude=ids)
        calls.clear()
        history.joint_gram(updates, absent)
        assert calls == ([(5, min(5 * when, 20))] if when else [])
        remember(history, updates, ids, when)
    assert set(sizes) == {5}


def test_no_products_with_rows_that_are_about_to_leave(monkeypatch):
    """With rows of NaN in their place nothing changes, and where they stay after all, there are products."""
    calls = []
    monkeypatch.setattr(
        ops, "layer_cross_gram", lambda *args, **how: calls.append(args[3].tolist()) or real(*args, **how)
    )
    history, poisoned, plain = RowHistory(), RowHistory(), RowHistory()
    for when in range(12):
        ids = [(3 * when + 7 * k) % 17 for k in range(5)]
        updates, kept = rows_of(5, when, torch.float32), ids[:2] if when % 4 == 3 else ids
        absent = history.select(exclude=ids)
        for i in set(ids) & set(poisoned._entries) if kept == ids else ():
            poisoned._rows[poisoned._entries[i].slot] = torch.nan
        want = plain.joint_gram(updates, absent)
        got = [each.joint_gram(updates, absent, leaving=ids) for each in (history, poisoned)]
        assert torch.equal(got[0], got[1])
        torch.testing.assert_close(got[0], want, rtol=0, atol=1e-5)
        assert torch.equal(history.joint_gram(updates, absent, leaving=[*ids, *absent]), got[0])
        if absent:
            assert calls[-1] == sorted(history._entries[i].slot for i in absent)
        for each in (history, poisoned, plain):
            remember(each, updates, kept, when, 0.5)


real = ops.layer_cross_gram


@pytest.mark.parametrize("device", [None, "cpu"])
def test_restored_history_continues_bit_for_bit(device):
    """float32 rows: recomputed products could differ in the last bits, so they must be restored."""

    def play(history, rounds):
        results = []
        for when in rounds:
            ids = [(3 * when + 7 * k) % 17 for k in range(4)]
            updates = rows_of(4, when, torch.float32)
            absent = history.select(exclude=ids, since=when - 3)
            results.append(history.joint_gram(updates, absent))
            results.append(history.combine(updates, results[-1][:, 0], absent))
            remember(history, updates, ids, when, 0.3)
        return results

    history, resumed = RowHistory(9, device), RowHistory(9, device)
    history.reserve = 9
    play(history, range(7))
    resumed.load_state_dict(reload(history.state_dict()))
    assert len(resumed) == len(history) == 9
    assert torch.equal(*(each.state_dict()["gram"] for each in (history, resumed)))
    for one, two in zip(play(history, range(7, 12)), play(resumed, range(7, 12)), strict=True):
        assert torch.equal(one, two)


def test_loaded_state_is_a_copy():
    history, other = RowHistory(), RowHistory()
    updates = rows_of(3, 1)
    remember(history, updates, [0, 1, 2], 0)
    state = history.state_dict()
    other.load_state_dict(state)
    before = other.joint_gram(rows_of(1, 2), [0, 1, 2])
    remember(history, rows_of(3, 3), [0, 1, 2], 1)
    assert torch.equal(before, other.joint_gram(rows_of(1, 2), [0, 1, 2]))


def test_empty_history_round_trips():
    history = RowHistory()
    history.load_state_dict(reload(RowHistory().state_dict()))
    assert len(history) == 0
    assert history.select() == []
    want = direct_gram(rows_of(2, 0).rows)
    torch.testing.assert_close(history.joint_gram(rows_of(2, 0), []), want, rtol=1e-14, atol=0)  # in another order


def nbytes(history):
    return history._rows.nbytes + history._gram.nbytes


def test_forgotten_rows_give_their_memory_back():
    history = RowHistory()
    for when in range(10):
        history.forget(before=when)
        remember(history, rows_of(5, when), range(5 * when, 5 * when + 5), when)
        assert len(history) == 5
    assert nbytes(history) == history.max_nbytes(5, LAYOUT.numel, LAYOUT.num_layers, torch.float64)
    history.forget(before=9)
    assert history.rounds(history.select()) == [9] * 5
    history.forget(before=10)
    assert len(history) == 0


@pytest.mark.parametrize("capacity", [3, 12, 30])
def test_memory_stays_within_the_plan(capacity):
    history = RowHistory(capacity)
    for when in range(12):
        remember(history, rows_of(5, when), [(5 * when + 3 * k) % 30 for k in range(5)], when)
    assert 0 < nbytes(history) <= history.max_nbytes(capacity, LAYOUT.numel, LAYOUT.num_layers, torch.float64)
    history.clear()
    assert nbytes(history) == 0
    assert len(history) == 0


def test_reserved_rows_never_move_and_files_hold_those_in_use():
    history, places = RowHistory(30), set()
    history.reserve = 20
    for when in range(4):
        remember(history, rows_of(5, when), range(5 * when, 5 * when + 5), when)
        places.add((history._rows.data_ptr(), history._gram.data_ptr()))
        saved = [history.state_dict()[name].untyped_storage().nbytes() for name in ("rows", "gram")]
        assert sum(saved) == history.max_nbytes(5 * when + 5, 16, LAYOUT.num_layers, torch.float64)  # 1 to align
    assert len(places) == 1
    assert nbytes(history) == history.max_nbytes(20, LAYOUT.numel, LAYOUT.num_layers, torch.float64)


def test_only_some_rows_can_be_remembered():
    history, updates = RowHistory(), rows_of(4, 1)
    history.remember(updates, {1: 11, 3: 13}, 0)
    assert history.select() == [11, 13]
    new = rows_of(1, 2)
    torch.testing.assert_close(
        history.joint_gram(new, [13, 11]), direct_gram(torch.cat([new.rows, updates.rows[[3, 1]]]))
    )
    history.remember(updates, {}, 1)
    assert len(history) == 2
    other = rows_of(2, 3)  # not the rows whose products were computed last
    remember(history, other, [5, 6], 1)
    joint = torch.cat([new.rows, other.rows, updates.rows[[1]]])
    torch.testing.assert_close(history.joint_gram(new, [5, 6, 11]), direct_gram(joint))


def test_rows_that_do_not_fit_are_refused():
    history = RowHistory()
    remember(history, rows_of(2, 1), [0, 1], 0)
    other = ParamLayout.from_sizes([5, 9])
    for updates in (rows_of(2, 2, torch.float32), rows_of(2, 2, layout=other), rows_of(2, 2, layout=LAYOUT.merged())):
        with pytest.raises(ValueError, match="updates must match the remembered rows, 4 layers, 15 columns"):
            history.joint_gram(updates, [0])
        with pytest.raises(ValueError, match="updates must match"):
            remember(history, updates, [5, 6], 1)
    with pytest.raises(KeyError):
        history.joint_gram(rows_of(2, 2), [9])
    with pytest.raises(ValueError, match="capacity"):
        RowHistory(0)


def test_every_remembered_row_starts_at_a_boundary():
    history = RowHistory()
    for when in range(3):
        updates = rows_of(3, when, torch.float32)
        remember(history, updates, [3 * when + k for k in range(3)], when)
    restored = RowHistory()
    restored.load_state_dict(reload(history.state_dict()))
    for each in (history, restored):
        assert len(each._rows) >= 9
        assert all(row.data_ptr() % 64 == 0 for row in each._rows)
