# SPDX-License-Identifier: Apache-2.0
"""What ranks measure together, whichever of them raises: threads stand in for processes."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from test_column_rows import Network, Ranks
from torch import nn

from fl_lightning.core.errors import RankError
from fl_lightning.executors.ranks import RankedRunner

SIZES = (9, 2, 5, 7, 1, 4)


def on_ranks(work, doubts=(None, None, None)):
    """What each of three ranks returns or raises."""
    network = Network(3)

    def one(rank):
        clients = SimpleNamespace(
            module=nn.Linear(1, 1), trainer=SimpleNamespace(callbacks=[]), plans=object(),
            check_plans=lambda: doubts[rank], batches=SimpleNamespace(loaders=SimpleNamespace(sizes=SIZES)),
        )  # fmt: skip
        try:
            return work(RankedRunner(clients, Ranks(network, rank), None))
        except Exception as error:
            return error

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, range(3)))


def test_losses_are_measured_once_and_known_to_all():
    asked, measured = (4, 0, 3, 1, 5), []

    def measure(client):
        measured.append(client)
        return 10.0 * client

    assert on_ranks(lambda runner: runner.losses(asked, measure)) == [[10.0 * client for client in asked]] * 3
    assert sorted(measured) == sorted(asked)


def test_an_error_in_one_rank_is_one_in_all():
    def measure(client):
        if client == 3:
            raise ValueError("no loss")
        return 0.0

    found = on_ranks(lambda runner: runner.losses((0, 3, 5), measure))
    assert [(type(error), str(error)) for error in found] == [(ValueError, "no loss")] * 3


def test_what_one_rank_doubts_ends_the_fit_in_all():
    for error in on_ranks(lambda runner: runner.end_round(), (None, "two steps differ", None)):
        with pytest.raises(RankError, match="rank 1 cannot trust its planned steps, because two steps differ"):
            raise error
    assert on_ranks(lambda runner: runner.end_round()) == [None] * 3
