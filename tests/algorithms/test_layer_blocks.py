# SPDX-License-Identifier: Apache-2.0
"""Which rows FedLF tries for a layer without a direction, by the calls that ask for one."""

import pytest
import torch

from fl_lightning.algorithms._shared.layer_blocks import BlockSolver, joined_blocks
from fl_lightning.algorithms._shared.rows import Directions

ONLINE, REMEMBERED = 2, 4
ROWS = ONLINE + REMEMBERED


def tried(sizes, fair=True, merge=True, works=None):
    """What was tried for layers without a direction, as (fair row, remembered rows), and the blocks in the end."""
    calls = []

    def descend(gram, with_fair, history):
        calls.append((with_fair, history))
        found = (with_fair, history) == works
        coeff = torch.full((1, ROWS), float(found), dtype=torch.float64)
        return Directions(coeff, torch.tensor([found]), torch.tensor([with_fair]))

    layers = len(sizes)
    starts = [sum(sizes[:layer]) for layer in range(layers + 1)]
    gram = torch.eye(ROWS, dtype=torch.float64).expand(layers, -1, -1)
    nothing = torch.zeros(layers, dtype=torch.bool)
    found = Directions(torch.zeros(layers, ROWS, dtype=torch.float64), nothing, nothing)
    solve = BlockSolver(descend, ONLINE, fair)
    return calls, joined_blocks(gram, found, starts, solve, merge)


@pytest.mark.parametrize(
    ("columns", "fair", "fitting"),
    [(5, True, 2), (5, False, 3), (6, True, 3), (4, True, 1), (3, True, 0), (1, True, 0)],
)
def test_the_fair_row_takes_a_column_of_those_that_remembered_rows_must_fit_in(columns, fair, fitting):
    calls, _ = tried([columns], fair, works=(False, fitting))
    with_fair = [(True, REMEMBERED), (True, fitting)] if fair else [(False, REMEMBERED)]
    assert calls == [*with_fair, (False, fitting)]


def test_layers_that_were_joined_have_the_columns_of_both():
    calls, (block,) = tried([2, 3], works=(True, 2))
    each = [(True, REMEMBERED), (True, 0), (False, 0)]
    assert calls == [*each, *each, (True, REMEMBERED), (True, 2)]
    assert (block.layers, block.size, block.solved, block.flagged) == ((0, 1), 5, True, True)
    assert torch.equal(block.gram, 2 * torch.eye(ROWS, dtype=torch.float64))


@pytest.mark.parametrize("works", [(True, 0), (False, 0), None])
def test_remembered_rows_are_all_left_out_where_no_layer_is_left_to_join(works):
    calls, (block,) = tried([6], works=works)
    once = [(True, REMEMBERED), (True, 3), (False, 3)]
    last = [(True, 0)] if works == (True, 0) else [(True, 0), (False, 0)]
    assert calls == [*once, *once, *last]
    assert block.solved == (works is not None)
    assert block.coeff.any() == (works is not None)


def test_layers_stay_apart_where_they_may_not_be_joined():
    _, blocks = tried([6, 6], merge=False, works=(True, 0))
    assert [block.layers for block in blocks] == [(0,), (1,)]
    assert all(block.solved for block in blocks)
