# SPDX-License-Identifier: Apache-2.0
"""What processes hold in columns comes back from a checkpoint, for any number of processes."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from fl_lightning.core.storage.kept import ColumnPart, for_columns, holds_parts, in_columns, joined
from fl_lightning.core.updates import Columns

TOTAL = 50_000
NAMES = ("momentum", "history.rows", "counts", "pair", "nothing", "absent", "history.absent")


def state():
    generator = torch.Generator().manual_seed(0)
    return {
        "momentum": torch.randn(TOTAL, generator=generator, dtype=torch.float64),
        "history": {"rows": torch.randn(3, TOTAL, generator=generator), "gram": torch.eye(3)},
        "counts": {4: torch.arange(TOTAL).to(torch.uint8), 7: torch.ones(TOTAL, dtype=torch.uint8)},
        "pair": (torch.zeros(TOTAL), [torch.ones(2, TOTAL)]),
        "nothing": torch.zeros(0, TOTAL, dtype=torch.float64),
        "empty": {},
        "round": 5,
    }


def same(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and all(map(same, one, two))
    return torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, torch.Tensor) else one == two


def shares(number):
    return [Columns(Columns.cut(TOTAL, number), share) for share in range(number)]


def written(number):
    """What each of so many processes has of the checkpoint that all of them save."""
    meeting, slots = Barrier(number), [None] * number

    def work(share):
        def exchange(mine, sizes):
            slots[share] = mine
            meeting.wait(20)
            found = list(slots)
            meeting.wait(20)
            return found

        columns = Columns(Columns.cut(TOTAL, number), share, exchange)
        marked = in_columns(for_columns(state(), NAMES, columns), NAMES, columns)
        assert holds_parts(marked) == (number > 1)
        return joined(marked)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(work, range(number)))


@pytest.mark.parametrize("before", [1, 2, 3, 9])
@pytest.mark.parametrize("after", [1, 2, 9])
def test_any_number_of_processes_reads_what_any_number_has_written(tmp_path, before, after):
    first, *others = written(before)
    torch.save(first, tmp_path / "a.ckpt")
    whole = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert same(whole, state())
    assert all(other["momentum"].numel() == other["history"]["rows"].numel() == 0 for other in others)
    assert all(other["pair"][1][0].numel() == 0 for other in others)
    for columns in shares(after):  # of seven slices, so that some of nine hold nothing
        expected = {name: value for name, value in state().items() if name in ("empty", "round")}
        mine = for_columns(whole, NAMES, columns)
        assert mine.items() >= expected.items()
        begin, end = columns.span
        assert torch.equal(mine["momentum"], state()["momentum"][begin:end])
        assert torch.equal(mine["history"]["rows"], state()["history"]["rows"][:, begin:end])
        assert torch.equal(mine["history"]["gram"], torch.eye(3))
        assert torch.equal(mine["pair"][1][0], torch.ones(2, end - begin))
        assert mine["nothing"].shape == (0, end - begin)
        assert torch.equal(mine["counts"][4], state()["counts"][4][begin:end])


def test_a_fit_goes_on_from_its_own_columns():
    for columns in shares(3):
        mine = for_columns(state(), NAMES, columns)
        marked = in_columns(mine, NAMES, columns)
        assert isinstance(marked["momentum"], ColumnPart)
        assert same(for_columns(marked, NAMES, columns), mine)


def test_a_rule_without_columns_is_left_as_it_is():
    columns = shares(2)[1]
    given = {"momentum": torch.zeros(TOTAL)}
    assert in_columns(given, None, columns) == for_columns(given, None, columns) == given
    for_columns(given, NAMES, columns)
    assert given["momentum"].shape == (TOTAL,), "what was given stays"
