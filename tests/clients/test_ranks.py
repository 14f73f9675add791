# SPDX-License-Identifier: Apache-2.0
"""Fits on several processes have the bits of one."""

import json
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import rank_session
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from process_families import free_port
from rank_runs import (
    SESSION,
    TORCHRUN,
    differences,
    environment,
    finished,
    folder_of,
    forked,
    results,
    session,
    started,
)

import fl_lightning as fl
from fl_lightning.core.processes import balanced_split
from fl_lightning.lightning.shared_by_ranks import unsynced_metrics
from fl_lightning.lightning.single_device import check_devices

QUICK = (
    "SCAFFOLD with FedLF", "Ditto", "FedMDFG", "FedPW behind a guard", "kept optimizers", "gathering",
    "failing client", "by hand: DecayAtLast",
)  # fmt: skip

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")]


def compared_with_one(folder, ranks, rounds, cases):
    """Runs fits on several processes, asserts that they have the bits of one process, and returns what both printed."""
    said = (forked if ranks == 2 else session)(folder, ranks, "fits", str(rounds), *cases)
    many = results(folder)
    assert len(many) == ranks
    alone = session(folder, 1, "fits", str(rounds), *cases)
    (one,) = results(folder)
    assert set(one) == set(cases)
    for rank in many:
        assert differences(one, rank) == {}
    return said, alone


@pytest.mark.parametrize(
    ("cases", "ranks", "rounds"),
    [
        (QUICK, 2, 2),
        pytest.param(tuple(rank_session.FITS), 3, 3, marks=pytest.mark.slow),
    ],
    ids=["2 ranks", "all cases on 3 ranks"],
)
def test_several_processes_have_the_bits_of_one(tmp_path, cases, ranks, rounds):
    many, one = (said.splitlines() for said in compared_with_one(tmp_path, ranks, rounds, cases))
    later = [many.count(f"STEP {rank} {rounds - 1}") for rank in range(ranks)]
    assert sum(later) == one.count(f"STEP 0 {rounds - 1}")
    assert all(later), "every rank evaluates some clients"


@pytest.mark.slow
def test_rates_that_are_set_by_hand_are_those_of_one_process(tmp_path):
    compared_with_one(tmp_path, 2, 3, [name for name in rank_session.FITS if name.startswith("by hand")])


@pytest.mark.slow
def test_two_machines(tmp_path):
    """Two agents of torchrun with one process each, as on two machines."""
    port, agents = str(free_port()), []
    for node in range(2):
        line = [sys.executable, *TORCHRUN, "--nnodes", "2", "--node_rank", str(node), "--nproc_per_node", "1"]
        line += ["--master_addr", "127.0.0.1", "--master_port", port, str(SESSION), str(folder_of(tmp_path))]
        agents.append(started(tmp_path, [*line, "2", "nodes"]))
    for agent in agents:
        finished(tmp_path, agent)
    one, two = results(tmp_path)
    session(tmp_path, 1, "fits", "3", "FedLF")
    assert differences(one, two) == differences(one, results(tmp_path)[0]) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 3, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_another_number_of_processes_goes_on_from_a_checkpoint(tmp_path, before, after):
    case = "SCAFFOLD with FedLF"
    (forked if before == 2 and after == 1 else session)(tmp_path, before, "save", case)
    files = [path.name for path in folder_of(tmp_path).iterdir() if ".ckpt" in path.name]
    assert sorted(files) == ["after-2.ckpt", "round-1.ckpt", "same.ckpt"]
    session(tmp_path, after, "resume", case)
    resumed = results(tmp_path)
    _, *whole = rank_session.trained(case, 1, rounds=4)
    assert all(differences({case: json.loads(json.dumps(whole))}, rank) == {} for rank in resumed)


def test_the_same_trainer_goes_on_with_more_rounds(tmp_path):
    forked(tmp_path, 2, "again")
    many = results(tmp_path)
    session(tmp_path, 1, "again")
    (one,) = results(tmp_path)
    assert one["round"] == 3
    assert many == [one, one]


@pytest.mark.slow
def test_evaluations_without_a_fit(tmp_path):
    said = session(tmp_path, 2, "alone")
    many = results(tmp_path)
    whole = session(tmp_path, 1, "alone").count("STEP")
    (one,) = results(tmp_path)
    assert many == [one, one]
    steps = [said.count(f"STEP {rank}") for rank in range(2)]
    assert sum(steps) == whole
    assert all(steps)


def test_shares_are_fair():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ranks = int(torch.randint(1, 9, (), generator=generator))
        costs = torch.randint(0, 50, (30,), generator=generator).tolist()
        shares = balanced_split(costs, ranks)
        assert sorted(client for share in shares for client in share) == [c for c, cost in enumerate(costs) if cost]
        loads = [sum(costs[client] for client in share) for share in shares]
        bound = max(sum(costs) / ranks, max(costs))
        assert max(loads) <= bound * (4 / 3 - 1 / (3 * ranks)) + 1e-9  # Graham 1969


@pytest.mark.slow
def test_a_program_without_a_file_is_refused(tmp_path):
    code = "import lightning as L, fl_lightning as fl; L.Trainer(devices=2, accelerator='cpu', strategy='federated')"
    for line in ([sys.executable, "-c", code], [sys.executable, "-i", "-c", code]):
        said = subprocess.run(line, env=environment(), input="", capture_output=True, text=True, cwd=tmp_path).stderr
        assert re.search(
            r"ValueError: .* must be run by a script, .* found (an interactive Python|a program without)", said
        )


def test_metrics_come_back_as_they_were():
    module = rank_session.Gathering(**rank_session.OPTIONS)
    before = [lambda: True, lambda: True]  # as where there are other processes
    module.acc.distributed_available_fn, module.both["a"].distributed_available_fn = before
    with unsynced_metrics(module):
        assert not module.acc.distributed_available_fn()
        assert not module.both["a"].distributed_available_fn()
    assert [metric.distributed_available_fn for metric in (module.acc, module.both["a"])] == before


@pytest.mark.parametrize("seconds", [0, -1])
def test_ranks_wait_for_some_time(seconds):
    with pytest.raises(ValueError, match="timeout of FederatedStrategy must be longer than 0 s, found"):
        fl.FederatedStrategy(timeout=timedelta(seconds=seconds))


def test_what_cannot_run_on_several_processes_is_refused(monkeypatch):
    cpu, mps = torch.device("cpu"), torch.device("mps", 0)
    check_devices([cpu] * 3, 3, LightningEnvironment())
    with pytest.raises(ValueError, match=r"MPS has one device, found .* 2 processes"):
        check_devices([mps], 2, LightningEnvironment())
    with pytest.raises(ValueError, match="runs on CPU, CUDA or MPS, found xla"):
        check_devices([torch.device("xla", 0)], 1, LightningEnvironment())
    monkeypatch.setattr(TorchElasticEnvironment, "world_size", lambda self: 4)
    with pytest.raises(ValueError, match=r"torchrun has started 4 processes, and Trainer\(devices=1, num_nodes=1\)"):
        check_devices([cpu], 1, TorchElasticEnvironment())
