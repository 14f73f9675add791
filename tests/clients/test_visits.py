# SPDX-License-Identifier: Apache-2.0
"""Visits to a copy of the fit, whatever carries them: here the smallest transport, a child per round and a file."""

import os
import pickle
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cases import in_turn
from plain_loop import client_batches
from resuming import Project, assert_equal
from support import Classifier, fit, fresh, weights

import fl_lightning as fl
from fl_lightning.clients.base import CohortRunner, Executor
from fl_lightning.clients.visits import Replays, Visits
from fl_lightning.core.seeding import derive_seed
from fl_lightning.data.cohort_samplers import UniformSampler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are made by fork")


@dataclass(frozen=True)
class Elsewhere(Executor):
    """Trains every round in one child process, the last client first."""

    folder: Path

    def runner(self, clients):
        return ElsewhereRunner(clients, self.folder / "outcomes")

    def rows(self, number, like):
        return fl.executors.Parallel().rows(number, like)


class ElsewhereRunner(CohortRunner):
    def __init__(self, clients, path):
        self._clients, self._path, self._replays = clients, path, Replays(clients)

    def begin_round(self, tasks):
        self._tasks, self._outcomes = list(tasks), None

    def train(self, task):
        if self._outcomes is None:
            self._outcomes = self._from_child()
        return self._replays.replay(task, self._outcomes.pop())

    def _from_child(self):
        self._clients.visits.look()
        child = os.fork()
        if child == 0:
            visits, tasks = Visits(self._clients), list(enumerate(self._tasks))
            with visits.recording():
                outcomes = [visits.visit(task, place) for place, task in reversed(tasks)]
            self._path.write_bytes(pickle.dumps(outcomes))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        return pickle.loads(self._path.read_bytes())


OPTIONS = {"norm": True, "dropout": 0.3, "log": True, "momentum": 0.5}


@pytest.mark.parametrize(
    ("method", "state"), in_turn([fl.algorithms.FedLF, fl.algorithms.SCAFFOLD, fl.algorithms.MOON], ["reset", "keep"])
)
def test_a_fit_with_visits_elsewhere_ends_as_one_without(tmp_path, method, state):
    ends = []
    for executor in (None, Elsewhere(tmp_path)):
        strategy = {"executor": executor, "client_optimizer_state": state}
        ends.append(Project(method, options=OPTIONS, strategy=strategy, rounds=3).fit(tmp_path))
    assert_equal(ends[1], ends[0], 0)
    assert ends[1].trainer.global_step > 0


class Warns(Classifier):
    def training_step(self, batch, batch_idx):
        warnings.warn("odd batch", UserWarning, stacklevel=1)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("always:odd batch")
def test_warnings_are_given_once_and_here(tmp_path):
    with pytest.warns(UserWarning, match="odd batch") as seen:
        fit(fresh(Warns), 1, executor=Elsewhere(tmp_path))
    ours = [warning for warning in seen if "odd batch" in str(warning.message)]
    assert {Path(warning.filename).name for warning in ours} == {Path(__file__).name}


def seed_of(place):
    """The seed of the client at a place of the first cohort."""
    chosen = UniformSampler().select(0, 3, client_batches().sizes, derive_seed(5, "sampler")).client_ids
    return derive_seed(5, "client", 0, chosen[place])


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        if torch.initial_seed() == seed_of(1):
            raise LookupError("the second client")
        return super().training_step(batch, batch_idx)


def test_an_error_is_raised_at_its_clients_turn(tmp_path):
    module = fresh(Fails)
    with pytest.raises(fl.ClientError, match="LookupError: the second client") as raised:
        fit(module, 1, executor=Elsewhere(tmp_path))
    assert 'raise LookupError("the second client")' in str(raised.value.__cause__.__cause__)
    assert torch.equal(weights(module), weights(fresh(Fails)))
