# SPDX-License-Identifier: Apache-2.0
"""What the processes of a fit say to each other arrives, whoever comes first, and who does not come is named."""

import random
import sys
import warnings
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import rank_runs
import rank_talk
import torch
from rank_runs import results

from fl_lightning.core.errors import RankError
from fl_lightning.lightning.ranks import Ranks
from fl_lightning.lightning.shared_by_ranks import epoch_logs_quiet

TALK = rank_runs.SESSION.with_name("rank_talk.py")
SIZE = 3

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]


def said(out, what):
    rank_runs.forked(out, SIZE, what, program=TALK)
    return results(out)


def test_all_of_it_arrives(tmp_path):
    found = said(tmp_path, "talk")
    assert [one["place"] for one in found] == [[rank, rank, 0, SIZE, 1, f"cpu:{rank}"] for rank in range(SIZE)]
    for rank, one in enumerate(found):
        assert one["gathered"] == [{"of": other} for other in range(SIZE)]
        assert one["broadcast"] == ["of 0", "of 2"]
        assert one["parts"] == [[[0.0, 0.0]] * 2, [], [[2.0, 2.0]] * 3]
        assert one["columns"] == [[[column], [3.0 + column]] for column in (0.0, 1.0, 2.0)]
        assert one["exchanged"] == [True] * 4
        assert one["notes"] == [None, [[other, "x"] for other in range(SIZE)], None, None]
        everybody = [f"of {other}" for other in range(SIZE)]
        assert one["asked"] == [[everybody, *how] for how in ([False, False], [True, False], [False, True])]
        assert one["claimed"][2:] == [[], [], [0, 1, 2]]
        assert "asks for 4 processes, and this script has connected 3" in one["other number"]
        assert one["again"] == [False, [0, 1, 2]], rank
    for division in range(2):
        assert sorted(place for one in found for place in one["claimed"][division]) == list(rank_talk.PLACES)
    assert found[1]["waited"] == [False, True, True]
    own, words = found[1]["left"]
    assert own == "own"
    assert words.startswith("RankError: rank 1 has left the fit with an error of its own")


def test_all_begin_alike(tmp_path):
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    drawn = [torch.rand(2).tolist(), np.random.rand(2).tolist(), [random.random()]]
    module = [[[0.0] * 3] * 2, [10.0] * 4, True, True]
    for one in said(tmp_path, "share"):
        assert one["drawn"] == drawn
        assert one["module"] == module
        start = "ValueError: all ranks must have the same parameters and buffers, found that rank"
        assert one["shapes"] == (
            f"{start} 1 has ('weight', (3, 3), 'torch.float32') where rank 0 has ('weight', (2, 3), 'torch.float32')"
        )
        assert one["dtypes"].startswith(f"{start} 2 has ('weight', (2, 3), 'torch.float64') where rank 0 has")
        assert one["more"] == f"{start} 2 has ('more', (1,), 'torch.float32') where rank 0 has None"


@pytest.mark.parametrize(
    ("what", "place", "words"),
    [
        ("late", 2, "rank 2, which has not answered for 0:00:02 (timeout of FederatedStrategy)"),
        ("gone", 2, "rank 2, which has ended: its own output"),
        ("first", 0, "another process of this fit, which has ended"),
    ],
)
def test_who_does_not_come_is_named(tmp_path, what, place, words):
    for rank, one in enumerate(said(tmp_path, what)):
        if rank == place:
            assert one["why"] is None
        else:
            assert one["why"].startswith(f"RankError: rank {rank} of 3 waits for {words}"), one


def test_notes_that_cannot_be_reached_are_an_error_in_words(monkeypatch):
    ranks = object.__new__(Ranks)
    here, wait = SimpleNamespace(main_address="127.0.0.1"), timedelta(seconds=60)
    vars(ranks).update(rank=1, size=3, abandoned=False, _store=None, _timeout=wait, _environment=here, broadcast=int)

    def refuse(*_, **__):
        raise RuntimeError("no connection")

    monkeypatch.setattr("fl_lightning.lightning.ranks.TCPStore", refuse)
    with pytest.raises(RankError, match="rank 1 of 3 waits for another process of this fit, which has ended"):
        ranks._shared_store()


def test_advice_of_lightning_is_silent_for_a_while():
    words = "It is recommended to use `self.log('val', ..., sync_dist=True)` when logging on epoch level"
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with epoch_logs_quiet():
            warnings.warn(words, stacklevel=1)
            warnings.warn("another", stacklevel=1)
        warnings.warn(words, stacklevel=1)
        with epoch_logs_quiet():
            warnings.resetwarnings()
    assert [str(one.message) for one in heard] == ["another", words]
    assert list(warnings.filters) == before
