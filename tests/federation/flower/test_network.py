# SPDX-License-Identifier: Apache-2.0
"""A SuperLink and three SuperNodes in processes of their own: bits and kills."""

import importlib.util
from pathlib import Path

import lightning as L
import pytest
import torch
from process_families import family, until
from torch.utils.data import ConcatDataset

import fl_lightning as fl

pytest.importorskip("flwr")

from network import Network

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(900)]
APP = Path(__file__).parent / "network_app"
NAMES = ("first", "second", "third")


def task():
    """The app's own model and data."""
    spec = importlib.util.spec_from_file_location("network_task", APP / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Lossy(fl.data.CohortSampler):
    """All clients, of whom some drop out."""

    def __init__(self, lost):
        self.lost = lost

    def select(self, round, cohort_size, sizes, seed):  # noqa: A002
        return fl.data.Selection(tuple(range(cohort_size)), self.lost.get(round, ()))


def simulated(rounds=3, lost=None):
    """The state of the module after the same federation in a Trainer."""
    project = task()
    model, sizes = project.Model(), project.SIZES
    ends = torch.tensor(sizes).cumsum(0).tolist()
    data = fl.FederatedDataModule(
        torch.utils.data.DataLoader(ConcatDataset([project.samples(k) for k in range(3)]), project.BATCH, shuffle=True),
        [range(end - size, end) for end, size in zip(ends, sizes, strict=True)],
    )
    strategy = fl.FederatedStrategy(fl.algorithms.FedLF(), sampler=Lossy(lost or {}))
    trainer = L.Trainer(
        max_epochs=rounds, accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return model.state_dict()


@pytest.fixture
def network(tmp_path, monkeypatch):
    """Makes a network; everything in it has ended after the test."""
    monkeypatch.setenv(task().GATE, str(tmp_path / "gate"))
    with family() as processes:
        yield lambda: Network(tmp_path, processes)
    assert processes.members() == []


def nodes_of(network):
    """Starts the three SuperNodes."""
    return [network.supernode(name, client_id=k) for k, name in enumerate(NAMES)]


def assert_equal(network, expected):
    """The checkpoint of the server has these weights."""
    found = torch.load(network.folder / "run" / "last.ckpt", weights_only=True)["state_dict"]
    assert found.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert differing == [], network.logs()


def assert_completes(network, run):
    assert network.finish(run) == "finished:completed", f"{network.said(run)}\n{network.logs()}"


def test_a_supernode_that_dies_in_the_middle_of_a_round_comes_back_under_its_id(network):
    """Flower notices its death after two heartbeats; the two others' round counts."""
    net = network()
    net.superlink()
    nodes = nodes_of(net)
    (net.gate / "hold-1-1").touch()
    run = net.run(APP)
    until((net.gate / "begun-1-1").exists, 300, "client 1 trains in the second round", net.logs)
    net.kill(nodes[1])
    (net.gate / "hold-1-1").unlink()
    net.supernode("second", client_id=1)
    assert_completes(net, run)
    assert "client 1 is left out of round 1" in net.said(run)
    assert (net.gate / "begun-1-2").exists()
    assert_equal(net, simulated(lost={1: (1,)}))


def test_another_run_goes_on_where_a_superlink_was_killed(network):
    """The SuperLink and its run die; SuperNodes wait and connect to the next SuperLink with the same database."""
    net = network()
    link = net.superlink()
    nodes = nodes_of(net)
    (net.gate / "hold-0-1").touch()
    net.run(APP)
    until((net.gate / "begun-0-1").exists, 300, "client 0 trains in the second round", net.logs)
    net.kill(link)
    (net.gate / "hold-0-1").unlink()
    net.superlink()
    run = net.run(APP)
    assert_completes(net, run)
    assert [node.poll() for node in nodes] == [None] * 3
    assert "1 of 3 rounds are done" in net.said(run)
    assert_equal(net, simulated())
