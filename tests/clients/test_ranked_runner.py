# SPDX-License-Identifier: Apache-2.0
"""What ranks measure together, whichever of them raises: threads stand in for processes."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import lightning as L
from test_column_rows import Network, Ranks

from fl_lightning.clients.ranks.ranked_runner import RankedRunner

SIZES = (9, 2, 5, 7, 1, 4)


class Unasked(Ranks):
    """Nobody is asked to end."""

    def until_asked(self, places):
        return iter(places)


def on_ranks(work, handed=None):
    """What each of three ranks returns or raises; with ``handed``, client rules keep state in columns."""
    network = Network(3)

    def one(rank):
        clients = SimpleNamespace(
            module=L.LightningModule(), trainer=SimpleNamespace(callbacks=[]),
            expected_cost=lambda task: task.cost,
            batches=SimpleNamespace(loaders=SimpleNamespace(sizes=SIZES)),
        )  # fmt: skip
        state = None if handed is None else SimpleNamespace(hand_out=handed.append)
        try:
            return work(RankedRunner(clients, Unasked(network, rank), None, state))
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


def test_state_goes_to_whoever_trains_its_client_even_without_a_step():
    tasks, handed = [SimpleNamespace(client_id=10 + k, cost=cost) for k, cost in enumerate((5, 0, 3, 0, 8))], []
    left = (1, 2, 3, 4)

    def places(runner):
        runner.begin_round(tasks)
        return list(runner._places(left))

    trained = on_ranks(places, handed=handed)
    assert sorted(place for mine in trained for place in mine) == list(left)
    assert handed == [{10 + place: rank for rank, mine in enumerate(trained) for place in mine}] * 3
