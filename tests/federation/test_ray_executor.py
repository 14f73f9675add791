# SPDX-License-Identifier: Apache-2.0
"""Clients on a local cluster of Ray with two cores: the bits of clients in turn, errors, and workers that die."""

import os
from pathlib import Path

import pytest
import torch
from resuming import Project, assert_equal
from support import Classifier, fresh, train, weights
from worker_processes import Failing

import fl_lightning as fl

ray = pytest.importorskip("ray", exc_type=ImportError)
RAY = fl.executors.Ray()


@pytest.fixture(autouse=True, scope="module")
def cluster():
    """On the loopback device alone; what actors import lies where the tests find it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray._private.services.ray_constants.ENABLE_RAY_CLUSTER = False
    paths = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=10**8, runtime_env=paths)
    yield
    ray.shutdown()


@pytest.mark.parametrize("name", ["FedAvg", "FedLF", "SCAFFOLD", "Ditto", "FedBN"])
def test_methods_give_the_same_bits(tmp_path, name):
    method, ends = getattr(fl.algorithms, name), []
    for executor in (None, RAY):
        strategy, options = {"executor": executor}, {"norm": True, "log": True, "dropout": 0.3}
        project = Project(method, options=options, strategy=strategy, trainer={"limit_val_batches": 0}, rounds=2)
        ends.append(project.fit(tmp_path))
    assert ends[1].strategy.executor_fallback is None
    assert_equal(ends[1], ends[0], 0)


def test_modules_of_no_importable_class_keep_what_they_gather():
    class Gathers(Classifier):
        seen = ()

        def training_step(self, batch, batch_idx):
            self.seen = (*self.seen, len(batch[1]))
            return super().training_step(batch, batch_idx) * len(self.seen)

    ends = [train(fresh(Gathers), 2, executor=executor) for executor in (None, RAY)]
    assert ends[1].strategy.executor_fallback is None
    assert ends[0].module.seen == ends[1].module.seen
    assert torch.equal(weights(ends[0].module), weights(ends[1].module))


def test_a_client_whose_actor_dies_is_left_out_and_another_actor_takes_its_place():
    found = []
    for how, executor, reason in (("raise", None, "no such batch"), ("exit", RAY, "Actor")):
        module = fresh(Failing, how=how)
        with pytest.warns(UserWarning, match=rf"client \d+ is left out of round 1: .*{reason}"):
            done = train(module, 3, executor=executor, clients_per_round=5, on_client_error="drop")
        assert done.strategy.executor_fallback is None
        found.append(weights(module))
    assert torch.equal(*found)


def test_a_client_that_raises_ends_the_fit_with_its_error():
    class Raises(Classifier):
        def training_step(self, batch, batch_idx):
            raise ArithmeticError("no such batch")

    with pytest.raises(fl.ClientError, match="ArithmeticError: no such batch") as caught:
        train(fresh(Raises), 1, executor=RAY)
    assert "in training_step" in str(caught.value.__cause__.__cause__)


def test_a_cluster_without_room_is_an_error():
    with pytest.raises(ValueError, match="num_cpus and num_gpus of Ray must be what the cluster has for one actor"):
        train(fresh(), 1, executor=fl.executors.Ray(num_gpus=1))
